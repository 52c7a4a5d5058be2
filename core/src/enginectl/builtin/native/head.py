"""The language model head from plain ops, with logits summed in fp32 whatever the weights are."""

from __future__ import annotations

import torch
from torch import Tensor

from enginectl.builtin.transformers_family.head import widened_mm
from enginectl.interfaces.ops import BlockSpec, Head, OpSet


class PlainHead(Head):
    """Final norm and output projection; the weight stays as it is, shared with a tied embedding."""

    def __init__(self, norm: Tensor, weight: Tensor, spec: BlockSpec, ops: OpSet) -> None:
        self._norm = ops.rms_norm(norm, spec.eps, plus_one=spec.norm == "rms_plus_one")
        self._weight = weight

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [n, vocab_size]."""
        return fp32_logits(self._norm(hidden), self._weight)


def fp32_logits(rows: Tensor, weight: Tensor) -> Tensor:
    """rows @ weight.T, fp32. rows: [n, hidden_size]; weight: [vocab_size, hidden_size] of the same dtype."""
    if weight.dtype == torch.float32:
        return torch.mm(rows, weight.t())
    if rows.is_cuda:
        return torch.mm(rows, weight.t(), out_dtype=torch.float32)
    return widened_mm(rows.float(), weight)
