"""The GGUF container: metadata and tensor directory, read without touching the weights. Imports no torch.

The `gguf` package's own reader makes one array per token of the vocabulary and takes seconds to open a file; this one
takes milliseconds. Dequantisation stays with `gguf.quants`.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from enginectl.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_BYTES: np.dtype[Any] = np.dtype("u1")
_PLAIN: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F64": np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of the directory. kind: ggml's name of the type, such as "Q4_1". shape: rows first, as in torch."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def quantised(self) -> bool:
        """Whether the values must be dequantised; plain floats are not."""
        return self.kind not in _PLAIN


class GGUFFile:
    """An opened file. metadata: key to value, arrays as lists. tensors: in file order, by name.

    Raises ModelError for a file that is damaged, cut off, or of a version or tensor type that is not known.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read_directory()
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
        except (ValueError, struct.error, KeyError, UnicodeDecodeError, IndexError) as error:
            raise ModelError(f"{path}: the GGUF header is damaged or cut off ({error})") from error

    def raw(self, tensor: GGUFTensor) -> NDArray[Any]:
        """The stored values, mapped: rows of plain floats (BF16 as uint16), or rows of quantised bytes (uint8)."""
        dtype: np.dtype[Any] = _PLAIN.get(tensor.kind, _BYTES)
        flat: NDArray[Any] = np.frombuffer(self._data, dtype, tensor.num_bytes // dtype.itemsize, tensor.offset)
        if not tensor.quantised:
            return flat.reshape(tensor.shape)
        return flat.reshape(*tensor.shape[:-1], -1)

    def _read_directory(self) -> None:
        if self._data[:4] != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file: it starts with {self._data[:4]!r}")
        version, num_tensors, num_keys = struct.unpack_from("<IQQ", self._data, 4)
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version}; versions 2 and 3 (little-endian) can be read")
        at = 24
        for _ in range(num_keys):
            key, at = self._string(at)
            (kind,) = struct.unpack_from("<I", self._data, at)
            self.metadata[key], at = self._value(kind, at + 4)
        if self.metadata.get("split.count", 1) > 1:
            raise ModelError(
                f"{self.path}: one of {self.metadata['split.count']} parts; split GGUF files are not supported. "
                "Merge them with llama-gguf-split --merge"
            )
        entries = []
        for _ in range(num_tensors):
            entry, at = self._tensor_entry(at)
            entries.append(entry)
        alignment = int(self.metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT))
        start = -(-at // alignment) * alignment
        for name, shape, kind, offset in entries:
            self.tensors[name] = self._tensor(name, shape, kind, start + offset)

    def _string(self, at: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._data, at)
        end = at + 8 + length
        if end > len(self._data):
            raise ValueError(f"a string of {length} bytes at {at} runs past the end")
        return self._data[at + 8 : end].decode("utf-8", "surrogateescape"), end

    def _value(self, kind: int, at: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._string(at)
        if kind == _ARRAY:
            return self._array(at)
        code = "<" + _SCALARS[kind]
        (value,) = struct.unpack_from(code, self._data, at)
        return _shortest(value) if kind == 6 else value, at + struct.calcsize(code)

    def _array(self, at: int) -> tuple[list[Any], int]:
        kind, count = struct.unpack_from("<IQ", self._data, at)
        at += 12
        if kind in _SCALARS:
            code = f"<{count}{_SCALARS[kind]}"
            if at + struct.calcsize(code) > len(self._data):
                raise ValueError(f"an array of {count} values at {at} runs past the end")
            return list(struct.unpack_from(code, self._data, at)), at + struct.calcsize(code)
        values = []
        for _ in range(count):
            value, at = self._value(kind, at)
            values.append(value)
        return values, at

    def _tensor_entry(self, at: int) -> tuple[tuple[str, tuple[int, ...], int, int], int]:
        name, at = self._string(at)
        (num_dims,) = struct.unpack_from("<I", self._data, at)
        *dims, kind, offset = struct.unpack_from(f"<{num_dims}QIQ", self._data, at + 4)
        return (name, tuple(reversed(dims)), kind, offset), at + 4 + 8 * num_dims + 12

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        try:
            quantisation = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise ModelError(
                f"{self.path}: tensor {name!r} has the unknown type {kind}; a newer `gguf` package may know it"
            ) from None
        values_per_block, bytes_per_block = gguf.GGML_QUANT_SIZES[quantisation]
        num_bytes = int(np.prod(shape, dtype=np.int64)) // values_per_block * bytes_per_block
        if offset + num_bytes > len(self._data):
            raise ModelError(
                f"{self.path}: cut off: tensor {name!r} ends at byte {offset + num_bytes} of {len(self._data)}. "
                "Copy or download this file again"
            )
        return GGUFTensor(name, quantisation.name, shape, offset, num_bytes)


def gguf_path(path: Path) -> Path:
    """The one GGUF file meant by a path. Raises ModelError if a directory holds none or several."""
    if not path.is_dir():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ModelError(f"{path}: expected exactly one .gguf file, found {found}. Name the file itself")
    return files[0]


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))
