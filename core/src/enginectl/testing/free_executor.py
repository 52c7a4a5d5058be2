"""An executor without a model, for tests of the loop: tokens are a hash of what its pages hold, so that a lost block, a
wrong length, a token committed twice or a stale draft changes what comes next.

`FreeExecutor` runs a step during `launch`; inside a `DeferredExecutor` it answers later. `free_tokens` is what a choice
must get, computed without pages; `free_core` wires a loop around it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from enginectl.builtin.allocator_paged import PagedAllocator
from enginectl.builtin.scheduler_fcfs import FcfsScheduler
from enginectl.engine.admission import Admission
from enginectl.engine.batch import RowTable
from enginectl.engine.core_loop import EngineCore
from enginectl.engine.deferred import DeferredExecutor
from enginectl.engine.ledger import BlockPool
from enginectl.engine.rows import Packed, RunnerRows
from enginectl.engine.verify import verify
from enginectl.interfaces.executor import Executor, NewRow, StepHandle, StepPlan, StepResult
from enginectl.interfaces.kv import KVAllocator, KVGroup, KVLayout, PrefixIndex
from enginectl.interfaces.scheduler import Scheduler
from enginectl.types import EngineRequest, Finished, SamplingParams, StepOutputs

if TYPE_CHECKING:
    from enginectl.interfaces.adapter import AdapterBackend

IntRows = NDArray[np.int32]
Words = NDArray[np.uint64]

_LONGEST = 1 << 14
_WEIGHTS: Words = np.random.default_rng(1).integers(1, 1 << 62, _LONGEST, dtype=np.uint64) | np.uint64(1)
"""One odd number a position: swapped tokens change the sum."""


def _tokens(states: Words, seeds: Words, vocab_size: int) -> IntRows:
    """Token after each state, for each seed."""
    bits = states + seeds
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((bits >> np.uint64(33)) % np.uint64(vocab_size)).astype(np.int32)


def _words(token_ids: IntRows, positions: IntRows) -> Words:
    """What a page holds of these tokens at these positions."""
    return (token_ids.astype(np.uint64) + np.uint64(1)) * _WEIGHTS[positions]


def _seed_words(seeds: Sequence[int], choices: Sequence[int]) -> Words:
    mixed = [
        (seed * 0x9E3779B97F4A7C15 + choice * 0xD1B54A32D192ED03) % (1 << 64)
        for seed, choice in zip(seeds, choices, strict=True)
    ]
    return np.array(mixed, np.uint64)


def free_tokens(
    prompt: Sequence[int],
    max_tokens: int,
    *,
    vocab_size: int,
    stop_ids: Sequence[int] = (),
    seed: int = 0,
    choice: int = 0,
) -> list[int]:
    """The output that a choice must get, the token that ends it included."""
    known = np.array(prompt, np.int32)
    state = _words(known, np.arange(known.size, dtype=np.int32)).sum(dtype=np.uint64)
    word = _seed_words([seed], [choice])
    found: list[int] = []
    while len(found) < max_tokens:
        token = _tokens(np.array([state], np.uint64), word, vocab_size)
        found.append(int(token[0]))
        if found[-1] in stop_ids:
            break
        with np.errstate(over="ignore"):
            state = np.uint64(state + _words(token, np.array([len(prompt) + len(found) - 1], np.int32))[0])
    return found


class FreeHandle(StepHandle):
    """A step that has run: its result, or what it raised."""

    __slots__ = ("_outcome",)

    def __init__(self, outcome: StepResult | Exception) -> None:
        self._outcome = outcome

    def wait(self) -> StepResult:
        """At once."""
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class FreeExecutor(Executor):
    """Deterministic tokens out of simulated pages.

    num_drafts: drafts a row gets; the first `right` of each three are what the target will choose, the rest are not.
    poison: a step raises that computes this token for any row. refused: a row fails alone, when it is added, whose
    tokens hold this one. page: word in unwritten and reused slots, so that reading them shows.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        *,
        vocab_size: int = 64,
        num_drafts: int = 0,
        right: int = 2,
        poison: int | None = None,
        refused: int | None = None,
    ) -> None:
        self.rows = RunnerRows(max_num_seqs, max_model_len, block_size, max_drafts=num_drafts)
        self.num_steps = 0
        self.num_raised = 0
        self._vocab_size = vocab_size
        self._num_drafts = num_drafts
        self._right = right
        self._poison = poison
        self._refused = refused
        self._seeds = np.zeros(max_num_seqs, np.uint64)
        self._failed: dict[int, str] = {}
        self._store: Words = np.zeros(0, np.uint64)

    def allocate(self, layout: KVLayout) -> None:
        """One word a slot."""
        size = layout.num_blocks * layout.block_size
        self._store = np.random.default_rng(2).integers(0, 1 << 62, size, dtype=np.uint64)

    def launch(self, plan: StepPlan) -> StepHandle:
        """Apply the differences, run the step."""
        self._apply(plan)
        try:
            return FreeHandle(self._run(plan))
        except RuntimeError as error:
            self.num_raised += 1
            return FreeHandle(error)

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.removed:
            self.rows.remove(row)
            self._failed.pop(row, None)
        for new in plan.added:
            self._add(new)
        if plan.block_ids is not None:
            self.rows.block_table[:, plan.block_rows, plan.block_columns] = plan.block_ids

    def _add(self, new: NewRow) -> None:
        self.rows.add(new)
        self._seeds[new.row] = _seed_words([new.seed], [new.choice])[0]
        if self._refused is not None and self._refused in new.token_ids:
            self._failed[new.row] = f"token {self._refused} is refused"

    def _run(self, plan: StepPlan) -> StepResult:
        none = np.zeros(0, np.int32)
        self.num_steps += plan.rows.size > 0
        errors = {row: why for row, why in self._failed.items() if row in plan.rows}
        if errors:
            plan = plan.select(np.nonzero(~np.isin(plan.rows, list(errors)))[0])
        if not plan.rows.size:
            return StepResult(none, np.zeros((0, 1), np.int32), none, none, errors=errors)
        packed = self.rows.pack(plan)
        self._write(packed)
        rows = plan.rows[packed.sampled]
        if not rows.size:
            return StepResult(none, np.zeros((0, 1), np.int32), none, none, errors=errors)
        widths = packed.widths
        sampled = self._sample(np.repeat(rows, widths), packed.positions[packed.keep])
        base = packed.seq_lens[packed.sampled] - (widths - 1)
        at = np.minimum(base[:, None] + np.arange(widths.max() - 1), self.rows.token_ids.shape[1] - 1)
        tokens, num_new = verify(sampled, widths, self.rows.token_ids[rows[:, None], at])
        for row, start, new, count in zip(rows.tolist(), base.tolist(), tokens, num_new.tolist(), strict=True):
            self.rows.token_ids[row, start : start + count] = new[:count]
        drafts = self._draft(rows, base + num_new, plan.draft_limits[packed.sampled]) if self._num_drafts else none
        return StepResult(rows, tokens, num_new, drafts, errors=errors)

    def _write(self, packed: Packed) -> None:
        tokens = self.rows.token_ids[packed.token_rows, packed.positions]
        if self._poison is not None and (tokens == self._poison).any():
            raise RuntimeError(f"token {self._poison} is poison")
        slots = self.rows.slots(packed)[0]
        assert (slots >= self.rows.block_size).all(), "a step wrote to the null block"
        self._store[slots] = _words(tokens, packed.positions)

    def _states(self, rows: IntRows, positions: IntRows) -> Words:
        """Sum of each row's pages up to and including its position, through its block table."""
        column = np.arange(int(positions.max()) + 1)
        block, offset = np.divmod(column, self.rows.block_size)
        slots = self.rows.block_table[0, rows][:, block].astype(np.int64) * self.rows.block_size + offset
        states: Words = np.where(column <= positions[:, None], self._store[slots], np.uint64(0)).sum(axis=1)
        return states

    def _sample(self, rows: IntRows, positions: IntRows) -> IntRows:
        return _tokens(self._states(rows, positions), self._seeds[rows], self._vocab_size)

    def _draft(self, rows: IntRows, num_tokens: IntRows, limits: IntRows) -> IntRows:
        """What the target will choose (its states need one more token than the pages hold), spoilt at the end."""
        counts = np.minimum(limits, self._num_drafts)
        states = self._states(rows, num_tokens - 2)
        for i in range(int(counts.max(initial=0))):
            position = num_tokens - 1 + i
            states = states + _words(self.rows.token_ids[rows, position], position)
            guess = _tokens(states, self._seeds[rows], self._vocab_size)
            wrong = (num_tokens + i) % 3 >= self._right
            guess = np.where(wrong, (guess + 1) % self._vocab_size, guess).astype(np.int32)
            some = counts > i
            self.rows.token_ids[rows[some], position[some] + 1] = guess[some]
        return counts.astype(np.int32)


