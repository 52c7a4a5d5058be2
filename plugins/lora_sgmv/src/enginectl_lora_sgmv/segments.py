"""The tokens of a step, by slot. Made once a step and read by every linear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from enginectl.transfer import to_device


@dataclass(frozen=True, slots=True)
class Segments:
    """Tokens that use an adapter, ordered by slot.

    num_tokens: of the whole step. tokens: [k] int64, on the device. slots: those present, ascending; starts: where each
    begins in `tokens`, and the end, on the host. rank: the largest of the adapters present.
    """

    num_tokens: int
    tokens: Tensor
    slots: tuple[int, ...]
    starts: tuple[int, ...]
    rank: int

    @property
    def is_one(self) -> bool:
        """Whether every token uses the same adapter."""
        return len(self.slots) == 1 and self.starts[-1] == self.num_tokens


def segments_of(slots: Tensor, ranks: Sequence[int]) -> Segments:
    """slots: [num_tokens] int32, -1 for none. ranks: by slot."""
    host = slots.cpu().numpy()
    order = np.argsort(host, kind="stable")
    counts = np.bincount(host + 1, minlength=len(ranks) + 1)
    tokens = order[counts[0] :]
    present = tuple(int(slot) for slot in np.flatnonzero(counts[1:]))
    assert present, "at least one token uses an adapter"
    starts = (0, *np.cumsum(counts[1:][list(present)]).tolist())
    return Segments(
        num_tokens=host.size,
        tokens=to_device(tokens, slots.device),
        slots=present,
        starts=starts,
        rank=max(ranks[slot] for slot in present),
    )
