"""Weights of one linear by slot, and the product, in plain torch on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from enginectl_lora_sgmv.segments import Segments


class TorchStore:
    """A linear's adapters. A fused linear is one pair of matrices too: `down` has the rows of its parts in turn, rank by
    rank, so that the first `rank * parts` rows hold whatever has at most that rank; `up` is zero off its parts.

    down: [num_slots, max_rank * parts, in_size]. up: [num_slots, max_rank * parts, out_size].
    """

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
        self.parts = len(out_sizes)
        self._ends = [sum(out_sizes[: i + 1]) for i in range(self.parts)]
        self._out_sizes = tuple(out_sizes)
        width = max_rank * self.parts
        self.down = torch.zeros(num_slots, width, in_size, dtype=dtype, device=device)
        self.up = torch.zeros(num_slots, width, sum(out_sizes), dtype=dtype, device=device)

    def prepare(self, parts: Sequence[tuple[Tensor, Tensor] | None] | None) -> Any:
        """They are copied as they are."""
        return parts

    def write(self, slot: int, parts: Sequence[tuple[Tensor, Tensor] | None] | None) -> None:
        """Replace what a slot holds; None for an adapter that leaves this linear alone."""
        down, up = self.down[slot].zero_(), self.up[slot].zero_()
        for i, part in enumerate(parts or ()):
            if part is None:
                continue
            rows = slice(i, i + part[0].shape[0] * self.parts, self.parts)
            down[rows].copy_(part[0], non_blocking=True)
            end = self._ends[i]
            up[rows, end - self._out_sizes[i] : end].copy_(part[1].t(), non_blocking=True)

    def add(self, rows: Tensor, out: Tensor, step: Segments) -> Tensor:
        """out + what each row's adapter adds. rows: [num_tokens, in_size]; out is changed in place."""
        assert rows.shape[0] == step.num_tokens, f"{rows.shape[0]} rows in a step of {step.num_tokens} tokens"
        width = step.rank * self.parts
        if step.is_one:
            slot = step.slots[0]
            return out.addmm_(rows @ self.down[slot, :width].t(), self.up[slot, :width])
        own = rows.index_select(0, step.tokens)
        added = out.new_empty(own.shape[0], out.shape[1])
        for slot, start, end in zip(step.slots, step.starts, step.starts[1:], strict=False):
            torch.mm(own[start:end] @ self.down[slot, :width].t(), self.up[slot, :width], out=added[start:end])
        return out.index_add_(0, step.tokens, added)
