"""The safetensors container: headers read and checked against the file's length. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginectl.errors import ModelError

DTYPE_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Safetensors dtype codes to torch's names."""

REFETCH = "Copy or download this file again"
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a file's header describes it. dtype is the safetensors code."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, checked against its length. Raises ModelError for a damaged file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or header_bytes > min(_MAX_HEADER_BYTES, size - 8):
                raise ModelError(f"{path}: not a safetensors file, or its header is cut off ({size} bytes). {REFETCH}")
            header = json.loads(file.read(header_bytes))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _stored(entry) for name, entry in entries.items()}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{path}: the safetensors header is damaged ({error}). {REFETCH}") from error
    if size != 8 + header_bytes + end:
        raise ModelError(f"{path}: {size} bytes long where its header says {8 + header_bytes + end}. {REFETCH}")
    return tensors


def _stored(entry: dict[str, Any]) -> StoredTensor:
    start, end = entry["data_offsets"]
    return StoredTensor(str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), int(end) - int(start))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or ModelError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
