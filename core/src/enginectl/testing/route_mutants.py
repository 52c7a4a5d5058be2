"""Ways for the slower routes of the `transformers` family to be wrong, put on a model after it was loaded and checked.

Every exactness test of a model that takes such a route must notice them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache

from enginectl.builtin.transformers_family.pages import PagedLayer
from enginectl.builtin.transformers_family.sequence_model import SequenceModel
from enginectl.builtin.transformers_family.state_model import StateModel
from enginectl.builtin.transformers_family.states import PLACES, StatePool
from enginectl.interfaces.attention import AttentionBatch
from enginectl.interfaces.model import Model


class _MixedStates(StatePool):
    def fetch(self, rows: NDArray[np.int32], places: NDArray[np.integer[Any]], *, has_state: bool) -> None:
        """Each row of a forward finds the state of its neighbour."""
        super().fetch(rows, np.roll(places, 1), has_state=has_state)


class _StaleStates(StatePool):
    def fetch(self, rows: NDArray[np.int32], places: NDArray[np.integer[Any]], *, has_state: bool) -> None:
        """A row that starts anew, after a preemption too, finds what its last holder left."""
        super().fetch(rows, np.where(places == 0, 1 + rows * PLACES, places), has_state=True)


class _MixedPages(PagedLayer):
    _before: Tensor | None = None

    def open(self, batch: AttentionBatch) -> None:
        """A sequence reads the pages of the one that was computed before it."""
        super().open(batch)
        assert self._blocks is not None, "open() finds them"
        own = self._blocks.clone()
        if self._before is not None and len(self._before) >= len(own):
            self._blocks = self._before
        self._before = own


def mixed_states(model: Model) -> None:
    """Rows that decode together exchange their states."""
    assert isinstance(model, StateModel), f"{type(model).__name__} has no state"
    model.pool_type = _MixedStates


def stale_states(model: Model) -> None:
    """No state is forgotten."""
    assert isinstance(model, StateModel), f"{type(model).__name__} has no state"
    model.pool_type = _StaleStates


def mixed_pages(model: Model) -> None:
    """Sequences exchange their pages."""
    assert isinstance(model, SequenceModel), f"{type(model).__name__} does not read pages itself"
    model.cache = Cache(layers=[_MixedPages(layer.group) for layer in model.cache.layers])
