"""Planning a step: who advances by how many tokens, and the blocks, slots and rows for it.

The policy proposes (`Scheduler.grant`, `candidates`, `victims`), core disposes: it gives blocks, admits and preempts.
Differences for the runner are collected here until the next plan carries them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from enginectl.engine.admission import Admission, Grant
from enginectl.engine.batch import RowTable
from enginectl.engine.counters import Counters
from enginectl.engine.ledger import BlockPool
from enginectl.engine.request import Request
from enginectl.engine.speculation import SpeculationController
from enginectl.interfaces.executor import NewRow, StepPlan
from enginectl.interfaces.scheduler import Scheduler, StepBudget
from enginectl.types import FinishReason

IntRows = NDArray[np.int32]
_NO_ROWS = np.zeros(0, np.int32)


class EndRequest(Protocol):
    """Ends a request that waits: it was wrong, or what it needs is gone."""

    def __call__(self, request: Request, reason: FinishReason, *, error: str | None, refused: bool) -> None: ...


@dataclass(slots=True)
class _Changes:
    """Differences collected for the next plan."""

    removed: list[int] = field(default_factory=list)
    added: list[NewRow] = field(default_factory=list)
    block_rows: list[IntRows] = field(default_factory=list)
    block_columns: list[IntRows] = field(default_factory=list)
    block_ids: list[IntRows] = field(default_factory=list)


def _joined(parts: list[IntRows]) -> IntRows:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class Planner:
    """Makes step plans over the row table. The rest of the loop shares `table`, `pool` and `counters` with it.

    overlaps: steps may be in flight while the next is planned. num_lookahead, speculation: see `EngineCore`.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pool: BlockPool,
        table: RowTable,
        admission: Admission,
        counters: Counters,
        budget: StepBudget,
        block_size: int,
        max_drafts: int,
        num_lookahead: int,
        speculation: SpeculationController | None,
        overlaps: bool,
        end: EndRequest,
    ) -> None:
        self.scheduler = scheduler
        self.pool = pool
        self.table = table
        self.admission = admission
        self.counters = counters
        self.budget = budget
        self._block_size = block_size
        self._max_drafts = max_drafts
        self._num_lookahead = num_lookahead
        self._speculation = speculation
        self._overlaps = overlaps
        self._end = end
        self._changes = _Changes()
        self._no_drafts = np.zeros(len(table.requests), np.int32)
        self._no_drafts.flags.writeable = False
        # Bound once: the step makes no attribute chains through replaceable parts.
        self._grant = scheduler.grant

    def plan(self, now: float, drain: Callable[[], None], *, must_drain: bool) -> StepPlan | None:
        """The next step, or None if nobody can advance. Blocks are given, rows admitted and preempted on the way.

        drain: retires the steps in flight. must_drain: drafts are in flight, and how many were accepted, or are
        proposed, decides what comes next.
        """
        if must_drain:
            drain()
        counts = self._grant_running(now)
        if counts is None:  # blocks ran out and steps are in flight: their rows must come back first
            drain()
            counts = self._grant_running(now)
            assert counts is not None, "nothing is in flight"
        if self.table.num_free_rows and len(self.scheduler):
            left = self._left_for_prompts(counts)
            admitted = self._admit(left, now) if left > 0 else None
            if admitted:
                counts = np.append(counts, np.array(admitted, np.int32))
        rows = self.table.order
        if not rows.size:
            return None
        if not counts.all():
            active = counts > 0
            rows, counts = rows[active], counts[active]
            if not rows.size:
                return None
        return self._make_plan(rows, counts)

    def _left_for_prompts(self, counts: IntRows) -> int:
        """Tokens that requests which are admitted now may read in this step."""
        budget = self.budget
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
            columns, known, computed = t.columns(), t.num_tokens[rows], t.num_computed[rows]
            pending = known - computed
            if t.holds_drafts:
                pending += t.num_drafts[rows]
            if self._overlaps:
                pending[known > columns.last] = 0  # its last token is on the way
            running = columns.running
            running.num_pending, running.num_tokens = pending, known
            self.budget.num_free_rows = t.num_free_rows
            counts = self._grant(running, self.budget, now)
            ends = computed + counts
            if ahead:  # slots for what the speculator computes behind the verified tokens
                ends = np.maximum(np.minimum(ends + ahead, columns.last + 1), ends)
            held = t.num_blocks[rows]
            needy = np.flatnonzero(ends > held * self._block_size)
            if not needy.size:
                return counts
            held = held[needy]
            short = (ends[needy] + (self._block_size - 1)) // self._block_size - held
            wanted = int(short.sum())
            if wanted <= self.pool.num_available:
                self._give_blocks(rows[needy], held, short, wanted)
                return counts
            if ahead:  # drafts are a bonus: nobody waits or is preempted for them
                ahead = 0
                continue
            if t.in_flight.any():
                return None
            if t.holds_drafts and t.num_drafts[rows].any():
                t.num_drafts[rows] = 0
                continue
            self._preempt(int(self.scheduler.victims(running, now)[0]), now)

    def _give_blocks(self, rows: IntRows, held: IntRows, short: IntRows, wanted: int) -> None:
        """Blocks behind those that the rows hold. wanted: the sum of short."""
        ids = self.pool.take(wanted)
        self.table.num_blocks[rows] = held + short
        columns = held
        if wanted > rows.size:
            first = np.repeat(np.cumsum(short) - short, short)
            columns = (np.repeat(held, short) + np.arange(wanted) - first).astype(np.int32)
            rows = np.repeat(rows, short)
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
        self.vacate(row, preempted=True)
        self.scheduler.finished(request, now)
        self.scheduler.add(request, resumed=True)

    def _admit(self, budget: int, now: float) -> list[int]:
        """Give rows to waiting requests while tokens, rows and blocks last. Returns their token counts."""
        t, counts = self.table, []
        owed = self._blocks_owed(t.order)
        no_slot: set[str | None] = set()  # nobody gives a slot back in here: who asked in vain asks once
        for request in self.scheduler.candidates(now):
            if request.spec.adapter in no_slot:
                grant: Grant | str = "adapter"
            else:
                grant = self.admission.try_acquire(request, min(budget, self.budget.max_chunk), len(t.order), owed)
            if isinstance(grant, str):
                if grant == "adapter":
                    no_slot.add(request.spec.adapter)
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
        is_single = bool(single.all())
        if not is_single:
            order = np.argsort(~single, kind="stable")
            rows, counts = rows[order], counts[order]
        computed = t.num_computed[rows]
        drafts = computed + counts - t.num_tokens[rows]  # < 0 while the prompt is being caught up with
        is_decode = is_single and not drafts.any()
        samples = drafts >= 0
        np.maximum(drafts, 0, out=drafts)
        limits = self._draft_limits(rows, counts, drafts, samples)
        proposes = limits is not None and bool(limits.any())
        has_drafts = proposes or (not is_decode and bool(drafts.any()))
        if limits is None:
            limits = self._no_drafts[: rows.size]
        plan = StepPlan(rows, computed, counts, drafts, samples, limits, is_decode=is_decode, has_drafts=has_drafts)
        changes = self._changes
        if changes.removed or changes.added or changes.block_ids:
            plan.removed, plan.added = changes.removed, changes.added
            if changes.block_ids:
                plan.block_rows = _joined(changes.block_rows)
                plan.block_columns = _joined(changes.block_columns)
                plan.block_ids = _joined(changes.block_ids)[None]
            self._changes = _Changes()
        return plan

    def _draft_limits(
        self, rows: IntRows, counts: IntRows, drafts: IntRows, samples: NDArray[np.bool_]
    ) -> IntRows | None:
        """Drafts to propose for the next step, [n]: what may be of use, as far as the controller gives it; None for none."""
        t, controller = self.table, self._speculation
        if not self._max_drafts:
            return None
        if controller is None:
            return self._useful_drafts(rows, drafts) * samples
        # Prompts that go on, or wait, fill the next step too.
        if samples.all():
            waits = len(self.scheduler) and t.num_free_rows
            num_busy, num_rows = self.budget.num_tokens if waits else 0, rows.size
        else:
            num_busy, num_rows = int(counts[~samples].sum()), int(samples.sum())
        if controller.is_off(num_rows, num_busy):
            return None
        room = self._useful_drafts(rows, drafts)
        if num_rows == rows.size:
            return controller.limits(rows, room, num_busy)
        limits = np.zeros_like(room)
        limits[samples] = controller.limits(rows[samples], room[samples], num_busy)
        return limits

    def _useful_drafts(self, rows: IntRows, drafts: IntRows) -> IntRows:
        """As many as the request allows and the rest of its output has room for, [n]."""
        t = self.table
        room = t.max_tokens[rows] - t.num_tokens[rows] - drafts - 2
        useful: IntRows = np.clip(room, 0, t.draft_limit[rows]).astype(np.int32)
        return useful

    def vacate(self, row: int, *, preempted: bool) -> None:
        """Nobody runs in this row any more: give back its blocks and slot, and tell the runner."""
        t = self.table
        request = t.request(row)
        self.pool.release(t.blocks(row).copy())
        self.admission.release(request, preempted=preempted)
        if self._speculation is not None:
            self._speculation.close_row(row)
        t.free(row)
        self._changes.removed.append(row)
