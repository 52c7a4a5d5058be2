"""The built library: its functions, their types, and the structures they take."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

from enginectl.errors import OutOfMemoryError
from enginectl_attention_cpu.build import FLAGS, library_path

log = logging.getLogger("enginectl.cpu")

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Layer(Structure):
    """One attention call of the model; see attention.hpp."""

    _fields_ = (
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "v_head_dim", "block_size", "group")),
        *((name, c_int32) for name in ("window", "chunk")),
        *((name, c_float) for name in ("scale", "soft_cap")),
        *((name, c_void_p) for name in ("keys", "values", "next")),
    )


class Step(Structure):
    """One step's rows; see attention.hpp."""

    _fields_ = (
        *((name, c_int32) for name in ("num_seqs", "num_tokens")),
        *((name, c_void_p) for name in ("query_start", "seq_lens", "block_tables", "slots")),
        *((name, c_int64) for name in ("table_group", "table_row", "slot_group")),
    )


class Shape(Structure):
    """The structure of a block; see block.hpp."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in ("hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim", "rotary_dim", "gelu")
        ),
        ("plus_one", c_int32),
        *((name, c_float) for name in ("eps", "residual_scale")),
    )


class Weights(Structure):
    """Addresses of a block's tensors, None where it has none; see block.hpp."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in (
            "qkv",
            "qkv_bias",
            "output",
            "output_bias",
            "gate_up",
            "gate_up_bias",
            "down",
            "down_bias",
            "attention_norm",
            "attention_post_norm",
            "mlp_norm",
            "mlp_post_norm",
            "q_norm",
            "k_norm",
        )
    )


_P, _I, _L, _F = c_void_p, c_int, c_int64, c_float

_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "ectl_op_set": (_P, (_I,)),
    "ectl_op_set_free": (None, (_P,)),
    "ectl_linear": (_P, (_P, _I, _P, _P, _I, _I)),
    "ectl_linear_run": (_I, (_P, _P, _I, _P, _I, _P)),
    "ectl_linear_free": (None, (_P, _I)),
    "ectl_rms_norm": (_I, (_P, _I, _P, _P, _F, _I, _I, _P)),
    "ectl_block": (_P, (_P, _I, POINTER(Shape), POINTER(Weights))),
    "ectl_block_before": (_I, (_P, _P, _I, _P, _P, _P, _I, _P, _P)),
    "ectl_block_after": (_I, (_P, _P, _I, _P, _P, _I, _P)),
    "ectl_block_make_low_rank": (_I, (_P, _P, _I, _I, _I, _I, _I, _P)),
    "ectl_block_packed_low_rank_bytes": (ctypes.c_size_t, (_P, _I, _I, _I)),
    "ectl_block_pack_low_rank": (None, (_P, _I, _I, _I, _P, _P, _P)),
    "ectl_block_write_low_rank": (None, (_P, _I, _I, _I, _I, _P)),
    "ectl_block_free": (None, (_P, _I)),
    "ectl_head": (_P, (_P, _I, _P, _P, _I, _I, _F, _I)),
    "ectl_head_logits": (_I, (_P, _P, _I, _P, _I, _P)),
    "ectl_head_greedy": (_I, (_P, _P, _I, _P, _I, _P)),
    "ectl_head_free": (None, (_P, _I)),
    "ectl_attention": (_P, (_I,)),
    "ectl_attention_free": (None, (_P,)),
    "ectl_prefer_huge_pages": (None, (_P, ctypes.c_size_t)),
    "ectl_write_kv": (_I, (_P, _P, _P, _I, _P, _L, _L, _P, _L, _L)),
    "ectl_attend": (_I, (_P, _P, _P, _I, _P, _L, _L, _P, _P)),
}


@functools.cache
def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def load_library(flags: Sequence[str] = FLAGS) -> ctypes.CDLL:
    """Build it if need be, and open it. Raises UnsupportedError with the reason.

    flags: for the compiler, to build for less than this CPU has.
    """
    path, seconds = library_path(flags=flags)
    if seconds:
        log.info("built the CPU kernels in %.1f s: %s", seconds, path)
    return _open(path)


def made(handle: int | None, what: str) -> int:
    """A handle that the library returned. Raises OutOfMemoryError if it returned none."""
    if handle is None:
        raise OutOfMemoryError(f"no memory for {what}; use a smaller model, or leave other programs less")
    return handle


def check(status: int) -> None:
    """Raise what a call that failed means."""
    if status:
        raise OutOfMemoryError("no memory for a step's intermediate rows; lower --max-num-batched-tokens")
