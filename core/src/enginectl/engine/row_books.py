"""Rows that come and go in the runner: everybody who keeps something by row is told."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from enginectl.engine.drafting import Drafter
from enginectl.engine.feedback import TokenFeedback
from enginectl.engine.grammar import GrammarRows
from enginectl.engine.rows import RunnerRows
from enginectl.interfaces.executor import NewRow, StepPlan
from enginectl.interfaces.sampler import RowParts

log = logging.getLogger("enginectl.runner")


class RowBooks:
    """Applies a plan's differences. broken: rows that a part refused, and why; they end alone."""

    def __init__(
        self,
        rows: RunnerRows,
        parts: Sequence[RowParts],
        grammars: GrammarRows,
        drafter: Drafter | None,
        feedback: TokenFeedback | None,
    ) -> None:
        self._rows = rows
        self._parts = tuple(parts)
        self._grammars = grammars
        self._drafter = drafter
        self._feedback = feedback
        self.broken: dict[int, str] = {}

    def apply(self, plan: StepPlan) -> None:
        """Rows that became empty, then new ones, then their blocks."""
        for row in plan.removed:
            self._remove(row)
        for new in plan.added:
            self._add(new)
        if plan.block_ids is not None:
            assert plan.block_rows is not None, "the three come together"
            assert plan.block_columns is not None, "the three come together"
            self._rows.set_blocks(plan.block_rows, plan.block_columns, plan.block_ids)

    def _add(self, new: NewRow) -> None:
        """A part that raises breaks this row alone, and is not asked to remove what it did not add."""
        self._rows.add(new)
        added: list[RowParts] = []
        try:
            for part in self._parts:
                part.add_row(new.row, new.params, new.seed, new.choice, new.prompt_len)
                added.append(part)
            if new.grammar is not None:
                self._grammars.add_row(new.row, new.grammar, new.token_ids[new.prompt_len :], new.eos_token_ids)
        except Exception as error:
            self.broken[new.row] = f"{type(error).__name__}: {error}"
            self._forget(new.row, added)
            return
        if self._drafter is not None:
            self._drafter.add_row(new)

    def _remove(self, row: int) -> None:
        self._rows.remove(row)
        self._grammars.remove_row(row)
        if self._feedback is not None:
            self._feedback.forget(row)
        if self.broken.pop(row, None) is None:
            self._forget(row, self._parts)
        if self._drafter is not None:
            self._drafter.remove_row(row)

    @staticmethod
    def _forget(row: int, parts: Iterable[RowParts]) -> None:
        for part in parts:
            try:
                part.remove_row(row)
            except Exception:
                log.exception("%s failed to remove a row", type(part).__name__)
