"""Two attention backends over one store: one for rows with a single query, one for all others.

Rows with a single query come first in a batch, so a step is cut once, at `num_decodes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from enginectl.interfaces.attention import AttentionBackend, AttentionBatch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class _Plan:
    """cut: packed tokens of the decode part. A part without rows has no plan."""

    cut: int
    decode: Any
    prefill: Any


class PhasedAttention(AttentionBackend):
    """`--attention decode=NAME,prefill=NAME`."""

    def __init__(self, decode: AttentionBackend, prefill: AttentionBackend) -> None:
        self.decode = decode
        self._prefill = prefill

    def bind(self, kv: list[tuple[Tensor, Tensor]]) -> None:
        """Both share the store."""
        self.decode.bind(kv)
        self._prefill.bind(kv)

    def prepare(self, batch: AttentionBatch) -> _Plan:
        """A plan for each part that has rows."""
        cut, n = batch.num_decodes, batch.num_seqs
        if cut == n:
            return _Plan(cut, self.decode.prepare(batch), None)
        if cut == 0:
            return _Plan(0, None, self._prefill.prepare(batch))
        return _Plan(cut, self.decode.prepare(batch.part(0, cut)), self._prefill.prepare(batch.part(cut, n)))

    def capture(self, batch: AttentionBatch) -> _Plan:
        """Of decode steps, by the backend that decodes."""
        return _Plan(batch.num_tokens, self.decode.capture(batch), None)

    def update(self, plan: _Plan, batch: AttentionBatch) -> None:
        """Likewise."""
        self.decode.update(plan.decode, batch)

    def write_kv(self, layer: int, k: Tensor, v: Tensor, plan: _Plan) -> None:
        """Each part writes its own tokens."""
        if plan.decode is not None:
            self.decode.write_kv(layer, k[: plan.cut], v[: plan.cut], plan.decode)
        if plan.prefill is not None:
            self._prefill.write_kv(layer, k[plan.cut :], v[plan.cut :], plan.prefill)

    def attend(self, layer: int, q: Tensor, plan: _Plan, *, sinks: Tensor | None = None) -> Tensor:
        """Each part attends; the outputs are joined in packed order."""
        if plan.prefill is None:
            return self.decode.attend(layer, q, plan.decode, sinks=sinks)
        if plan.decode is None:
            return self._prefill.attend(layer, q, plan.prefill, sinks=sinks)
        import torch

        first = self.decode.attend(layer, q[: plan.cut], plan.decode, sinks=sinks)
        second = self._prefill.attend(layer, q[plan.cut :], plan.prefill, sinks=sinks)
        return torch.cat((first, second))
