"""Adapters of one linear of a fused block: laid out by slot, and added inside the block's own products."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from enginectl.errors import OutOfMemoryError
from enginectl.interfaces.ops import LowRankSlots

if TYPE_CHECKING:
    from enginectl_attention_cpu.ops import CpuBlock

LINEARS = {"qkv": 0, "output": 1, "gate_up": 2, "down": 3}
"""As block.hpp numbers them."""


class Packed(NamedTuple):
    """rank: 0 where an adapter leaves the linear alone, with no weights then."""

    rank: int
    weights: Tensor | None


class CpuLowRank(LowRankSlots):
    """The memory is the op set's."""

    def __init__(self, block: CpuBlock, linear: str, num_slots: int, max_rank: int, out_sizes: Sequence[int]) -> None:
        self._block = block
        self._linear = LINEARS[linear]
        self._out_sizes = list(out_sizes)
        library = self._library = block.ops.library
        self._write = library.ectl_block_write_low_rank
        sizes = (c_int32 * len(self._out_sizes))(*self._out_sizes)
        status = library.ectl_block_make_low_rank(
            block.ops.handle, block.handle, block.code, self._linear, num_slots, max_rank, len(self._out_sizes), sizes
        )
        if status:
            raise OutOfMemoryError("no memory for adapters; lower --max-loras or --max-lora-rank")

    def prepare(self, parts: Sequence[tuple[Tensor, Tensor] | None] | None) -> Packed:
        """Parts of lower rank than the highest are filled up with zeros."""
        own = parts or ()
        found = [part for part in own if part is not None]
        if not found:
            return Packed(0, None)
        block, rank, in_size = self._block, max(down.shape[0] for down, _ in found), found[0][0].shape[1]
        down = torch.zeros(len(own), rank, in_size, dtype=block.dtype)
        up = torch.zeros(sum(self._out_sizes), rank, dtype=block.dtype)
        for part, first, last in zip(own, down, torch.split(up, self._out_sizes), strict=True):
            if part is not None:
                first[: part[0].shape[0]] = part[0]
                last[:, : part[1].shape[1]] = part[1]
        library, of = self._library, (block.handle, block.code, self._linear)
        packed = torch.empty(library.ectl_block_packed_low_rank_bytes(*of, rank), dtype=torch.uint8)
        library.ectl_block_pack_low_rank(*of, rank, down.data_ptr(), up.data_ptr(), packed.data_ptr())
        return Packed(rank, packed)

    def write(self, slot: int, prepared: Packed) -> None:
        """One copy."""
        weights, block = prepared.weights, self._block
        address = None if weights is None else weights.data_ptr()
        self._write(block.handle, block.code, self._linear, slot, prepared.rank, address)
