"""The scheduling policy: it proposes an order, core disposes.

A step has no prefill or decode phase: each running row has `num_computed` tokens catching up with the tokens it has.
The policy says in which order rows and waiting requests are served, how many tokens each may advance, and who gives way
when blocks run out. It never touches blocks, slots or grammars: core's `try_acquire` grants those, or says no.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from enginectl.engine.request import Request


@dataclass(slots=True)
class RunningRows:
    """The rows that run, as arrays in admission order. Read only; valid during the call.

    rows: [n] int32 place in the persistent batch. num_pending: [n] int32 tokens known but not computed, drafts
    included (1 for a plain decode). num_tokens: [n] int32 prompt and output so far. priority: [n] int32.
    arrival_s: [n] float64. tenant: [n] int32 index into `tenants`; an index is used again once no row has it.
    """

    rows: NDArray[np.int32]
    num_pending: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    priority: NDArray[np.int32]
    arrival_s: NDArray[np.float64]
    tenant: NDArray[np.int32]
    tenants: Sequence[str] = ()


@dataclass(slots=True)
class StepBudget:
    """What a step may do: num_tokens over all rows; max_chunk: most tokens one row may advance.

    max_prefill: most tokens over all rows that are reading, in a step in which others decode; None for no limit.
    max_decode: rows with at most so many pending tokens decode (drafts included), the others read.
    num_free_rows: rows that waiting requests could take in this step, with the tokens that are left.
    """

    num_tokens: int
    max_chunk: int
    max_prefill: int | None = None
    max_decode: int = 1
    num_free_rows: int = 0


class Scheduler(ABC):
    """Order, token counts and victims. One object per engine; called from the engine loop only."""

    @abstractmethod
    def add(self, request: Request, *, resumed: bool) -> None:
        """A request waits. resumed: it ran before and was preempted, so it goes before those that never ran."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """A waiting request leaves: it was admitted, aborted or timed out. Raises KeyError if it does not wait."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of waiting requests."""

    @abstractmethod
    def candidates(self, now: float) -> Iterator[Request]:
        """Waiting requests in the order in which core should try to admit them.

        Core stops when rows or tokens run out, or when `refused` returns False. The iterator must tolerate that the
        request it yielded last is removed.
        """

    def refused(self, request: Request, reason: str, now: float) -> bool:
        """Core could not admit `request`; reason is "blocks", "adapter" or "grammar". True: try the next one.

        The default lets a request that waits for its adapter or grammar be passed, and none that waits for blocks.
        """
        return reason != "blocks"

    def grant(self, running: RunningRows, budget: StepBudget, now: float) -> NDArray[np.int32]:
        """How many tokens each running row advances, [n] int32, 0 to wait. The sum may not exceed the budget.

        A new array for each call: the step in flight reads the last one while the next is granted.
        The default serves rows in admission order, as far as the budget goes.
        Called: once per step, with arrays; do not loop over rows here. When blocks run out it is asked again with the
        same `now` and other rows or fewer pending tokens: the last answer is what the step does.
        """
        return first_come(running.num_pending, budget)

    def victims(self, running: RunningRows, now: float) -> NDArray[np.intp]:
        """Indices into `running`, worst first: who gives way when blocks run out. The default is newest first."""
        return np.arange(len(running.rows) - 1, -1, -1)

    def finished(self, request: Request, now: float) -> None:
        """A running request ended or was preempted; for policies that keep accounts. Called: once per event."""


def first_come(num_pending: NDArray[np.int32], budget: StepBudget) -> NDArray[np.int32]:
    """Tokens in the given order until the budget is spent, at most max_chunk a row. [n] int32 to [n] int32."""
    counts = np.minimum(num_pending, budget.max_chunk)
    if budget.max_prefill is not None:
        counts = _slow_reading(counts, budget.max_prefill, budget.max_decode)
    total = int(counts.sum())
    if total <= budget.num_tokens:
        return counts
    left = budget.num_tokens - (np.cumsum(counts) - counts)
    granted: NDArray[np.int32] = np.clip(left, 0, counts).astype(np.int32)
    return granted


def in_order(num_pending: NDArray[np.int32], order: NDArray[np.intp], budget: StepBudget) -> NDArray[np.int32]:
    """`first_come` in another order. order: [n] indices, first served first."""
    granted = np.empty(num_pending.size, np.int32)
    granted[order] = first_come(num_pending[order], budget)
    return granted


def _slow_reading(counts: NDArray[np.int32], most: int, max_decode: int) -> NDArray[np.int32]:
    """Rows that read get `most` tokens together, first come, while others decode."""
    reads = counts > max_decode
    if not reads.any() or not (counts[~reads] > 0).any():
        return counts
    reading = np.where(reads, counts, 0)
    left = most - (np.cumsum(reading) - reading)
    slowed: NDArray[np.int32] = np.where(reads, np.clip(left, 0, reading), counts).astype(np.int32)
    return slowed
