"""GGUF files as checkpoints: configuration from metadata, tensors dequantised under their Hugging Face names."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from enginectl.builtin.weights.gguf_cache import GGUFCache
from enginectl.builtin.weights.gguf_config import generation_config, gguf_architecture, hf_config
from enginectl.builtin.weights.gguf_file import GGUFFile, GGUFTensor, gguf_path
from enginectl.builtin.weights.gguf_names import permuted_heads, tensor_names, undo_permutation
from enginectl.builtin.weights.safetensors import iterate_file
from enginectl.builtin.weights.safetensors_file import read_header
from enginectl.errors import ConfigError, ModelError
from enginectl.interfaces.weights import Checkpoint, WeightsSource

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_CHUNK_VALUES = 1 << 20
"""Values dequantised at once: the float32 intermediate then fits a core's cache share."""


class GGUFCheckpoint(Checkpoint):
    """An opened GGUF file: metadata and tensor directory read, weights mapped but not touched.

    dtype: what tensors come in. The one asked for; else the file's float type, or bfloat16 for a quantised file.
    """

    def __init__(self, path: Path, dtype: str | None = None, num_threads: int = 1) -> None:
        self.path = path
        self._file = GGUFFile(path)
        self._arch = gguf_architecture(self._file)
        self.config = hf_config(self._file)
        self._names = tensor_names(path, self._arch, self.config, self._file.tensors)
        self._dtype = dtype or _natural_dtype(self._file)
        self._num_threads = num_threads
        self._cache = GGUFCache(path)
        self.config["dtype"] = self._dtype
        self._check_decodable()

    @property
    def dtype(self) -> str:
        return self._dtype

    @property
    def num_bytes(self) -> int:
        return sum(self._file.tensors[name].num_bytes for name in self._names)

    @property
    def generation_config(self) -> dict[str, Any]:
        return generation_config(self._file)

    def tokenizer_dir(self) -> Path | None:
        if "tokenizer.ggml.model" not in self._file.metadata:
            return None
        # The version without the import, which takes a second: a converted tokenizer needs no transformers.
        return self._cache.tokenizer_dir(metadata.version("transformers"), self._convert_tokenizer)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Plain files are read in place. Quantised ones are dequantised once per dtype and then mapped from the cache."""
        if not any(self._file.tensors[name].quantised for name in self._names):
            yield from self._decode_all()
            return
        copy = self._cache.find_weights(self._dtype)
        if copy is None:
            shapes = {hf_name: self._file.tensors[name].shape for name, hf_name in self._names.items()}
            copy = self._cache.write_weights(self._dtype, shapes, self._decode_all())
        if copy is None:
            yield from self._decode_all()
        else:
            yield from iterate_file(copy, list(read_header(copy)))

    def _decode_all(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors in file order, decoded by a few threads that keep at most two tensors each ahead of the reader."""
        pending: deque[tuple[str, Future[Tensor]]] = deque()
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="gguf") as pool:
            for name, hf_name in self._names.items():
                pending.append((hf_name, pool.submit(self._decode, self._file.tensors[name], hf_name)))
                if len(pending) > 2 * self._num_threads:
                    done, future = pending.popleft()
                    yield done, future.result()
            for done, future in pending:
                yield done, future.result()

    def _decode(self, tensor: GGUFTensor, hf_name: str) -> Tensor:
        raw = self._file.raw(tensor)
        num_heads = permuted_heads(self._arch, self.config, hf_name)
        if num_heads is not None:
            raw = undo_permutation(raw, num_heads)
        values = self._dequantise(tensor, raw) if tensor.quantised else _plain(tensor, raw)
        if self._arch.norm_offset and hf_name.endswith("norm.weight"):
            values = values.to(torch.float32) - self._arch.norm_offset
        return values.to(_DTYPES[self._dtype])

    def _dequantise(self, tensor: GGUFTensor, raw: np.ndarray[Any, Any]) -> Tensor:
        kind = gguf.GGMLQuantizationType[tensor.kind]
        rows = raw.reshape(-1, raw.shape[-1])
        out = torch.empty(tensor.shape, dtype=_DTYPES[self._dtype])
        by_row = out.view(-1, tensor.shape[-1])  # [rows, columns]
        step = max(1, _CHUNK_VALUES // tensor.shape[-1])
        for start in range(0, rows.shape[0], step):
            values = gguf.quants.dequantize(rows[start : start + step], kind)
            by_row[start : start + step] = torch.from_numpy(np.ascontiguousarray(values))
        return out

    def _check_decodable(self) -> None:
        kinds = {self._file.tensors[name].kind for name in self._names if self._file.tensors[name].quantised}
        for name in sorted(kinds):
            block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
            try:
                gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), gguf.GGMLQuantizationType[name])
            except NotImplementedError as error:
                raise ModelError(f"{self.path}: the `gguf` package cannot dequantise {name} tensors") from error

    def _convert_tokenizer(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(self.path.parent), gguf_file=self.path.name)
        except (ValueError, KeyError, NotImplementedError, ImportError, TypeError, OSError) as error:
            raise ModelError(
                f"{self.path}: transformers cannot convert its tokenizer ({error}). "
                "Give a directory with the model's tokenizer files: --tokenizer DIRECTORY"
            ) from error
        tokenizer.save_pretrained(str(directory))


def _plain(tensor: GGUFTensor, raw: np.ndarray[Any, Any]) -> Tensor:
    """Stored floats as a tensor of its own memory."""
    values = torch.from_numpy(raw.copy())
    return values.view(torch.bfloat16) if tensor.kind == "BF16" else values


def _natural_dtype(file: GGUFFile) -> str:
    """bfloat16 for quantised files, else the float type that most values have."""
    if any(tensor.quantised for tensor in file.tensors.values()):
        return "bfloat16"
    bytes_by_kind: Counter[str] = Counter()
    for tensor in file.tensors.values():
        bytes_by_kind[tensor.kind] += tensor.num_bytes
    return _FLOATS.get(bytes_by_kind.most_common(1)[0][0], "float32")


class GGUFSource(WeightsSource):
    """A .gguf file, or a directory that holds exactly one.

    dtype: what weights are dequantised to, None for each file's own. num_threads: threads that dequantise.
    """

    def __init__(self, dtype: str | None = None, num_threads: int = 1) -> None:
        if dtype is not None and dtype not in _DTYPES:
            raise ConfigError(f"GGUF weights cannot be dequantised to {dtype!r}; known: {', '.join(sorted(_DTYPES))}")
        self._dtype = dtype
        self._num_threads = max(1, num_threads)

    def matches(self, path: Path) -> bool:
        if path.is_dir():
            return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
        return path.is_file() and (path.suffix == ".gguf" or _has_magic(path))

    def open(self, path: Path) -> GGUFCheckpoint:
        return GGUFCheckpoint(gguf_path(path), self._dtype, self._num_threads)


def _has_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False
