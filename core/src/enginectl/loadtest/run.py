"""Runs a load test: every level is warmed up and measured several times."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from enginectl.errors import EnginectlError
from enginectl.loadtest.answers import Answer
from enginectl.loadtest.arrivals import Level, Request, Workload, make_requests
from enginectl.loadtest.client import Client, Outcome
from enginectl.loadtest.target import Target

_REQUESTS_A_CLIENT, _FEWEST_REQUESTS = 4, 16
_WARMUP_AT_A_RATE = 8
_WARMUP = 1 << 20
"""Stands for the repeat in a warm-up's seed."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A load test. num_requests: measured a level and repeat; None: 4 a client, at least 16, or 60 s of a rate.

    warmup: requests sent before a level's first repeat, not counted; None: one a client, 8 at a rate.
    """

    workload: Workload
    levels: Sequence[Level]
    num_requests: int | None = None
    warmup: int | None = None
    repeats: int = 3
    seed: int = 0
    timeout_s: float = 600.0

    def count(self, level: Level) -> int:
        """Requests of a repeat."""
        if self.num_requests is not None:
            return self.num_requests
        wanted = _REQUESTS_A_CLIENT * level.concurrency if level.concurrency else round(60 * (level.rate or 0))
        return max(_FEWEST_REQUESTS, wanted)

    def num_warmup(self, level: Level) -> int:
        """Requests before the first repeat."""
        return self.warmup if self.warmup is not None else level.concurrency or _WARMUP_AT_A_RATE


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One repeat of a level. cpu_s: processor time that the client itself took."""

    level: Level
    outcomes: list[Outcome]
    duration_s: float
    cpu_s: float


Progress = Callable[[Level, int, Run], None]
"""Told of each repeat: the level, the repeat's number from 0, and what was measured."""


def load_test(target: Target, plan: Plan, progress: Progress | None = None) -> list[list[Run]]:
    """Run the plan; the repeats of each level, in the order of the levels."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(run_plan(target, plan, progress))


async def run_plan(target: Target, plan: Plan, progress: Progress | None = None) -> list[list[Run]]:
    """As load_test, on a running event loop."""
    client = Client(target, timeout_s=plan.timeout_s)
    found = []
    try:
        for place, level in enumerate(plan.levels):
            count = plan.num_warmup(level)
            if count:
                requests = make_requests(plan.workload, level, count, (plan.seed, place, _WARMUP))
                await run_level(client, plan.workload, level, requests)
            runs = []
            for repeat in range(plan.repeats):
                requests = make_requests(plan.workload, level, plan.count(level), (plan.seed, place, repeat))
                runs.append(await run_level(client, plan.workload, level, requests))
                if progress is not None:
                    progress(level, repeat, runs[-1])
            found.append(runs)
    finally:
        await client.close()
    return found


async def run_level(client: Client, workload: Workload, level: Level, requests: Sequence[Request]) -> Run:
    """Send the requests as the level says, and wait for all answers."""
    gc.collect()
    gc.freeze()  # the prepared requests are not to be walked while times are taken
    try:
        cpu_s, start_s = time.process_time(), time.perf_counter()
        if level.rate is None:
            assert level.concurrency is not None, "a level has one of the two"
            outcomes = await _closed(client, workload, level.concurrency, requests)
        else:
            outcomes = await _timed(client, workload, requests, start_s)
        end_s = max(outcome.end_s for outcome in outcomes)
        return Run(level=level, outcomes=outcomes, duration_s=end_s - start_s, cpu_s=time.process_time() - cpu_s)
    finally:
        gc.unfreeze()


async def _send(client: Client, workload: Workload, request: Request) -> Outcome:
    answer = Answer(is_chat=workload.api == "chat")
    outcome = await client.send("POST", workload.path, request.body, answer)
    if answer.prompt_tokens is None and not outcome.error:
        outcome.prompt_tokens = request.input_len  # a server that reports no usage
    return outcome


async def _closed(client: Client, workload: Workload, concurrency: int, requests: Sequence[Request]) -> list[Outcome]:
    """Each client sends its next request when its last is answered."""
    left: Iterator[Request] = iter(requests)
    outcomes: list[Outcome] = []

    async def ask() -> None:
        for request in left:
            outcomes.append(await _send(client, workload, request))

    await asyncio.gather(*(ask() for _ in range(min(concurrency, len(requests)))))
    return outcomes


async def _timed(client: Client, workload: Workload, requests: Sequence[Request], start_s: float) -> list[Outcome]:
    """Requests are sent at their times, however many are open."""
    tasks = []
    for request in requests:
        due_s = start_s + request.arrival_s
        if (wait_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        tasks.append((due_s, asyncio.create_task(_send(client, workload, request))))
    outcomes = []
    for due_s, task in tasks:
        outcome = await task
        outcome.late_s = max(0.0, outcome.start_s - due_s)
        outcomes.append(outcome)
    return outcomes


def ask_server(target: Target, timeout_s: float = 30.0) -> list[dict[str, Any]]:
    """The models that the server lists. Raises EnginectlError if it does not answer or has none."""

    async def ask() -> Any:
        client = Client(target, timeout_s=timeout_s)
        try:
            return await client.get("/v1/models")
        finally:
            await client.close()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        listed = runner.run(ask())
    models = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(models, list) or not models or not all(isinstance(one, dict) and "id" in one for one in models):
        raise EnginectlError(f"{target.url}/v1/models lists no models; is this an OpenAI-compatible server?")
    return models


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop where there is one, else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
