"""A device that answers later, on a CPU: steps run in order on a worker thread.

It lets the loop overlap host work with the forward (torch releases the interpreter in its kernels), and lets every law
be tested at overlap depth 1 without a GPU.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from enginectl.errors import StepError
from enginectl.interfaces.executor import Executor, StepHandle, StepPlan, StepResult
from enginectl.interfaces.kv import KVLayout


class _FutureHandle(StepHandle):
    def __init__(self, future: Future[StepResult], owner: DeferredExecutor) -> None:
        self._future = future
        self._owner = owner

    def wait(self) -> StepResult:
        """Block until the worker has run it."""
        self._owner.num_in_flight -= 1
        return self._future.result()


class DeferredExecutor(Executor):
    """Wraps an executor whose `launch` is synchronous.

    After a step raised, steps that were already queued are skipped (their input would be its output) but their
    differences are applied; the first launch with nothing in flight starts afresh.
    """

    is_asynchronous = True

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.num_in_flight = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._failed = False

    def allocate(self, layout: KVLayout) -> None:
        """On the wrapped executor."""
        self.inner.allocate(layout)

    def launch(self, plan: StepPlan) -> StepHandle:
        """Queue the step."""
        if self.num_in_flight == 0:
            self._failed = False
        self.num_in_flight += 1
        return _FutureHandle(self._worker.submit(self._run, plan), self)

    def _run(self, plan: StepPlan) -> StepResult:
        if self._failed:
            empty = plan.select(plan.rows[:0].astype(int))
            empty.removed, empty.added = plan.removed, plan.added
            empty.block_rows, empty.block_columns, empty.block_ids = (
                plan.block_rows,
                plan.block_columns,
                plan.block_ids,
            )
            self.inner.launch(empty).wait()
            raise StepError("skipped: the step before it failed")
        try:
            return self.inner.launch(plan).wait()
        except Exception:
            self._failed = True
            raise

    def is_healthy(self) -> bool:
        """As the wrapped executor says."""
        return self.inner.is_healthy()

    def close(self) -> None:
        """Let the worker finish, then close the wrapped executor."""
        self._worker.shutdown(wait=True)
        self.inner.close()
