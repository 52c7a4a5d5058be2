"""What is derived from a GGUF file once and kept: dequantised weights and the converted tokenizer.

`$XDG_CACHE_HOME/enginectl/gguf/<hash of the path>/<hash of size and time>-…`: a changed file finds nothing, and its old
entries are removed when new ones are written. Writes go to a temporary name and are renamed, so that a reader in another
process sees all or nothing. A cache that cannot be written costs time, never correctness.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from enginectl.builtin.weights.safetensors_file import DTYPE_NAMES, read_header
from enginectl.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_SPARE_BYTES = 1 << 30
_ABANDONED_S = 3600.0
_CODES = {name: code for code, name in DTYPE_NAMES.items()}


def cache_root() -> Path:
    """Where caches of this user live. Raises RuntimeError if there is no home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "enginectl" / "gguf"


class GGUFCache:
    """The entries of one source file."""

    def __init__(self, source: Path) -> None:
        stat = source.stat()
        self._stamp = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
        self._source = source
        try:
            root: Path | None = cache_root()
        except RuntimeError:
            root = None
        key = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()[:16]
        self._directory = None if root is None else root / key

    def find_weights(self, dtype: str) -> Path | None:
        """The dequantised copy in this dtype, if there is a whole one."""
        path = self._entry(f"{dtype}.safetensors")
        if path is None or not path.is_file():
            return None
        try:
            read_header(path)
        except ModelError:
            return None
        return path

    def write_weights(
        self, dtype: str, shapes: dict[str, tuple[int, ...]], tensors: Iterable[tuple[str, Tensor]]
    ) -> Path | None:
        """Write a copy, one tensor at a time. tensors come in the order of shapes. None if it cannot be written."""
        path = self._entry(f"{dtype}.safetensors")
        if path is None:
            logger.warning("%s: no home directory, so the dequantised weights are not kept", self._source)
            return None
        header, num_bytes = _header(dtype, shapes)

        def write(temporary: Path) -> None:
            _need_space(temporary.parent, num_bytes)
            with temporary.open("wb") as file:
                file.write(header)
                _write_tensors(file, tensors)

        return self._publish(path, write, "dequantised weights")

    def tokenizer_dir(self, version: str, convert: Callable[[Path], None]) -> Path:
        """The converted tokenizer, made by `convert(directory)` if there is none by this version of the converter.

        Where the cache cannot be written it is a temporary directory that lives as long as this process.
        """
        path = self._entry(f"tokenizer-{version}")
        if path is not None and path.is_dir():
            return path

        def write(temporary: Path) -> None:
            temporary.mkdir()
            convert(temporary)

        published = None if path is None else self._publish(path, write, "converted tokenizer")
        if published is not None:
            return published
        scratch = Path(tempfile.mkdtemp(prefix="enginectl-tokenizer-"))
        convert(scratch)
        return scratch

    def _entry(self, name: str) -> Path | None:
        return None if self._directory is None else self._directory / f"{self._stamp}-{name}"

    def _publish(self, path: Path, write: Callable[[Path], None], what: str) -> Path | None:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._prune(path.parent)
            write(temporary)
            with contextlib.suppress(FileExistsError):
                _rename(temporary, path)
        except OSError as error:
            logger.warning("%s: the %s are not kept, so every start makes them again: %s", self._source, what, error)
            return None
        finally:
            _remove(temporary)
        return path

    def _prune(self, directory: Path) -> None:
        """Drop what older versions of the source and killed writers left. Copies that are mapped somewhere stay valid."""
        for entry in directory.iterdir():
            abandoned = entry.name.startswith(".") and time.time() - entry.stat().st_mtime > _ABANDONED_S
            if abandoned or not entry.name.startswith((".", self._stamp)):
                _remove(entry)


def _rename(temporary: Path, path: Path) -> None:
    """Give a finished entry its name; a directory that another process finished first is left as it is."""
    if temporary.is_dir() and path.exists():
        raise FileExistsError(path)
    temporary.replace(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _need_space(directory: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < num_bytes + _SPARE_BYTES:
        raise OSError(f"{num_bytes / 2**30:.1f} GiB needed and {free / 2**30:.1f} GiB free in {directory}")


def _header(dtype: str, shapes: dict[str, tuple[int, ...]]) -> tuple[bytes, int]:
    """Safetensors header for contiguous tensors of one dtype, and the bytes that follow it."""
    item_bytes = {"float32": 4, "float16": 2, "bfloat16": 2}[dtype]
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + item_bytes * math.prod(shape)
        entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _write_tensors(file: BinaryIO, tensors: Iterable[tuple[str, Tensor]]) -> None:
    import torch

    for _, tensor in tensors:
        file.write(tensor.contiguous().view(torch.uint8).numpy().data)
