"""A cache for module code that attends by itself: one sequence's keys and values, in our pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from enginectl.errors import ModelError
from enginectl.interfaces.attention import AttentionBatch


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer. Between `open` and the next, it is that sequence's."""

    is_sliding = False

    def __init__(self, group: int = 0) -> None:
        super().__init__()
        self.group = group
        self.store: tuple[Tensor, Tensor] | None = None
        self.shown: tuple[Tensor, Tensor] | None = None
        """What a forward without a store brought: the probe's."""
        self._num_before = self._num_tokens = 0
        self._slots: Tensor | None = None
        self._blocks: Tensor | None = None

    def open(self, batch: AttentionBatch) -> None:
        """The next update is of this batch's only sequence."""
        self._num_tokens = self._num_before = int(batch.seq_lens_host[0]) - batch.num_tokens
        self._slots = batch.slot_mapping[self.group]
        self._blocks = batch.block_tables[self.group, 0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The pages are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store [1, num_kv_heads, num_new, …] and return [1, num_kv_heads, num_tokens, …], all of them so far."""
        self._num_tokens += key_states.shape[2]
        if self.store is None:
            self.shown = key_states, value_states
            return key_states, value_states
        keys, values = self.store
        return self._through(keys, key_states), self._through(values, value_states)

    def _through(self, pages: Tensor, new: Tensor) -> Tensor:
        """pages: [num_blocks, block_size, num_kv_heads, width]."""
        assert self._slots is not None, "update() before open()"
        assert self._blocks is not None, "update() before open()"
        pages.flatten(0, 1).index_copy_(0, self._slots, new[0].transpose(0, 1))
        num_blocks = -(-self._num_tokens // pages.shape[1])
        known = pages.index_select(0, self._blocks[:num_blocks]).flatten(0, 1)
        return known[: self._num_tokens].transpose(0, 1).unsqueeze(0)

    def get_seq_length(self) -> int:
        """Tokens so far, this forward's once they are stored."""
        return self._num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All tokens up to this forward's last, from the first."""
        return self._num_before + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


def paged_cache(config: Any) -> Cache:
    """As many layers as the library's own cache for this model has. Raises ModelError for layers of another kind."""
    layers = DynamicCache(config=config).layers
    if not layers or not all(isinstance(layer, CacheLayerMixin) for layer in layers):
        raise ModelError("not all of its layers keep keys and values in the library's cache")
    return Cache(layers=[PagedLayer() for _ in layers])


def bind(cache: Cache, kv: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give every layer its pages."""
    for layer, store in zip(cache.layers, kv, strict=True):
        layer.store = store
