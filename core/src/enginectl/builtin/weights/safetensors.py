"""Hugging Face directories: config.json, and one safetensors file or an index with shards. Tensors are memory-mapped."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors

from enginectl.builtin.weights.safetensors_file import DTYPE_NAMES, REFETCH, StoredTensor, read_header, read_json
from enginectl.errors import ModelError
from enginectl.interfaces.weights import Checkpoint, WeightsSource

if TYPE_CHECKING:
    from torch import Tensor

_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


def iterate_file(path: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Memory-mapped tensors of one file. Raises ModelError naming the file if it cannot be mapped."""
    try:
        with safetensors.safe_open(str(path), framework="pt", device="cpu") as file:
            for name in names:
                yield name, file.get_tensor(name)
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(f"{path}: cannot be mapped: {error}. {REFETCH}") from error


class SafetensorsCheckpoint(Checkpoint):
    """An opened directory: configuration and every shard's header read, every length checked, nothing mapped yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / "config.json")
        self._names_by_file = _names_by_file(path)
        self._stored: dict[str, StoredTensor] = {}
        for file, names in self._names_by_file.items():
            header = read_header(file)
            missing = [name for name in names if name not in header]
            if missing:
                raise ModelError(
                    f"{file}: lacks {len(missing)} tensors that {_INDEX} places there, such as {missing[0]!r}"
                )
            names[:] = names or list(header)
            self._stored.update((name, header[name]) for name in names)
        if not self._stored:
            raise ModelError(f"{path}: the safetensors files hold no tensors")

    @property
    def dtype(self) -> str:
        sizes: Counter[str] = Counter()
        for tensor in self._stored.values():
            sizes[tensor.dtype] += math.prod(tensor.shape)
        code = sizes.most_common(1)[0][0]
        return DTYPE_NAMES.get(code, code.lower())

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self._stored.values())

    @property
    def generation_config(self) -> dict[str, Any]:
        file = self.path / "generation_config.json"
        return read_json(file) if file.exists() else {}

    def tokenizer_dir(self) -> Path | None:
        return self.path if any((self.path / name).exists() for name in _TOKENIZER_FILES) else None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for file, names in self._names_by_file.items():
            yield from iterate_file(file, names)


def _names_by_file(path: Path) -> dict[Path, list[str]]:
    """Shards in order with the tensors the index gives them; an empty list means all the file holds."""
    index = path / _INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index}: has no weight_map from tensor names to files")
        shards: dict[Path, list[str]] = {path / str(shard): [] for shard in sorted(set(weight_map.values()))}
        for name, shard in weight_map.items():
            shards[path / str(shard)].append(name)
        missing = [shard.name for shard in shards if not shard.exists()]
        if missing:
            raise ModelError(f"{path}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing)}")
        return shards
    single = path / "model.safetensors"
    files = [single] if single.exists() else sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "no .safetensors file"
        raise ModelError(f"{path}: expected model.safetensors, or {_INDEX} and its shards; found {found}")
    return {files[0]: []}


class SafetensorsSource(WeightsSource):
    """Directories with a config.json and safetensors files."""

    def matches(self, path: Path) -> bool:
        if not (path / "config.json").is_file():
            return False
        return (path / _INDEX).is_file() or any(path.glob("*.safetensors"))

    def open(self, path: Path) -> SafetensorsCheckpoint:
        return SafetensorsCheckpoint(path)