class Answers:
    """What a loop said, by request key. Each ends once, and nothing comes for it afterwards."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}

    def take(self, messages: Sequence[StepOutputs]) -> None:
        """Add what a step returned."""
        for message in messages:
            keys = np.frombuffer(message.keys, np.int64).tolist()
            assert len(keys) == len(set(keys)), "a choice is in each message once"
            counts = np.frombuffer(message.counts, np.int32).tolist() if message.counts else [1] * len(keys)
            tokens = np.frombuffer(message.token_ids, np.int32).tolist()
            assert len(tokens) == sum(counts), "counts and tokens agree"
            for key, count in zip(keys, counts, strict=True):
                assert key not in self.finished, f"tokens for request {key}, which has ended"
                self.tokens.setdefault(key, []).extend(tokens[:count])
                del tokens[:count]
            for end in message.finished:
                assert end.key not in self.finished, f"request {end.key} ended twice"
                self.finished[end.key] = end


@dataclass(slots=True)
class FreeLoop:
    """A loop over a `FreeExecutor`, and what it answered."""

    core: EngineCore
    executor: FreeExecutor
    deferred: DeferredExecutor | None
    answers: Answers = field(default_factory=Answers)

    def step(self) -> None:
        """One step; afterwards the ledger agrees."""
        self.answers.take(self.core.step())
        self.core.pool.check()

    def run(self, *, max_steps: int = 10_000) -> int:
        """Until nothing is left to do. Returns the number of steps."""
        for count in range(max_steps):
            if not self.core.has_work:
                return count
            self.step()
        raise AssertionError(f"{len(self.core.scheduler)} requests still wait after {max_steps} steps")

    def close(self) -> None:
        """Stop the worker, if there is one."""
        (self.deferred or self.executor).close()


def free_core(
    *,
    max_num_seqs: int = 8,
    max_model_len: int = 128,
    block_size: int = 4,
    num_blocks: int = 64,
    max_num_batched_tokens: int = 32,
    chunked_prefill: bool = True,
    vocab_size: int = 64,
    num_drafts: int = 0,
    right: int = 2,
    poison: int | None = None,
    refused: int | None = None,
    overlap_depth: int = 0,
    scheduler: Scheduler | None = None,
    allocator: KVAllocator | None = None,
    index: PrefixIndex | None = None,
    adapters: AdapterBackend | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> FreeLoop:
    """A loop with `num_blocks` usable blocks. At depth 1 the executor answers later."""
    executor = FreeExecutor(
        max_num_seqs,
        max_model_len,
        block_size,
        vocab_size=vocab_size,
        num_drafts=num_drafts,
        right=right,
        poison=poison,
        refused=refused,
    )
    deferred = DeferredExecutor(executor) if overlap_depth else None
    runs = deferred or executor
    runs.allocate(KVLayout((KVGroup((0,), None, 8 * block_size),), block_size, num_blocks + 1, "float32"))
    pool = BlockPool(num_blocks + 1, allocator or PagedAllocator(num_blocks + 1), index)
    admission = Admission(
        pool, block_size=block_size, chunked_prefill=chunked_prefill, adapters=adapters, max_drafts=num_drafts
    )
    core = EngineCore(
        scheduler=FcfsScheduler() if scheduler is None else scheduler,
        pool=pool,
        executor=runs,
        table=RowTable(max_num_seqs, max_model_len, block_size),
        admission=admission,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_drafts=num_drafts,
        overlap_depth=overlap_depth,
        clock=clock,
    )
    return FreeLoop(core, executor, deferred)


def free_request(
    key: int,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    eos_token_ids: tuple[int, ...] = (),
    seed: int = 0,
    choice: int = 0,
    arrival_s: float = 0.0,
    timeout_s: float | None = None,
    priority: int = 0,
    tenant: str = "",
    adapter: str | None = None,
    cache_salt: str | None = None,
    params: SamplingParams | None = None,
) -> EngineRequest:
    """A choice as the API side would send it."""
    return EngineRequest(
        key=key,
        request_id=f"request-{key}",
        prompt=np.array(prompt, np.int32).tobytes(),
        params=params or SamplingParams(),
        seed=seed,
        choice=choice,
        max_tokens=max_tokens,
        eos_token_ids=eos_token_ids,
        adapter=adapter,
        priority=priority,
        cache_salt=cache_salt,
        tenant=tenant,
        arrival_s=arrival_s,
        timeout_s=timeout_s,
    )
