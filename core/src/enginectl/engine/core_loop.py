"""The engine loop: schedule, launch, retire, emit.

No prefill phase and no decode phase: a row has tokens, some of them computed, and each step lets it catch up. Chunked
prefill, prefix hits, preemption by recompute and speculation are all that one rule.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from enginectl.engine.admission import Admission
from enginectl.engine.batch import ALL_PUBLISHED, RowTable
from enginectl.engine.commit import Committer
from enginectl.engine.counters import Counters
from enginectl.engine.ledger import BlockPool
from enginectl.engine.narrow import run_narrowed
from enginectl.engine.outputs import OutputBuilder
from enginectl.engine.planner import Planner
from enginectl.engine.request import Request
from enginectl.engine.speculation import SpeculationController
from enginectl.errors import EngineDeadError
from enginectl.interfaces.executor import Executor, StepHandle, StepPlan, StepResult
from enginectl.interfaces.scheduler import Scheduler, StepBudget
from enginectl.types import EngineRequest, EngineStats, FinishReason, StepOutputs

log = logging.getLogger("enginectl.engine")

IntRows = NDArray[np.int32]
_REPORT_INTERVAL_S = 60.0


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


class EngineCore:
    """One engine's loop. Not thread safe: one thread calls `add`, `abort`, `step`.

    num_lookahead: slots kept behind each row's tokens, for speculators with layers of their own. speculation: chooses
    draft lengths; without it every row gets as many as it allows.
    overlap_depth: 0 retires each step before the next is planned; 1 plans step N + 1 while step N runs.
    max_prefill: most prompt tokens of a step in which rows decode, None for no limit but the budget.
    """

    committer_type = Committer

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
        self._speculation = speculation
        self._retired_s = 0.0
        self._report_at_s = 0.0
        self._reported = (0, 0)
        self._depth = overlap_depth
        self._clock = clock
        self._requests: dict[int, Request] = {}
        self._flights: deque[Flight] = deque()
        self._now = clock()
        self._next_deadline_s = float("inf")
        self.made_progress = False
        self._last_tokens, self._last_s = 0, 0.0
        self._launch = executor.launch  # bound once: the step makes no attribute chains through replaceable parts
        self._planner = Planner(
            scheduler=scheduler,
            pool=pool,
            table=table,
            admission=admission,
            counters=self.counters,
            budget=StepBudget(max_num_batched_tokens, max_chunk or max_num_batched_tokens, max_prefill, 1 + max_drafts),
            block_size=block_size,
            max_drafts=max_drafts,
            num_lookahead=num_lookahead,
            speculation=speculation,
            overlaps=overlap_depth > 0,
            end=self._end,
        )
        self._committer = self.committer_type(
            table=table,
            outputs=self.outputs,
            counters=self.counters,
            index=pool.index,
            block_size=block_size,
            clock=clock,
        )

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
        plan = self._planner.plan(now, self.drain, must_drain=self._drafts_in_flight())
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
                t.num_published[row] = ALL_PUBLISHED
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

    # -- launch --------------------------------------------------------------------------------------------------

    def _drafts_in_flight(self) -> bool:
        return any(flight.plan.has_drafts for flight in self._flights)

    def _start(self, plan: StepPlan) -> Flight:
        """Launch, and advance the books as if it had worked: each sampling row has one more token, value to come."""
        t = self.table
        handle = self._launch(plan)
        rows = plan.rows
        if plan.is_decode:
            sampled, base = rows, plan.num_computed + 1
            t.num_computed[rows] = base
            t.num_tokens[rows] = base + 1
        else:
            sampled = rows if plan.samples.all() else rows[plan.samples]
            base = t.num_tokens[sampled]
            t.num_computed[rows] += plan.num_tokens
            t.num_tokens[sampled] += 1
        if t.holds_drafts:
            t.num_drafts[rows] = 0
            t.holds_drafts = bool(t.num_drafts.any())
        if self._depth:  # else nothing comes between launch and retirement
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
        self._last_tokens = plan.rows.size if plan.is_decode else int(plan.num_tokens.sum())
        self._last_s = self._clock() - flight.launched_s
        if self._speculation is not None:
            self._observe(self._speculation, flight, result)
        if self._depth:
            t.in_flight[plan.rows] -= 1
        sampled, base = flight.sampled, flight.base
        if result.errors:
            result, sampled, base = self._drop_failed(result, sampled, base)
        ended = self._committer.commit(result, sampled, base, plan)
        if self.pool.index is not None:
            self._committer.publish(plan)  # before rows end, so that their last blocks are known
        if ended is not None:
            self._end_rows(*ended)
        if t.num_closing:
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
        num_drafts, longest = 0, 0
        if plan.has_drafts:
            num_drafts, longest = int(plan.num_drafts.sum()), int(plan.draft_limits.max())
        if self._last_tokens == plan.rows.size + num_drafts:  # no prompt in it, whose tokens cost less
            speculation.observe_step(self._last_tokens, num_drafts, now - started, result.propose_s, longest)
        if plan.has_drafts and result.rows.size:
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
        """A step raised: undo later flights, which did not run (see `in_flight`), then run its rows in halves to find the
        culprit.

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
        if self._depth:
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
        self._planner.vacate(row, preempted=False)

    def _expire(self, now: float) -> None:
        late = [request for request in self._requests.values() if request.deadline_s <= now]
        for request in late:
            self._end(request, FinishReason.ERROR, error=f"timeout of {request.spec.timeout_s} s exceeded")
        self._next_deadline_s = min((r.deadline_s for r in self._requests.values()), default=float("inf"))
