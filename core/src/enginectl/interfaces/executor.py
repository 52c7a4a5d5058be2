"""Executors run step plans: on one device in this process, or the same scheduler on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from enginectl.interfaces.grammar import GrammarMatcher
    from enginectl.interfaces.kv import KVLayout
    from enginectl.types import SamplingParams, TokenLogprobs


@dataclass(slots=True)
class NewRow:
    """A request that takes a row: everything the runner must know of it.

    token_ids: [n] int32 prompt, and output so far when it resumes. adapter_slot: -1 for none.
    """

    row: int
    request_id: str
    token_ids: NDArray[np.int32]
    prompt_len: int
    params: SamplingParams
    seed: int
    choice: int
    eos_token_ids: tuple[int, ...]
    adapter_slot: int = -1
    grammar: GrammarMatcher | None = None


@dataclass(slots=True)
class StepPlan:
    """One step: the differences since the last plan, and what every row does. Arrays are not changed after launch.

    removed, added: rows that became empty and that are new, in that order.
    block_rows, block_columns, block_ids: entries of the block table to set; ids are [groups, m].
    rows: [n] int32, rows with one query token first. num_computed: [n] int32 tokens already in the KV store.
    num_tokens: [n] int32 query tokens this step, drafts included. num_drafts: [n] int32 how many of them are drafts
    (they are in the runner's token matrix). samples: [n] bool, whether the last known token is computed in this step,
    so that the row gets new ones. draft_limits: [n] int32 most drafts the speculator may propose afterwards.
    is_decode: every row computes its last token, that one alone, and samples: the step that is made most often.
    has_drafts: a row has drafts, or may be given some afterwards.
    """

    rows: NDArray[np.int32]
    num_computed: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    num_drafts: NDArray[np.int32]
    samples: NDArray[np.bool_]
    draft_limits: NDArray[np.int32]
    removed: list[int] = field(default_factory=list)
    added: list[NewRow] = field(default_factory=list)
    block_rows: NDArray[np.int32] | None = None
    block_columns: NDArray[np.int32] | None = None
    block_ids: NDArray[np.int32] | None = None
    is_decode: bool = False
    has_drafts: bool = True

    def select(self, index: NDArray[np.intp]) -> StepPlan:
        """The same step for some of its rows, without the differences (they are applied already)."""
        return StepPlan(
            self.rows[index],
            self.num_computed[index],
            self.num_tokens[index],
            self.num_drafts[index],
            self.samples[index],
            self.draft_limits[index],
            is_decode=self.is_decode,
            has_drafts=self.has_drafts,
        )


@dataclass(slots=True)
class StepResult:
    """What a step produced, for the rows that sampled.

    rows: [m] int32. token_ids: [m, width] int32. num_new: [m] int32, verified tokens of each row (accepted drafts and
    the one after them). num_drafts: [m] int32, drafts proposed for the next step. logprobs: row to one entry a new
    token, for rows that asked. prompt_logprobs: row to entries for this step's prompt positions. errors: row to
    message, for rows that failed alone; what else is said of them is ignored. propose_s: seconds of the step that the
    speculator took.
    """

    rows: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    num_new: NDArray[np.int32]
    num_drafts: NDArray[np.int32]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    propose_s: float = 0.0

    def select(self, keep: NDArray[np.bool_]) -> StepResult:
        """The results of some of its rows, [m] bool."""
        drafts = self.num_drafts[keep] if self.num_drafts.size else self.num_drafts
        return StepResult(
            self.rows[keep], self.token_ids[keep], self.num_new[keep], drafts, self.logprobs, self.prompt_logprobs
        )


class StepHandle(ABC):
    """A launched step."""

    @abstractmethod
    def wait(self) -> StepResult:
        """Block until the tokens are on the host. Raises what the step raised. Called: once."""


class Executor(ABC):
    """Owns the model, the KV store, the row arrays and everything that reads logits.

    is_asynchronous: `launch` returns before the step has run, and a step launched behind one that raised is not run (its
    differences are applied, and its handle raises). Others are wrapped by core when steps overlap.
    """

    is_asynchronous: bool = False

    @abstractmethod
    def allocate(self, layout: KVLayout) -> None:
        """Allocate the KV store. Raises OutOfMemoryError. Called: once, before the first launch."""

    @abstractmethod
    def launch(self, plan: StepPlan) -> StepHandle:
        """Apply the differences and start the step. Returns at once where the device is asynchronous.

        What the step raises comes out of the handle, never of this call; its differences are applied all the same.

        Called: once per step, at most overlap depth + 1 steps in flight.
        """

    def is_healthy(self) -> bool:
        """Whether the device still works. Called: after a step raised for each of its rows, with nothing in flight.

        False ends the engine, and its process is started anew.
        """
        return True

    def close(self) -> None:
        """Free the device. Called: once."""
