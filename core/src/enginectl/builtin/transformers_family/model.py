"""A loaded transformers model behind the `Model` contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from enginectl.builtin.transformers_family import bridge
from enginectl.builtin.transformers_family.head import Float32Head
from enginectl.builtin.transformers_family.probe import Call
from enginectl.builtin.transformers_family.sites import Sites
from enginectl.interfaces.attention import AttentionBackend
from enginectl.interfaces.model import ForwardInput, Kept, LinearSite, Model, ModelSpec


class TransformersModel(Model):
    """Packed sequences through the library's own module code. `module` is the PreTrainedModel.

    route: how sequences reach the module code, a word for logs and tables.
    """

    route: str = "packed"

    def __init__(self, module: Any, spec: ModelSpec, calls: list[Call]) -> None:
        self.module = module
        self.spec = spec
        self._step = bridge.Step()
        self._repeating = bridge.connect([call.module for call in calls], self._step)
        head = cast("nn.Module | None", module.get_output_embeddings())
        assert head is not None, f"{spec.architecture} has no output embeddings"
        if type(head) is nn.Linear:
            head = Float32Head(head)
            module.set_output_embeddings(head)
        self._hidden: Tensor | None = None
        self._sites = Sites(module, head)
        head.register_forward_pre_hook(self._keep_hidden)

    def _keep_hidden(self, _head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._hidden = inputs[0].flatten(0, -2)

    def use_attention(self, attention: AttentionBackend) -> None:
        """Call this backend in every layer from now on."""
        self._step.backend = attention
        if self.module.config._attn_implementation != bridge.NAME:
            self.module.set_attn_implementation(bridge.NAME)

    def linear_sites(self) -> Sequence[LinearSite]:
        """Every linear module but the head and what is in a mixture."""
        return self._sites.found

    def forward(self, step: ForwardInput) -> Kept:
        """One packed forward. The head computes the kept rows' logits, soft cap and scaling included."""
        self._sites.switch(step.adapter_slots is not None)
        self._step.plan = step.plan
        for site in self._repeating:
            site.turn = 0
        try:
            out = self.module(
                input_ids=step.token_ids.unsqueeze(0),
                position_ids=step.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=step.keep,
            )
            return Kept(hidden=self._hidden, logits=out.logits[0].float())
        finally:
            self._step.plan = self._hidden = None

    def logits(self, kept: Kept, rows: Tensor | None = None) -> Tensor:
        """A copy of the forward's logits, which the caller may change."""
        assert kept.logits is not None, "these rows are not from this model's forward"
        return kept.logits.clone() if rows is None else kept.logits.index_select(0, rows)

    def greedy(self, kept: Kept, rows: Tensor | None = None) -> Tensor | None:
        """The largest of the forward's logits, without a copy."""
        assert kept.logits is not None, "these rows are not from this model's forward"
        best = torch.argmax(kept.logits, dim=-1)
        return best if rows is None else best.index_select(0, rows)
