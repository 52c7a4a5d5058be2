"""A device that answers later, on a CPU: steps run in order on a worker thread.

It lets the loop overlap host work with the forward (torch releases the interpreter in its kernels), and lets every law
be tested at overlap depth 1 without a GPU.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from enginectl.engine.in_flight import StepsInFlight
from enginectl.errors import StepError
from enginectl.interfaces.executor import Executor, StepHandle, StepPlan, StepResult
from enginectl.interfaces.kv import KVLayout


class _FutureHandle(StepHandle):
    def __init__(self, future: Future[StepResult], in_flight: StepsInFlight) -> None:
        self._future = future
        self._in_flight = in_flight

    def wait(self) -> StepResult:
        """Block until the worker has run it."""
        self._in_flight.retire()
        return self._future.result()


class DeferredExecutor(Executor):
    """Wraps an executor whose `launch` is synchronous. For steps behind one that raised see `in_flight`."""

    is_asynchronous = True

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._in_flight = StepsInFlight()

    def allocate(self, layout: KVLayout) -> None:
        """On the wrapped executor."""
        self.inner.allocate(layout)

    def launch(self, plan: StepPlan) -> StepHandle:
        """Queue the step."""
        number = self._in_flight.launch()
        return _FutureHandle(self._worker.submit(self._run, plan, number), self._in_flight)

    def _run(self, plan: StepPlan, number: int) -> StepResult:
        try:
            self._in_flight.check(number)
        except StepError:
            empty = plan.select(plan.rows[:0].astype(int))
            empty.removed, empty.added = plan.removed, plan.added
            empty.block_rows, empty.block_columns, empty.block_ids = (
                plan.block_rows,
                plan.block_columns,
                plan.block_ids,
            )
            self.inner.launch(empty).wait()
            raise
        try:
            return self.inner.launch(plan).wait()
        except Exception:
            self._in_flight.fail(number)
            raise

    def is_healthy(self) -> bool:
        """As the wrapped executor says."""
        return self.inner.is_healthy()

    def close(self) -> None:
        """Let the worker finish, then close the wrapped executor."""
        self._worker.shutdown(wait=True)
        self.inner.close()
