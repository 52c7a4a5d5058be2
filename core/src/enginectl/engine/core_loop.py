"""The engine loop: schedule, launch, retire, emit.

No prefill phase and no decode phase: a row has tokens, some of them computed, and each step lets it catch up. Chunked
prefill, prefix hits, preemption by recompute and speculation are all that one rule.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from enginectl.engine.admission import Admission
from enginectl.engine.batch import RowTable
from enginectl.engine.ledger import BlockPool
from enginectl.engine.narrow import run_narrowed
from enginectl.engine.outputs import OutputBuilder
from enginectl.engine.request import Request
from enginectl.engine.speculation import SpeculationController
from enginectl.errors import EngineDeadError
from enginectl.interfaces.executor import Executor, NewRow, StepHandle, StepPlan, StepResult
from enginectl.interfaces.scheduler import Scheduler, StepBudget
from enginectl.types import EngineRequest, EngineStats, FinishReason, StepOutputs

log = logging.getLogger("enginectl.engine")

IntRows = NDArray[np.int32]
_Ended = tuple[IntRows, IntRows, NDArray[np.bool_]]
_NO_ROWS = np.zeros(0, np.int32)
_REPORT_INTERVAL_S = 60.0
_NEVER = np.iinfo(np.int32).max
"""Blocks that a row seems to have published, so that it publishes no others."""


@dataclass(slots=True)
class Flight:
    """A launched step: its plan, its handle, and where its sampling rows stood. base: [m] index of the first token
    that the rows in `sampled` will get.
    """

    plan: StepPlan
    handle: StepHandle
    sampled: IntRows
    base: IntRows
    launched_s: float

    @property
    def has_drafts(self) -> bool:
        """Whether drafts are verified in it or may be proposed by it."""
        return bool(self.plan.num_drafts.any() or self.plan.draft_limits.any())


@dataclass(slots=True)
class Counters:
    """Totals since the engine started. drafted_at, accepted_at: drafts by their position behind the verified tokens."""

    drafted_at: NDArray[np.int64]
    accepted_at: NDArray[np.int64]
    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class _Changes:
    """Differences collected for the next plan."""

    removed: list[int] = field(default_factory=list)
    added: list[NewRow] = field(default_factory=list)
    block_rows: list[IntRows] = field(default_factory=list)
    block_columns: list[IntRows] = field(default_factory=list)
    block_ids: list[IntRows] = field(default_factory=list)


class EngineCore:
    """One engine's loop. Not thread safe: one thread calls `add`, `abort`, `step`.

    num_lookahead: slots kept behind each row's tokens, for speculators with layers of their own. speculation: chooses
    draft lengths; without it every row gets as many as it allows.
    overlap_depth: 0 retires each step before the next is planned; 1 plans step N + 1 while step N runs.
    max_prefill: most prompt tokens of a step in which rows decode, None for no limit but the budget.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pool: BlockPool,
        executor: Executor,
        table: RowTable,
        admission: Admission,
        block_size: int,
        max_num_batched_tokens: int,
        max_chunk: int | None = None,
        max_drafts: int = 0,
        max_prefill: int | None = None,
        num_lookahead: int = 0,
        speculation: SpeculationController | None = None,
        overlap_depth: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.pool = pool
        self.executor = executor
        self.table = table
        self.admission = admission
        self.counters = Counters(np.zeros(max_drafts, np.int64), np.zeros(max_drafts, np.int64))
        self.outputs = OutputBuilder(table)
        self._block_size = block_size
        self._budget = StepBudget(
            max_num_batched_tokens, max_chunk or max_num_batched_tokens, max_prefill, 1 + max_drafts
        )
        self._max_drafts = max_drafts
        self._num_lookahead = num_lookahead
        self._speculation = speculation
        self._retired_s = 0.0
        self._report_at_s = 0.0
        self._reported = (0, 0)
        self._depth = overlap_depth
        self._clock = clock
        self._requests: dict[int, Request] = {}
        self._flights: deque[Flight] = deque()
        self._changes = _Changes()
        self._now = clock()
        self._next_deadline_s = float("inf")
        self.made_progress = False
        self._last_tokens, self._last_s = 0, 0.0
        # Bound once: the step makes no attribute chains through replaceable parts.
        self._grant = scheduler.grant
        self._launch = executor.launch

    # -- what callers do -----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do or tell something."""
        return bool(self._requests) or bool(self._flights) or self.outputs.is_pending

    def add(self, spec: EngineRequest) -> None:
        """Queue a choice. It was validated on the API side; what can only be known here ends it with an error."""
        request = Request(spec)
        try:
            reason = self.admission.refuses(request)
            if reason is None:
                self.admission.prepare(request)
        except Exception as error:  # a part that checks requests is broken: this one ends, the loop goes on
            log.exception("checking request %s failed", spec.request_id)
            self.outputs.finish(request, FinishReason.ERROR, self._clock(), error=f"{type(error).__name__}: {error}")
            return
        if reason is not None:
            self.outputs.finish(request, FinishReason.ERROR, self._clock(), error=reason, refused=True)
            return
        self._requests[request.key] = request
        self._next_deadline_s = min(self._next_deadline_s, request.deadline_s)
        self.scheduler.add(request, resumed=False)

    def abort(self, keys: Iterable[int]) -> None:
        """End these choices; unknown keys are ignored (they ended already)."""
        for key in keys:
            request = self._requests.get(key)
            if request is not None:
                self._end(request, FinishReason.ABORT)

    def step(self) -> list[StepOutputs]:
        """Plan and launch one step, retire the oldest one that is due, and return what became known.

        `made_progress` tells afterwards whether anything was launched or retired; if not, waiting requests need
        something that is not there yet (a compiled grammar, an adapter slot).
        """
        self._now = now = self._clock()
        self.made_progress = False
        if now >= self._next_deadline_s:
            self._expire(now)
        plan = self._plan(now)
        if plan is not None:
            self._flights.append(self._start(plan))
            self.counters.steps += 1
            self.made_progress = True
        if self._flights and (plan is None or len(self._flights) > self._depth):
            self._retire(self._flights.popleft())
        return self.outputs.take(self.stats)

    def drain(self) -> None:
        """Retire every step in flight; what became known is in the next `step`'s output."""
        while self._flights:
            self._retire(self._flights.popleft())

    def reset_prefix_cache(self, adapter: str | None = None) -> int:
        """Forget cached contents (one adapter's, or all). Returns how many blocks were known.

        Rows that run publish no more: what they hold may come from weights that have just been replaced.
        """
        self.drain()
        t = self.table
        for row in t.order.tolist():
            if adapter is None or t.request(row).spec.adapter == adapter:
                t.num_published[row] = _NEVER
        return self.pool.reset_index(adapter)

    def stats(self) -> EngineStats:
        """State now; counters are totals."""
        c, pool, speculation = self.counters, self.pool, self._speculation
        return EngineStats(
            num_running=len(self.table.order),
            num_waiting=len(self.scheduler),
            num_blocks=pool.num_usable,
            num_blocks_in_use=pool.num_in_use,
            num_blocks_idle=pool.allocator.num_idle,
            num_preemptions=c.preemptions,
            num_prompt_tokens=c.prompt_tokens,
            num_generation_tokens=c.generation_tokens,
            prefix_queries=self.admission.prefix_queries,
            prefix_hits=self.admission.prefix_hits,
            num_drafted=c.drafted,
            num_accepted=c.accepted,
            num_steps=c.steps,
            step_tokens=self._last_tokens,
            step_s=self._last_s,
            drafted_by_position=tuple(c.drafted_at.tolist()),
            accepted_by_position=tuple(c.accepted_at.tolist()),
            draft_length=0.0 if speculation is None else speculation.mean_length,
        )

    # -- schedule ------------------------------------------------------------------------------------------------

    def _plan(self, now: float) -> StepPlan | None:
        if self._max_drafts and any(flight.has_drafts for flight in self._flights):
            self.drain()  # how many drafts were accepted, or are proposed, decides what comes next
        counts = self._grant_running(now)
        if counts is None:  # blocks ran out and steps are in flight: their rows must come back first
            self.drain()
            counts = self._grant_running(now)
            assert counts is not None, "nothing is in flight"
        rows = self.table.order
        left = self._left_for_prompts(counts)
        if left > 0 and self.table.num_free_rows and len(self.scheduler):
            admitted = self._admit(left, now)
            if admitted:
                counts = np.append(counts, np.array(admitted, np.int32))
                rows = self.table.order
        if not rows.size:
            return None
        active = counts > 0
        if not active.all():
            rows, counts = rows[active], counts[active]
            if not rows.size:
                return None
        return self._make_plan(rows, counts)

    def _left_for_prompts(self, counts: IntRows) -> int:
        """Tokens that requests which are admitted now may read in this step."""
        budget = self._budget
        left = budget.num_tokens - int(counts.sum())
        if budget.max_prefill is None:
            return left
        reads = counts > budget.max_decode
        decodes = bool((counts[~reads] > 0).any())
        return min(left, budget.max_prefill - int(counts[reads].sum())) if decodes else left

    def _grant_running(self, now: float) -> IntRows | None:
        """Tokens each running row advances, with blocks for them; None if steps in flight must be retired first."""
        t, ahead = self.table, self._num_lookahead
        while True:
            rows = t.order
            if not rows.size:
                return _NO_ROWS
            pending = t.num_tokens[rows] + t.num_drafts[rows] - t.num_computed[rows]
            if self._depth:
                pending[t.num_tokens[rows] >= t.max_tokens[rows]] = 0  # its last token is on the way
            running = t.running(pending)
            self._budget.num_free_rows = t.num_free_rows
            counts = self._grant(running, self._budget, now)
            ends = t.num_computed[rows] + counts
            if ahead:  # slots for what the speculator computes behind the verified tokens
                ends = np.maximum(np.minimum(ends + ahead, t.max_tokens[rows]), ends)
            short = (ends + (self._block_size - 1)) // self._block_size - t.num_blocks[rows]
            np.maximum(short, 0, out=short)
            wanted = int(short.sum())
            if wanted == 0:
                return counts
            if wanted <= self.pool.num_available:
                needy = short > 0
                self._give_blocks(rows[needy], short[needy])
                return counts
            if ahead:  # drafts are a bonus: nobody waits or is preempted for them
                ahead = 0
                continue
            if self._flights:
                return None
            if t.num_drafts[rows].any():
                t.num_drafts[rows] = 0
                continue
            self._preempt(int(self.scheduler.victims(running, now)[0]), now)

    def _give_blocks(self, rows: IntRows, short: IntRows) -> None:
        t = self.table
        ids = self.pool.take(int(short.sum()))
        columns = t.num_blocks[rows]
        if short.max() > 1:
            first = np.repeat(np.cumsum(short) - short, short)
            columns = (np.repeat(columns, short) + np.arange(ids.size) - first).astype(np.int32)
            t.num_blocks[rows] += short
            rows = np.repeat(rows, short)
        else:
            t.num_blocks[rows] += 1
        self._set_blocks(rows, columns, ids)

    def _set_blocks(self, rows: IntRows, columns: IntRows, ids: IntRows) -> None:
        self.table.block_table[:, rows, columns] = ids
        self._changes.block_rows.append(rows)
        self._changes.block_columns.append(columns)
        self._changes.block_ids.append(ids)

    def _preempt(self, index: int, now: float) -> None:
        """The victim gives up its row and blocks and waits again; it recomputes from its tokens when it resumes."""
        t = self.table
        row = int(t.order[index])
        request = t.request(row)
        request.token_ids = t.token_ids[row, : t.num_tokens[row]].copy()
        request.num_preemptions += 1
        self.counters.preemptions += 1
        t.close(row)
        self._vacate(row)
        self.scheduler.finished(request, now)
        self.scheduler.add(request, resumed=True)

    def _admit(self, budget: int, now: float) -> list[int]:
        """Give rows to waiting requests while tokens, rows and blocks last. Returns their token counts."""
        t, counts = self.table, []
        owed = self._blocks_owed(t.order)
        for request in self.scheduler.candidates(now):
            grant = self.admission.try_acquire(request, min(budget, self._budget.max_chunk), len(t.order), owed)
            if isinstance(grant, str):
                if grant == "error":
                    refused = self.admission.is_refusal and request.num_preemptions == 0
                    self._end(request, FinishReason.ERROR, error=self.admission.error, refused=refused)
                    continue
                if self.scheduler.refused(request, grant, now):
                    continue
                break
            self.scheduler.remove(request)
            row = t.add(request)
            self._place(request, row, grant.num_cached, grant.blocks, now)
            owed += self._blocks_owed(t.order[-1:])
            counts.append(grant.num_tokens)
            budget -= grant.num_tokens
            if budget <= 0 or not t.num_free_rows:
                break
        return counts

    def _blocks_owed(self, rows: IntRows) -> int:
        """Blocks that these rows still need for the tokens they have: prompts that are being caught up with."""
        t = self.table
        short = (t.num_tokens[rows] + (self._block_size - 1)) // self._block_size - t.num_blocks[rows]
        return int(np.maximum(short, 0).sum())

    def _place(self, request: Request, row: int, num_cached: int, blocks: IntRows, now: float) -> None:
        t = self.table
        t.num_computed[row] = num_cached
        t.num_blocks[row] = blocks.size
        t.num_published[row] = num_cached // self._block_size
        self._set_blocks(np.full(blocks.size, row, np.int32), np.arange(blocks.size, dtype=np.int32), blocks)
        if request.num_preemptions == 0:
            request.scheduled_s = now
            request.num_cached_tokens = num_cached
            self.counters.prompt_tokens += request.prompt_len
        spec = request.spec
        t.draft_limit[row] = self.admission.draft_limit(spec.params)
        if self._speculation is not None:
            self._speculation.open_row(row, spec.params)
        grammar = request.grammar.result() if request.grammar is not None else None
        self._changes.added.append(
            NewRow(
                row=row,
                request_id=spec.request_id,
                token_ids=request.token_ids,
                prompt_len=request.prompt_len,
                params=spec.params,
                seed=spec.seed,
                choice=spec.choice,
                eos_token_ids=spec.eos_token_ids,
                adapter_slot=request.adapter_slot,
                grammar=grammar,
            )
        )

    def _make_plan(self, rows: IntRows, counts: IntRows) -> StepPlan:
        t = self.table
        single = counts == 1
        if not single.all():
            order = np.argsort(~single, kind="stable")
            rows, counts = rows[order], counts[order]
        computed = t.num_computed[rows]
        drafts = computed + counts - t.num_tokens[rows]  # < 0 while the prompt is being caught up with
        samples = drafts >= 0
        np.maximum(drafts, 0, out=drafts)
        limits = t.draft_limit[rows]
        if self._max_drafts:
            room = t.max_tokens[rows] - t.num_tokens[rows] - drafts - 2
            limits = np.clip(room, 0, limits).astype(np.int32)
            if self._speculation is not None:
                limits = self._draft_limits(self._speculation, rows, counts, samples, limits)
        plan = StepPlan(rows, computed, counts, drafts, samples, limits)
        changes = self._changes
        if changes.removed or changes.added or changes.block_ids:
            plan.removed, plan.added = changes.removed, changes.added
            if changes.block_ids:
                plan.block_rows = np.concatenate(changes.block_rows)
                plan.block_columns = np.concatenate(changes.block_columns)
                plan.block_ids = np.concatenate(changes.block_ids)[None]
            self._changes = _Changes()
        return plan

    def _draft_limits(
        self,
        speculation: SpeculationController,
        rows: IntRows,
        counts: IntRows,
        samples: NDArray[np.bool_],
        room: IntRows,
    ) -> IntRows:
        """What the controller gives the rows that sample; prompts that go on, or wait, fill the next step too."""
        if samples.all():
            waits = len(self.scheduler) and self.table.num_free_rows
            return speculation.limits(rows, room, self._budget.num_tokens if waits else 0)
        limits = np.zeros_like(room)
        limits[samples] = speculation.limits(rows[samples], room[samples], int(counts[~samples].sum()))
        return limits

    def _start(self, plan: StepPlan) -> Flight:
        """Launch, and advance the books as if it had worked: each sampling row has one more token, value to come."""
        t = self.table
        handle = self._launch(plan)
        rows = plan.rows
        sampled = rows if plan.samples.all() else rows[plan.samples]
        base = t.num_tokens[sampled]
        t.num_computed[rows] += plan.num_tokens
        t.num_tokens[sampled] += 1
        t.num_drafts[rows] = 0
        t.in_flight[rows] += 1
        return Flight(plan, handle, sampled, base, self._now)

    # -- update --------------------------------------------------------------------------------------------------

    def _retire(self, flight: Flight) -> None:
        """Commit what a step produced: tokens, stops, published blocks, drafts, rows that end."""
        t, plan = self.table, flight.plan
        self.made_progress = True
        self.outputs.seal()
        try:
            result = flight.handle.wait()
        except Exception as error:
            result = self._recover(flight, error)
        if self._speculation is not None:
            self._observe(self._speculation, flight, result)
        self._last_tokens, self._last_s = int(plan.num_tokens.sum()), self._clock() - flight.launched_s
        t.in_flight[plan.rows] -= 1
        sampled, base = flight.sampled, flight.base
        if result.errors:
            result, sampled, base = self._drop_failed(result, sampled, base)
        ended = self._commit(result, sampled, base, plan)
        if self.pool.index is not None:
            self._publish(plan)  # before rows end, so that their last blocks are known
        if ended is not None:
            self._end_rows(*ended)
        if t.is_closing.any():
            closing = plan.rows[t.is_closing[plan.rows] & (t.in_flight[plan.rows] == 0)]
            for row in closing.tolist():
                self._vacate(row)

    def _observe(self, speculation: SpeculationController, flight: Flight, result: StepResult) -> None:
        """Tell the controller what the step cost, had to propose, and accepted."""
        now, plan = self._clock(), flight.plan
        started = max(flight.launched_s, self._retired_s)
        self._retired_s = now
        if now >= self._report_at_s:
            self._report(speculation, now)
        if result.errors:
            return
        if (plan.num_tokens == plan.num_drafts + 1).all():  # no prompt in it, whose tokens cost less
            num_tokens, longest = int(plan.num_tokens.sum()), int(plan.draft_limits.max())
            num_drafts = num_tokens - plan.rows.size
            speculation.observe_step(num_tokens, num_drafts, now - started, result.propose_s, longest)
        if flight.has_drafts and result.rows.size:
            samples = plan.samples
            speculation.observe_proposals(result.rows, plan.draft_limits[samples], result.num_drafts)
            speculation.observe_verified(result.rows, plan.num_drafts[samples], result.num_new - 1)

    def _report(self, speculation: SpeculationController, now: float) -> None:
        """One line a minute in the log, when there were drafts."""
        drafted, accepted = self.counters.drafted, self.counters.accepted
        drafted_before, accepted_before = self._reported
        self._reported, self._report_at_s = (drafted, accepted), now + _REPORT_INTERVAL_S
        if drafted > drafted_before:
            share = (accepted - accepted_before) / (drafted - drafted_before)
            log.info(
                "speculation: %d of %d drafts accepted (%.0f %%); %.1f drafts a row now",
                accepted - accepted_before,
                drafted - drafted_before,
                100 * share,
                speculation.mean_length,
            )

    def _recover(self, flight: Flight, error: Exception) -> StepResult:
        """A step raised: undo later flights (they did not run), then run its rows in halves to find the culprit.

        When every row fails, it may be the requests or the device: the executor is asked. Raises EngineDeadError if the
        device is lost.
        """
        later = list(self._flights)
        self._flights.clear()
        for other in reversed(later):
            self._undo(other)
        log.warning("step %d raised %s: %s; narrowing it down", self.counters.steps, type(error).__name__, error)
        result = run_narrowed(self.executor, flight.plan)
        if len(result.errors) == len(flight.plan.rows) and not self.executor.is_healthy():
            raise EngineDeadError(f"the device is lost: {type(error).__name__}: {error}") from error
        return result

    def _undo(self, flight: Flight) -> None:
        t, rows = self.table, flight.plan.rows
        try:
            flight.handle.wait()
        except Exception as skipped:
            log.debug("later step skipped: %s", skipped)
        t.num_computed[rows] -= flight.plan.num_tokens
        t.num_tokens[flight.sampled] -= 1
        t.in_flight[rows] -= 1
        for row in rows[t.is_closing[rows] & (t.in_flight[rows] == 0)].tolist():
            self._vacate(row)

    def _drop_failed(self, result: StepResult, sampled: IntRows, base: IntRows) -> tuple[StepResult, IntRows, IntRows]:
        failed = np.fromiter(result.errors, np.int32, len(result.errors))
        for row in failed.tolist():
            request = self.table.requests[row]
            if request is not None and not self.table.is_closing[row]:
                self._end(request, FinishReason.ERROR, error=result.errors[row])
        keep = ~np.isin(sampled, failed)
        return result.select(~np.isin(result.rows, failed)), sampled[keep], base[keep]

    def _commit(self, result: StepResult, sampled: IntRows, base: IntRows, plan: StepPlan) -> _Ended | None:
        """Write the new tokens into the books. Returns the rows that ended, their last tokens, and which hit a stop."""
        t = self.table
        if result.prompt_logprobs:
            self.outputs.add_prompt_logprobs(result.prompt_logprobs)
        if not sampled.size:
            return None
        assert result.rows is sampled or np.array_equal(result.rows, sampled), "results come in plan order"
        if t.is_closing.any():
            alive = ~t.is_closing[sampled]
            if not alive.all():
                result, sampled, base = result.select(alive), sampled[alive], base[alive]
        if result.token_ids.shape[1] == 1:
            return self._commit_one(result, sampled, base, result.token_ids[:, 0])
        return self._commit_many(result, sampled, base, plan)

    def _commit_one(self, result: StepResult, rows: IntRows, base: IntRows, tokens: IntRows) -> _Ended | None:
        """One new token a row: the plain decode step."""
        t = self.table
        t.token_ids[rows, base] = tokens
        stopped = (t.stop_ids[rows] == tokens[:, None]).any(1)
        ended = stopped | (base + 1 >= t.max_tokens[rows])
        self.counters.generation_tokens += rows.size
        self.outputs.add_tokens(rows, None, tokens, result.logprobs)
        if self._max_drafts:
            t.num_drafts[rows] = result.num_drafts
        self._note_first_tokens(rows)
        return (rows[ended], tokens[ended], stopped[ended]) if ended.any() else None

    def _commit_many(self, result: StepResult, rows: IntRows, base: IntRows, plan: StepPlan) -> _Ended | None:
        """Accepted drafts and the token after them, cut at the first stop."""
        t, tokens, num_new = self.table, result.token_ids, result.num_new
        width = tokens.shape[1]
        column = np.arange(width, dtype=np.int32)
        valid = column < num_new[:, None]
        drafted = np.zeros(len(t.requests), np.int32)
        drafted[plan.rows] = plan.num_drafts
        rejected = drafted[rows] - (num_new - 1)
        self.counters.drafted += int(drafted[rows].sum())
        self.counters.accepted += int((num_new - 1).sum())
        self.counters.drafted_at[: width - 1] += (column[:-1] < drafted[rows][:, None]).sum(0)
        self.counters.accepted_at[: width - 1] += (column[1:] < num_new[:, None]).sum(0)
        is_stop = (t.stop_ids[rows][:, None, :] == tokens[:, :, None]).any(2) & valid
        at_limit = (base[:, None] + column + 1 >= t.max_tokens[rows][:, None]) & valid
        end = is_stop | at_limit
        ended = end.any(1)
        num_kept = np.where(ended, end.argmax(1) + 1, num_new).astype(np.int32)
        kept = column < num_kept[:, None]
        which, at = np.nonzero(kept)
        t.token_ids[rows[which], base[which] + at] = tokens[kept]
        t.num_tokens[rows] += num_kept - 1
        t.num_computed[rows] -= rejected + (num_new - num_kept)
        t.num_drafts[rows] = result.num_drafts
        self.counters.generation_tokens += int(num_kept.sum())
        if not ended.any():
            num_kept = num_new
        self.outputs.add_tokens(rows, num_kept, tokens[kept], result.logprobs)
        self._note_first_tokens(rows)
        if not ended.any():
            return None
        index, last = np.nonzero(ended)[0], num_kept[ended] - 1
        return rows[ended], tokens[index, last], is_stop[index, last]

    def _note_first_tokens(self, rows: IntRows) -> None:
        t = self.table
        first = rows[t.awaits_first[rows]]
        if first.size:
            t.awaits_first[first] = False
            now = self._clock()
            for row in first.tolist():
                t.request(row).first_token_s = now

    def _publish(self, plan: StepPlan) -> None:
        """Blocks that became full and verified enter the prefix index. Loops over rows that filled one, only."""
        t, index, rows = self.table, self.pool.index, plan.rows
        assert index is not None, "called with an index only"
        verified = np.minimum(plan.num_computed + plan.num_tokens, t.num_tokens[rows] - 1 - (t.in_flight[rows] > 0))
        full = verified // self._block_size
        filled = full > t.num_published[rows]
        if not filled.any():
            return
        for row, count in zip(rows[filled].tolist(), full[filled].tolist(), strict=True):
            request = t.requests[row]
            if request is None or t.is_closing[row]:
                continue
            tokens = t.token_ids[row, : count * self._block_size]
            start = int(t.num_published[row])
            index.publish(request.key, tokens, t.block_table[0, row, :count], start, request.block_key)
            t.num_published[row] = count

    # -- ends ----------------------------------------------------------------------------------------------------

    def _end_rows(self, rows: IntRows, tokens: IntRows, stopped: NDArray[np.bool_]) -> None:
        for row, token, stop in zip(rows.tolist(), tokens.tolist(), stopped.tolist(), strict=True):
            request = self.table.request(row)
            reason = FinishReason.STOP if stop else FinishReason.LENGTH
            by_request = stop and token not in request.spec.eos_token_ids
            self._end(request, reason, stop_token_id=token if by_request else None)

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        error: str | None = None,
        refused: bool = False,
    ) -> None:
        """The choice is over: tell the caller, and give back what it held, now or when its steps in flight return."""
        now = self._clock()
        del self._requests[request.key]
        self.outputs.finish(request, reason, now, stop_token_id=stop_token_id, error=error, refused=refused)
        if request.row < 0:
            self.scheduler.remove(request)
            self.admission.forget(request)
            return
        self.scheduler.finished(request, now)
        row = request.row
        self.table.close(row)
        if self.table.in_flight[row] == 0:
            self._vacate(row)

    def _vacate(self, row: int) -> None:
        t = self.table
        request = t.request(row)
        self.pool.release(t.blocks(row).copy())
        self.admission.release(request, preempted=request.key in self._requests)
        t.is_closing[row] = False
        t.free(row)
        self._changes.removed.append(row)

    def _expire(self, now: float) -> None:
        late = [request for request in self._requests.values() if request.deadline_s <= now]
        for request in late:
            self._end(request, FinishReason.ERROR, error=f"timeout of {request.spec.timeout_s} s exceeded")
        self._next_deadline_s = min((r.deadline_s for r in self._requests.values()), default=float("inf"))
