"""A mixture of experts: each token visits the top_k experts its router likes best."""

from __future__ import annotations

import torch
from torch import Tensor

from enginectl.interfaces.ops import BlockSpec, BlockWeights, Op, OpSet


class Mixture:
    """Rows in, rows out. Experts run one after another, each over all rows that chose it; idle ones cost nothing."""

    def __init__(self, spec: BlockSpec, weights: BlockWeights, ops: OpSet, activate: Op) -> None:
        assert weights.router is not None, "a mixture has a router"
        self._top_k = spec.top_k
        self._normalise = spec.norm_topk
        self._num_experts = spec.num_experts
        self._router = ops.linear(weights.router, None)
        self._gate_up = [ops.linear(weight, None) for weight in weights.gate_up.unbind()]
        self._down = [ops.linear(weight, None) for weight in weights.down.unbind()]
        self._activate = activate
        self._shared: tuple[Op, Op, Op] | None = None
        if spec.shared_size:
            shared = (weights.shared_gate_up, weights.shared_down, weights.shared_gate)
            gate_up, down, gate = (ops.linear(weight, None) for weight in shared if weight is not None)
            self._shared = gate_up, down, gate

    def __call__(self, rows: Tensor) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        scores = torch.softmax(self._router(rows).float(), dim=-1)
        chosen_scores, chosen = torch.topk(scores, self._top_k, dim=-1)  # [num_tokens, top_k]
        if self._normalise:
            chosen_scores = chosen_scores / chosen_scores.sum(-1, keepdim=True)
        visits = self._visit(rows, chosen.view(-1))
        # Each token sums its own visits in the order of its choices, whoever else visited these experts.
        mixed = (visits.view(*chosen.shape, rows.shape[1]).float() * chosen_scores.unsqueeze(-1)).sum(1)
        if self._shared is not None:
            gate_up, down, gate = self._shared
            mixed += down(self._activate(gate_up(rows))).float() * torch.sigmoid(gate(rows).float())
        return mixed.to(rows.dtype)

    def _visit(self, rows: Tensor, experts: Tensor) -> Tensor:
        """What each expert makes of each row that chose it. experts: [num_tokens * top_k], token after token."""
        order = torch.argsort(experts, stable=True)
        visitors = rows.index_select(0, order // self._top_k)
        counts = torch.bincount(experts, minlength=self._num_experts).tolist()
        made = [
            self._down[expert](self._activate(self._gate_up[expert](own)))
            for expert, own in enumerate(torch.split(visitors, counts))
            if counts[expert]
        ]
        out = torch.empty_like(visitors)
        return out.index_copy_(0, order, torch.cat(made)) if made else out
