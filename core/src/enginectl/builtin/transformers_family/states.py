"""Recurrent state of the rows, outside the pages, and the cache through which module code sees it.

A row has three places. A step reads the one that holds the state of the tokens before it and writes the oldest. So a
step that raised, and the one launched behind it, can be run again, though both have been through the model: their rows
find the state they started from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin

from enginectl.builtin.transformers_family.probe import StateShape
from enginectl.errors import ModelError, OutOfMemoryError
from enginectl.transfer import to_device
from enginectl.units import format_size

PLACES = 3
"""Of each row: one for each step that may be in flight, and what the first of them reads. Place 0 of the pool belongs to no row and stays zero: the state before the first token."""


class PassedLayer(CacheLayerMixin):  # type: ignore[misc]
    """An attention layer: keys and values go on to the attention call, which stores them in pages."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is kept."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """This forward's, as they are."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Sequences of one forward differ in length; code that does without positions is not served so."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """For the probe's masks: as without a cache."""
        return query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class StateLayer(LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """A layer with recurrent state, for the sequences of one forward."""

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """The pool fills in the state; the probe has none."""

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keep the last columns. Returns the new ones with what they need to their left. conv_states: [n, width, tokens]."""
        held = self.conv_states[state_idx]
        kept = conv_kernel_size or (conv_states if held is None else held).shape[-1]
        if self.has_previous_state[state_idx]:
            assert held is not None, "there is a state"
            full = torch.cat((held, conv_states), dim=-1)
        else:
            full = pad(conv_states, (max(kept - conv_states.shape[-1], 0), 0))
        self.has_previous_state[state_idx] = True
        self.conv_states[state_idx] = full[..., -kept:]
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        """Keep it."""
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class StateAndPassedLayer(StateLayer, PassedLayer):
    """A layer with both."""

    def __init__(self, number_of_states: int = 1) -> None:
        PassedLayer.__init__(self)
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing is kept, and the pool fills in the state."""


def state_cache(config: Any) -> Cache:
    """A cache like the library's own for this model, whose layers are those above."""
    return Cache(layers=[_like(layer) for layer in DynamicCache(config=config).layers])


def _like(layer: Any) -> Any:
    attends = isinstance(layer, CacheLayerMixin)
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        kind = StateAndPassedLayer if attends else StateLayer
        return kind(number_of_states=layer.number_of_states)
    return PassedLayer() if attends else layer  # one that keeps nothing stays


def carries_state(config: Any) -> bool:
    """Whether the library keeps a recurrent state for a layer of this model, as far as it makes a cache for it."""
    try:
        layers = DynamicCache(config=config).layers
    except Exception:  # of a kind it does not know: the other routes are checked against its own forward
        return False
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def state_shapes(cache: Cache) -> tuple[StateShape, ...]:
    """What a forward of one sequence left in the cache. Raises ModelError if a layer was not used."""
    found = []
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, StateLayer):
            continue
        if not all(layer.has_previous_state.values()):
            raise ModelError(f"layer {number} does not keep its state in the library's cache")
        for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
            found += [
                StateShape(number, kind, index, tuple(state.shape[1:]), state.dtype)
                for index, state in states.items()
                if state is not None
            ]
    return tuple(found)


class StatePool:
    """The states of `num_rows` rows. cache: the one whose layers the states are lent to."""

    def __init__(self, cache: Cache, shapes: Sequence[StateShape], num_rows: int, device: str) -> None:
        self._states = [(cache.layers[s.layer], s.kind, s.index, _zeros(s, num_rows, device)) for s in shapes]
        self._layers = list({id(layer): layer for layer, *_ in self._states}.values())
        self._lengths = np.full((num_rows, PLACES), -1, np.int32)
        """Tokens behind the state in each place, -1 for none."""
        self._device = device

    def lend(self, rows: NDArray[np.int32], num_computed: NDArray[np.int32]) -> None:
        """Put copies of the rows' states after `num_computed` tokens into the cache. 0 of them is always there."""
        is_first = num_computed == 0
        lengths = self._lengths[rows]
        lengths[lengths > num_computed[:, None]] = -1  # of a step that is run again, or of the row's last holder
        self._lengths[rows] = lengths
        holds = lengths == num_computed[:, None]
        if not (is_first | holds.any(1)).all():
            lost = np.flatnonzero(~(is_first | holds.any(1)))[0]
            raise RuntimeError(
                f"row {rows[lost]} has no state after {num_computed[lost]} tokens, only after {lengths[lost]}"
            )
        places = np.where(is_first, 0, 1 + rows * PLACES + holds.argmax(1))
        self.fetch(rows, places, has_state=not bool(is_first.all()))

    def fetch(self, rows: NDArray[np.int32], places: NDArray[np.integer[Any]], *, has_state: bool) -> None:
        """Put copies of what is in the places into the cache. has_state: some row has read tokens."""
        at = self._tensor(places)
        for layer in self._layers:
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, has_state)
        for layer, kind, index, states in self._states:
            _of(layer, kind)[index] = states.index_select(0, at)

    def take_back(self, rows: NDArray[np.int32], num_computed: NDArray[np.int32], num_new: int) -> None:
        """Store what the forward left in the cache in the oldest place; what it started from is the newest."""
        place = self._lengths[rows].argmin(1)
        self._lengths[rows, place] = -1
        at = self._tensor(1 + rows * PLACES + place)
        for layer, kind, index, states in self._states:
            lent = _of(layer, kind)
            states.index_copy_(0, at, lent[index].to(states.dtype))
            lent[index] = None
        self._lengths[rows, place] = num_computed + num_new

    def _tensor(self, places: NDArray[np.integer[Any]]) -> Tensor:
        return to_device(places.astype(np.int64), self._device)


def _of(layer: Any, kind: str) -> dict[int, Any]:
    states: dict[int, Any] = layer.conv_states if kind == "conv" else layer.recurrent_states
    return states


def _zeros(shape: StateShape, num_rows: int, device: str) -> Tensor:
    full = (1 + num_rows * PLACES, *shape.shape)
    try:
        if device == "cpu":  # calloc: memory is committed when a row first writes it
            size = (1 + num_rows * PLACES) * shape.num_bytes
            return torch.from_numpy(np.zeros(size, np.uint8)).view(shape.dtype).view(full)
        return torch.zeros(full, dtype=shape.dtype, device=device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        wanted = format_size((1 + num_rows * PLACES) * shape.num_bytes)
        raise OutOfMemoryError(
            f"no memory for {wanted} of recurrent state on {device}; lower --max-num-seqs"
        ) from error
