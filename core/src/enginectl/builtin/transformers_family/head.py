"""The language model head, with logits in fp32 whatever the weights are.

Rounding logits to bf16 ties tokens that are not equal: at a value of 20 neighbours are 0.125 apart.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

CHUNK_ELEMENTS = 1 << 19
"""Weights that are widened to fp32 at a time on a CPU: 2 MiB, so that they are still in the cache when multiplied."""


class Float32Head(nn.Linear):
    """A linear layer over the same 16-bit parameters whose products are summed, and returned, in fp32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(1, 1, bias=False, device="meta")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, input: Tensor) -> Tensor:
        """[…, in_features] -> fp32 […, out_features]."""
        rows = input.reshape(-1, self.in_features)
        if self.weight.dtype == torch.float32:
            out = torch.mm(rows.float(), self.weight.t())
        elif rows.is_cuda:
            out = torch.mm(rows.to(self.weight.dtype), self.weight.t(), out_dtype=torch.float32)
        else:
            out = widened_mm(rows.float(), self.weight)
        if cast("Tensor | None", self.bias) is not None:
            out += self.bias
        return out.view(*input.shape[:-1], self.out_features)


def widened_mm(rows: Tensor, weight: Tensor) -> Tensor:
    """rows @ weight.T in fp32, a few rows of a 16-bit weight at a time. rows: [n, in]; weight: [out, in]."""
    num_out, num_in = weight.shape
    step = max(1, CHUNK_ELEMENTS // num_in)
    out = rows.new_empty(rows.shape[0], num_out)
    wide = weight.new_empty(min(step, num_out), num_in, dtype=torch.float32)
    for start in range(0, num_out, step):
        part = weight[start : start + step]
        torch.mm(rows, wide[: part.shape[0]].copy_(part).t(), out=out[:, start : start + step])
    return out
