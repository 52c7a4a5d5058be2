"""A loaded transformers model behind the `Model` contract: what all routes share, and the packed one."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from enginectl.builtin.transformers_family import bridge, probe
from enginectl.builtin.transformers_family.head import Float32Head
from enginectl.builtin.transformers_family.probe import Probe
from enginectl.builtin.transformers_family.sites import Sites
from enginectl.interfaces.attention import AttentionBackend
from enginectl.interfaces.model import ForwardInput, Kept, LinearSite, Model, ModelSpec


class TransformersModel(Model):
    """The library's own module code. `module` is the PreTrainedModel.

    route: how sequences reach the module code, a word for logs and tables. implementation: what the module's attention
    is set to while it serves, and stock for a forward of the library's own to compare with.
    """

    route: str
    implementation: str = bridge.NAME
    stock: str = "eager"

    def __init__(self, module: Any, spec: ModelSpec, found: Probe) -> None:
        self.module = module
        self.spec = spec
        head = cast("nn.Module | None", module.get_output_embeddings())
        assert head is not None, f"{spec.architecture} has no output embeddings"
        if type(head) is nn.Linear:
            head = Float32Head(head)
            module.set_output_embeddings(head)
        self._hidden: Tensor | None = None
        self._hook = head.register_forward_pre_hook(self._keep_hidden)
        self._step = bridge.Step()
        self._repeating = bridge.connect(found.callers, self._step)
        self.sites = Sites(module, head)

    @classmethod
    def probing(cls, model_class: Any) -> str:
        """What the attention of such a module is set to when it is examined."""
        return probe.NAME

    @classmethod
    @abstractmethod
    def examine(cls, module: Any, *, device: str) -> Probe:
        """What the module, set to `probing`, does in one tiny forward. Raises ModelError if this route is not for it."""

    def release(self) -> None:
        """Take back what was put on the module, for another route to have it."""
        self._hook.remove()

    def _keep_hidden(self, _head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._hidden = inputs[0].flatten(0, -2)

    def use_attention(self, attention: AttentionBackend) -> None:
        """Call this backend in every layer from now on."""
        self._step.backend = attention
        if self.module.config._attn_implementation != self.implementation:
            self.module.set_attn_implementation(self.implementation)

    def linear_sites(self) -> Sequence[LinearSite]:
        """Every linear module but the head, what is in a mixture, and what sees other rows than a step's tokens."""
        return self.sites.found

    def logits(self, kept: Kept, rows: Tensor | None = None) -> Tensor:
        """A copy of the forward's logits, which the caller may change."""
        assert kept.logits is not None, "these rows are not from this model's forward"
        return kept.logits.clone() if rows is None else kept.logits.index_select(0, rows)

    def greedy(self, kept: Kept, rows: Tensor | None = None) -> Tensor | None:
        """The largest of the forward's logits, without a copy."""
        assert kept.logits is not None, "these rows are not from this model's forward"
        best = torch.argmax(kept.logits, dim=-1)
        return best if rows is None else best.index_select(0, rows)

    def _call(self, plan: Any, **inputs: Any) -> Kept:
        """One forward of the module: the kept rows' hidden states and logits, soft cap and scaling included."""
        self._step.plan = plan
        self.sites.num_tokens = inputs["input_ids"].numel()
        for site in self._repeating:
            site.turn = 0
        try:
            out = self.module(**inputs)
            return Kept(hidden=self._hidden, logits=out.logits.flatten(0, -2).float())
        finally:
            self._step.plan = self._hidden = None


class PackedModel(TransformersModel):
    """All tokens of a step as one sequence, which paged attention takes apart. Nothing else may mix them."""

    route = "packed"

    @classmethod
    def examine(cls, module: Any, *, device: str) -> Probe:
        """Every layer must call the attention interface."""
        return probe.probe(module, device=device)

    def forward(self, step: ForwardInput) -> Kept:
        """One packed forward."""
        self.sites.switch(step.adapter_slots is not None)
        return self._call(
            step.plan,
            input_ids=step.token_ids.unsqueeze(0),
            position_ids=step.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=step.keep,
        )


def cache_argument(module: Any) -> str:
    """What the module's forward calls its cache: the library has renamed it."""
    names = inspect.signature(module.forward).parameters
    return next((name for name in ("cache", "past_key_values", "cache_params") if name in names), "cache")
