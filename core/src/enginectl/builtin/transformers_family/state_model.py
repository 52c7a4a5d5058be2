"""Hybrids and recurrent models: attention over our pages, and a state pool for what they carry from token to token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from enginectl.builtin.transformers_family import probe
from enginectl.builtin.transformers_family.model import cache_argument
from enginectl.builtin.transformers_family.parts import Part, PartedModel
from enginectl.builtin.transformers_family.probe import Probe
from enginectl.builtin.transformers_family.states import StatePool, state_cache, state_shapes
from enginectl.interfaces.attention import AttentionBatch
from enginectl.interfaces.model import Kept, ModelSpec


class StateModel(PartedModel):
    """Rows with a single token share a forward, `[rows, 1]`; every other row has one of its own, `[1, tokens]`."""

    route = "state pool"
    pool_type: type[StatePool] = StatePool

    def __init__(self, module: Any, spec: ModelSpec, found: Probe) -> None:
        super().__init__(module, spec, found)
        self._states = found.states
        self._cache = state_cache(module.config)
        self._cache_name = cache_argument(module)
        self._pool: StatePool | None = None

    @classmethod
    def examine(cls, module: Any, *, device: str) -> Probe:
        """Every attention layer must call the interface, and every other keep its state in the cache."""
        cache = state_cache(module.config)
        inputs = probe.probe_inputs(device) | {"use_cache": True, cache_argument(module): cache}
        log = probe.run(module, inputs)
        probe.check_count(len(log.layers), sum(isinstance(layer, CacheLayerMixin) for layer in cache.layers))
        return Probe(tuple(log.layers), tuple(log.callers), state_shapes(cache))

    def bind(self, kv: Sequence[tuple[Tensor, Tensor]], num_rows: int) -> None:
        """Make the pool."""
        self._pool = self.pool_type(self._cache, self._states, num_rows, str(self.module.device))

    def cut(self, batch: AttentionBatch) -> list[tuple[int, int]]:
        """Single tokens come first, and run together."""
        singles = batch.num_decodes
        first = [(0, singles)] if singles else []
        return [*first, *((i, i + 1) for i in range(singles, batch.num_seqs))]

    def run(self, part: Part, keep: Tensor) -> Kept:
        """Lend the states of the part's rows to the module's cache, run, and take them back."""
        pool, backend = self._pool, self._step.backend
        assert pool is not None, "the model was called before bind()"
        assert backend is not None, "the model was called before use_attention()"
        num_computed, num_new = part.num_computed, part.token_ids.shape[1]
        if num_new > 1 and num_computed[0] and not self.spec.takes_chunks:
            raise RuntimeError(f"{self.spec.architecture} reads prompts whole, and this one goes on behind a state")
        pool.lend(part.rows, num_computed)
        is_single = num_new == 1
        kept = self._call(
            backend.prepare(part.batch) if part.plan is None else part.plan,
            input_ids=part.token_ids,
            position_ids=part.positions,
            use_cache=True,
            logits_to_keep=torch.zeros_like(keep[:1]) if is_single and part.rows.size > 1 else keep,
            **{self._cache_name: self._cache},
        )
        pool.take_back(part.rows, num_computed, num_new)
        if part.rows.size == 1:
            return kept
        assert kept.hidden is not None, "_call keeps both"
        assert kept.logits is not None, "_call keeps both"
        return Kept(kept.hidden.index_select(0, keep), kept.logits.index_select(0, keep))
