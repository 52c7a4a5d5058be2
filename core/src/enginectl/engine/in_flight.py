"""Steps in flight, and what becomes of those behind one that raised.

At overlap depth 1 the loop launches a step while the one before it runs, and advances its books as if both would work.
When a step raises,

1. the executor skips the steps launched behind it, whose input would be its output. Their differences are applied all
   the same, and their handles raise (`LocalRunner`, `DeferredExecutor`);
2. the loop waits for those handles and takes its books back, the newest first. With nothing in flight it runs the rows
   of the step that raised again, in halves, so that the one at fault ends alone (`EngineCore._recover`, `narrow`);
3. the first launch with nothing in flight starts afresh.

Rows that were not at fault lose time and no token.
"""

from __future__ import annotations

from enginectl.errors import StepError


class StepsInFlight:
    """The executor's side: how many steps are in flight, and which of them raised first."""

    def __init__(self) -> None:
        self._num_launched = 0
        self._num_in_flight = 0
        self._failed: int | None = None

    def launch(self) -> int:
        """The number of one more step."""
        if self._num_in_flight == 0:
            self._failed = None
        self._num_in_flight += 1
        self._num_launched += 1
        return self._num_launched

    def retire(self) -> None:
        """Somebody waits for a step's handle."""
        self._num_in_flight -= 1

    def fail(self, number: int) -> None:
        """A step raised."""
        if self._failed is None:
            self._failed = number

    def check(self, number: int) -> None:
        """Raise StepError for a step behind one that raised."""
        if self._failed is not None and self._failed < number:
            raise StepError("skipped: the step before it failed")
