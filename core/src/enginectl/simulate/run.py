"""Discrete events: arrivals move the clock when nothing runs, steps move it when something does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginectl.errors import EnginectlError
from enginectl.plugins import PluginHost
from enginectl.simulate.engine import SimConfig, SimEngine, build_engine
from enginectl.simulate.workload import Arrival
from enginectl.types import EngineRequest, Finished, FinishReason, SamplingParams

_PARAMS = SamplingParams(temperature=0.0)
_VOCAB = 32_000
_MAX_IDLE_STEPS = 1000


@dataclass(slots=True)
class SimResult:
    """What happened. requests: arrays over finished requests, by arrival; steps: arrays over steps.

    requests: arrival_s, scheduled_s, first_token_s, finished_s, num_output, num_cached, num_preemptions, and tenant as an
    index into tenants. refused: requests that could never fit, with the reason of the first.
    """

    config: SimConfig
    requests: dict[str, NDArray[Any]]
    steps: dict[str, NDArray[Any]]
    tenants: list[str]
    num_prompt_tokens: int
    num_refused: int = 0
    first_refusal: str = ""


def simulate(
    arrivals: Sequence[Arrival], config: SimConfig, *, host: PluginHost | None = None, seed: int = 0
) -> SimResult:
    """Serve these arrivals, which are sorted by time, until the last one ends."""
    engine = build_engine(config, host or PluginHost())
    core, clock = engine.core, engine.clock
    prompts = _Prompts(seed, distinct=engine.core.pool.index is not None)
    ends: list[tuple[float, ...]] = []
    result = SimResult(engine.config, {}, {}, [], sum(arrival.prompt_tokens for arrival in arrivals))
    index, count, idle = 0, len(arrivals), 0
    while True:
        while index < count and arrivals[index].arrival_s <= clock.now:
            why = _too_long(arrivals[index], config.max_model_len)
            if why:
                result.num_refused += 1
                result.first_refusal = result.first_refusal or why
            else:
                core.add(_request(index, arrivals[index], prompts))
            index += 1
        if not core.has_work:
            if index == count:
                break
            clock.now = arrivals[index].arrival_s
            continue
        messages = core.step()
        for message in messages:
            _note_ends(result, ends, message.finished)
        idle = 0 if core.made_progress or messages else idle + 1
        if idle:
            _let_time_pass(engine, arrivals[index].arrival_s if index < count else None, idle)
    _collect(result, ends, arrivals, engine)
    return result


def _too_long(arrival: Arrival, max_model_len: int) -> str | None:
    """Why a server would refuse the request, which then takes no time."""
    if arrival.prompt_tokens + arrival.output_tokens <= max_model_len:
        return None
    return (
        f"a prompt of {arrival.prompt_tokens} tokens with {arrival.output_tokens} of output exceeds max_model_len, "
        f"{max_model_len}; ask for fewer, or raise --max-model-len"
    )


def _note_ends(result: SimResult, ends: list[tuple[float, ...]], finished: Sequence[Finished]) -> None:
    for end in finished:
        if end.reason is FinishReason.ERROR:
            result.num_refused += 1
            result.first_refusal = result.first_refusal or str(end.error)
            continue
        t = end.timings
        times = (t.arrival_s, t.scheduled_s, t.first_token_s, t.finished_s)
        ends.append((end.key, *times, end.num_cached_tokens, t.num_preemptions))


def _let_time_pass(engine: SimEngine, next_arrival_s: float | None, num_idle: int) -> None:
    """Requests wait, and the policy admits none: another may come, or the policy waits for time to pass."""
    if num_idle > _MAX_IDLE_STEPS:
        waiting = len(engine.core.scheduler)
        raise EnginectlError(f"the policy {engine.config.policy!r} admits none of {waiting} waiting requests")
    clock = engine.clock
    clock.now = clock.now + 0.1 if next_arrival_s is None else max(clock.now, next_arrival_s)


class _Prompts:
    """Token ids as bytes. distinct: a prefix index will look at them; else all are zeros."""

    def __init__(self, seed: int, *, distinct: bool) -> None:
        self._random = np.random.default_rng((seed, 7))
        self._distinct = distinct
        self._prefixes: dict[str, NDArray[np.int32]] = {}

    def make(self, arrival: Arrival) -> bytes:
        """One prompt."""
        if not self._distinct:
            return bytes(4 * arrival.prompt_tokens)
        shared = min(arrival.prefix_tokens, arrival.prompt_tokens)
        own = self._tokens(arrival.prompt_tokens - shared)
        if not shared:
            return own.tobytes()
        known = self._prefixes.get(arrival.prefix)
        if known is None or known.size < shared:
            more = self._tokens(shared - (0 if known is None else known.size))
            known = self._prefixes[arrival.prefix] = more if known is None else np.concatenate((known, more))
        return known[:shared].tobytes() + own.tobytes()

    def _tokens(self, count: int) -> NDArray[np.int32]:
        return self._random.integers(1, _VOCAB, count, dtype=np.int32)


def _request(key: int, arrival: Arrival, prompts: _Prompts) -> EngineRequest:
    return EngineRequest(
        key=key,
        request_id=str(key),
        prompt=prompts.make(arrival),
        params=_PARAMS,
        seed=0,
        choice=0,
        max_tokens=arrival.output_tokens,
        eos_token_ids=(),
        adapter=None,
        priority=arrival.priority,
        cache_salt=None,
        tenant=arrival.tenant,
        arrival_s=arrival.arrival_s,
        timeout_s=None,
    )


def _collect(result: SimResult, ends: list[tuple[float, ...]], arrivals: Sequence[Arrival], engine: SimEngine) -> None:
    ends.sort()
    names = ("key", "arrival_s", "scheduled_s", "first_token_s", "finished_s", "num_cached", "num_preemptions")
    columns = np.array(ends, float).reshape(-1, len(names)).T
    requests = dict(zip(names, columns, strict=True))
    keys = requests.pop("key").astype(int).tolist()
    requests["num_output"] = np.array([arrivals[key].output_tokens for key in keys], int)
    result.tenants = sorted({arrival.tenant for arrival in arrivals})
    places = {name: place for place, name in enumerate(result.tenants)}
    requests["tenant"] = np.array([places[arrivals[key].tenant] for key in keys], int)
    result.requests = requests
    result.steps = engine.recorder.columns()
