"""Weights of one linear by slot for the Triton kernels, and their launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from enginectl_lora_sgmv.kernels import expand_kernel, shrink_kernel


@dataclass(frozen=True, slots=True)
class DeviceSegments:
    """Tokens ordered by slot, those without one first; all on the device. tokens: [num_tokens] int32. starts: where each
    slot's begin in `tokens`, and the end, [num_slots + 1] int32.
    """

    num_tokens: int
    tokens: Tensor
    starts: Tensor


def device_segments(slots: Tensor, ranks: Sequence[int]) -> DeviceSegments:
    """Without waiting for the device. slots: [num_tokens] int32, -1 for none."""
    in_order, tokens = torch.sort(slots, stable=True)
    edges = torch.arange(len(ranks) + 1, dtype=slots.dtype, device=slots.device)
    starts = torch.searchsorted(in_order, edges, out_int32=True)
    return DeviceSegments(slots.shape[0], tokens.to(torch.int32), starts)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Block sizes of a launch. rows: tokens of a tile. splits: parts of the inputs that are summed apart."""

    rows: int
    columns: int
    inputs: int
    splits: int
    num_warps: int = 4


def shrink_tiles(num_tokens: int, width: int, in_size: int, *, itemsize: int) -> Tiles:
    """A few tokens are cut along the inputs, so that more than one program works on them. fp32 products take more
    registers: their tiles are small.
    """
    columns = min(32 if itemsize == 4 else 64, max(16, triton.next_power_of_2(width)))
    if num_tokens <= 64:
        return Tiles(16, columns, 64 if itemsize == 4 else 128, min(8, max(1, in_size // 512)))
    return Tiles(16, columns, 32, 1) if itemsize == 4 else Tiles(32, columns, 64, 1)


def expand_tiles(num_tokens: int, rank: int, *, itemsize: int) -> Tiles:
    """Here the inputs are the ranks."""
    ranks = min(16 if itemsize == 4 else 64, max(16, triton.next_power_of_2(rank)))
    if itemsize == 4:
        return Tiles(16, 64, ranks, 1)
    return Tiles(16 if num_tokens <= 64 else 32, 128, ranks, 1)


class TritonStore:
    """A linear's adapters. down: [num_slots, parts * max_rank, in_size]. up: [num_slots, out_size, max_rank]."""

    def __init__(
        self,
        num_slots: int,
        max_rank: int,
        in_size: int,
        out_sizes: Sequence[int],
        *,
        dtype: torch.dtype,
        device: str | torch.device,
    ) -> None:
        self._num_slots, self._rank, self._in_size = num_slots, max_rank, in_size
        self._out_sizes = list(out_sizes)
        self._width, self._out_size = len(out_sizes) * max_rank, sum(out_sizes)
        self.down = torch.zeros(num_slots, self._width, in_size, dtype=dtype, device=device)
        self.up = torch.zeros(num_slots, self._out_size, max_rank, dtype=dtype, device=device)
        bounds = [sum(self._out_sizes[:i]) for i in range(len(self._out_sizes) + 1)]
        self._bounds = torch.tensor(bounds, dtype=torch.int32, device=device)

    def prepare(self, parts: Sequence[tuple[Tensor, Tensor] | None] | None) -> Any:
        """They are copied as they are."""
        return parts

    def write(self, slot: int, parts: Sequence[tuple[Tensor, Tensor] | None] | None) -> None:
        """Replace what a slot holds."""
        down, up = self.down[slot].zero_(), self.up[slot].zero_()
        for i, (part, rows) in enumerate(zip(parts or (), torch.split(up, self._out_sizes), strict=False)):
            if part is not None:
                rank = part[0].shape[0]
                down[i * self._rank : i * self._rank + rank].copy_(part[0], non_blocking=True)
                rows[:, :rank].copy_(part[1], non_blocking=True)

    def add(self, rows: Tensor, out: Tensor, step: DeviceSegments) -> Tensor:
        """out + what each row's adapter adds, in place."""
        n = step.num_tokens
        assert rows.shape[0] == n, f"{rows.shape[0]} rows in a step of {n} tokens"
        assert rows.stride(1) == out.stride(1) == 1, "elements of a row lie side by side"
        tiles = shrink_tiles(n, self._width, self._in_size, itemsize=rows.element_size())
        ranked = torch.empty(tiles.splits, n, self._width, dtype=torch.float32, device=rows.device)
        launch: Any = shrink_kernel[
            triton.cdiv(n, tiles.rows) + self._num_slots, triton.cdiv(self._width, tiles.columns), tiles.splits
        ]
        launch(
            rows,
            self.down,
            ranked,
            step.tokens,
            step.starts,
            n,
            rows.stride(0),
            IN_SIZE=self._in_size,
            WIDTH=self._width,
            NUM_SLOTS=self._num_slots,
            NUM_SPLITS=tiles.splits,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.columns,
            BLOCK_K=tiles.inputs,
            num_warps=tiles.num_warps,
            enable_fp_fusion=True,
        )
        splits, tiles = tiles.splits, expand_tiles(n, self._rank, itemsize=rows.element_size())
        launch = expand_kernel[
            triton.cdiv(n, tiles.rows) + self._num_slots,
            triton.cdiv(max(self._out_sizes), tiles.columns),
            len(self._out_sizes),
        ]
        launch(
            ranked,
            self.up,
            out,
            step.tokens,
            step.starts,
            self._bounds,
            n,
            out.stride(0),
            OUT_SIZE=self._out_size,
            WIDTH=self._width,
            RANK=self._rank,
            NUM_SLOTS=self._num_slots,
            NUM_SPLITS=splits,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.columns,
            BLOCK_R=tiles.inputs,
            num_warps=tiles.num_warps,
            enable_fp_fusion=True,
        )
        return out
