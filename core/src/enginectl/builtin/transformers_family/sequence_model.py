"""Models whose attention never reaches us: one sequence a forward, whose cache lies in our pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from enginectl.builtin.transformers_family import pages, probe
from enginectl.builtin.transformers_family.model import cache_argument
from enginectl.builtin.transformers_family.parts import Part, PartedModel
from enginectl.builtin.transformers_family.probe import Probe
from enginectl.errors import ModelError
from enginectl.interfaces.model import Kept, LayerSpec, ModelSpec


class SequenceModel(PartedModel):
    """The library's own attention and masks over keys and values that are gathered from the pages."""

    route = "one sequence per forward"

    def __init__(self, module: Any, spec: ModelSpec, found: Probe) -> None:
        super().__init__(module, spec, found)
        self.implementation = self.stock = self.probing(module)
        self.cache = pages.paged_cache(module.config)
        self._cache_name = cache_argument(module)

    @classmethod
    def probing(cls, model_class: Any) -> str:
        """The library's own choice: falcon's eager code adds its position bias twice."""
        return "sdpa" if model_class._supports_sdpa else "eager"

    @classmethod
    def examine(cls, module: Any, *, device: str) -> Probe:
        """Every layer must keep its keys and values in the cache."""
        cache = pages.paged_cache(module.config)
        inputs = probe.probe_inputs(device) | {"use_cache": True, cache_argument(module): cache}
        with torch.inference_mode():
            module(**inputs)
        num_heads = getattr(module.config.get_text_config(), "num_attention_heads", 1)
        return Probe(tuple(layer_spec(number, layer.shown, num_heads) for number, layer in enumerate(cache.layers)))

    def bind(self, kv: Sequence[tuple[Tensor, Tensor]], num_rows: int) -> None:
        """Keep the pages."""
        pages.bind(self.cache, kv)

    def run(self, part: Part, keep: Tensor) -> Kept:
        """Show the module this sequence's pages, and run."""
        for layer in self.cache.layers:
            layer.open(part.batch)
        return self._call(
            None,
            input_ids=part.token_ids,
            position_ids=part.positions,
            use_cache=True,
            logits_to_keep=keep,
            **{self._cache_name: self.cache},
        )


def layer_spec(number: int, shown: tuple[Tensor, Tensor] | None, num_heads: int) -> LayerSpec:
    """What a layer stores. How it attends is its own affair; backends are told the usual."""
    if shown is None:
        raise ModelError(f"layer {number} does not keep its keys and values in the library's cache")
    key, value = shown
    num_kv_heads, head_dim = key.shape[1], key.shape[3]
    return LayerSpec(
        num_heads=num_heads if num_heads % num_kv_heads == 0 else num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=value.shape[3],
        scale=float(head_dim**-0.5),
    )
