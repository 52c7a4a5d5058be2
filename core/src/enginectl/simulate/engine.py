"""The real loop around an executor that only knows what a step costs, under a clock that only steps move."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginectl.building import build_part
from enginectl.config import EngineConfig
from enginectl.context import BuildContext, Machine
from enginectl.engine.admission import Admission
from enginectl.engine.batch import RowTable
from enginectl.engine.core_loop import EngineCore
from enginectl.engine.ledger import BlockPool
from enginectl.interfaces.executor import Executor, StepHandle, StepPlan, StepResult
from enginectl.interfaces.kv import KVGroup, KVLayout
from enginectl.interfaces.scheduler import Scheduler
from enginectl.plugins import Entry, PluginHost
from enginectl.provider import Role
from enginectl.simulate.baselines import CONTIGUOUS, STATIC, StaticScheduler
from enginectl.simulate.cost import StepCost

_NO_DRAFTS = np.zeros(0, np.int32)
_MACHINE = Machine(num_cores=1, memory_bytes=0, cpu_flags=frozenset())
"""Nothing is computed: what a provider asks of the machine does not matter."""


class SimConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated. Names and meanings are the engine's own; num_blocks leaves out the null block.

    policy: a scheduler's name, or the baseline `static` or `contiguous`. prefix_cache: use the installed prefix index.
    """

    cost: StepCost
    policy: str = "fcfs"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 4096
    block_size: int = 16
    num_blocks: int = 8192
    long_prefill_token_threshold: int | None = None
    prefix_cache: bool = False
    plugin_options: dict[str, dict[str, Any]] = {}

    @property
    def is_static(self) -> bool:
        """Whether batches are formed once and run to the end of their longest."""
        return self.policy == STATIC

    def resolved(self) -> SimConfig:
        """Contiguous allocation is paging with pages as long as the longest sequence, in the same memory."""
        if self.policy != CONTIGUOUS:
            return self
        num_blocks = self.num_blocks * self.block_size // self.max_model_len
        return msgspec.structs.replace(self, block_size=self.max_model_len, num_blocks=num_blocks, prefix_cache=False)


class VirtualClock:
    """Seconds since the start of the simulation."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """What time it is."""
        return self.now


class Recorder:
    """One entry a step: when it ended, how long it took, and what it held."""

    def __init__(self) -> None:
        self.end_s = array("d")
        self.duration_s = array("d")
        self.num_rows = array("l")
        self.num_decodes = array("l")
        self.num_waiting = array("l")
        self.num_blocks = array("l")
        self.num_held = array("l")

    def columns(self) -> dict[str, NDArray[Any]]:
        """The entries as arrays, by name."""
        return {name: np.array(values) for name, values in vars(self).items()}


class _Done(StepHandle):
    __slots__ = ("_clock", "_result", "_seconds")

    def __init__(self, clock: VirtualClock, seconds: float, result: StepResult) -> None:
        self._clock, self._seconds, self._result = clock, seconds, result

    def wait(self) -> StepResult:
        """Time passes."""
        self._clock.now += self._seconds
        return self._result


class CostExecutor(Executor):
    """Answers token 0 for every row that samples, after as long as the step would take.

    padded: rows that have ended cost what they did until the whole batch has (static batching).
    """

    def __init__(self, cost: StepCost, clock: VirtualClock, *, padded: bool) -> None:
        self.recorder = Recorder()
        self._cost = cost
        self._clock = clock
        self._padded = padded
        self._width = 0
        self._pool: BlockPool | None = None
        self._scheduler: Scheduler | None = None

    def watch(self, pool: BlockPool, scheduler: Scheduler) -> None:
        """Whose numbers to record."""
        self._pool, self._scheduler = pool, scheduler

    def allocate(self, layout: KVLayout) -> None:
        """Nothing is stored."""

    def launch(self, plan: StepPlan) -> StepHandle:
        """Charge the step, and note it."""
        num_rows, num_tokens = plan.rows.size, int(plan.num_tokens.sum())
        cost_rows, cost_tokens = num_rows, num_tokens
        if self._padded:
            self._width = num_rows if plan.added else max(self._width, num_rows)
            cost_rows, cost_tokens = self._width, num_tokens + self._width - num_rows
        seconds = self._cost.seconds(cost_rows, cost_tokens)
        rows = plan.rows if plan.samples.all() else plan.rows[plan.samples]
        self._note(plan, seconds, num_tokens)
        ones = np.ones(rows.size, np.int32)
        return _Done(self._clock, seconds, StepResult(rows, np.zeros((rows.size, 1), np.int32), ones, _NO_DRAFTS))

    def _note(self, plan: StepPlan, seconds: float, num_tokens: int) -> None:
        assert self._pool is not None, "watch comes first"
        assert self._scheduler is not None, "watch comes first"
        record = self.recorder
        record.end_s.append(self._clock.now + seconds)
        record.duration_s.append(seconds)
        record.num_rows.append(plan.rows.size)
        record.num_decodes.append(int(np.count_nonzero(plan.num_tokens == 1)))
        record.num_waiting.append(len(self._scheduler))
        record.num_blocks.append(self._pool.num_in_use)
        record.num_held.append(int(plan.num_computed.sum()) + num_tokens)


@dataclass(slots=True)
class SimEngine:
    """A wired loop, its clock, and what its steps did."""

    core: EngineCore
    clock: VirtualClock
    recorder: Recorder
    config: SimConfig


def build_engine(config: SimConfig, host: PluginHost) -> SimEngine:
    """Wire the parts that an engine of this configuration would have. Raises PluginError or ConfigError."""
    config = config.resolved()
    layout = KVLayout((KVGroup((0,), None, 1),), config.block_size, config.num_blocks + 1, "float16")
    engine = EngineConfig(model="simulated", block_size=config.block_size, max_num_seqs=config.max_num_seqs)
    ctx = BuildContext(engine, _MACHINE, kv_layout=layout)

    def build(entry: Entry) -> Any:
        return build_part(entry, ctx.with_(options=host.options(entry.plugin, config.plugin_options)))

    index = None
    if config.prefix_cache:
        chosen = host.select(Role.PREFIX_INDEX, _MACHINE).chosen
        index = build(chosen[0]) if chosen else None
    clock = VirtualClock()
    executor = CostExecutor(config.cost, clock, padded=config.is_static)
    pool = BlockPool(layout.num_blocks, build(host.select(Role.KV_ALLOCATOR, _MACHINE).chosen[0]), index)
    scheduler = _scheduler(config, host, build)
    executor.watch(pool, scheduler)
    core = EngineCore(
        scheduler=scheduler,
        pool=pool,
        executor=executor,
        table=RowTable(config.max_num_seqs, config.max_model_len, config.block_size),
        admission=Admission(pool, block_size=config.block_size, watermark=0 if config.policy == CONTIGUOUS else None),
        block_size=config.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prefill=config.long_prefill_token_threshold,
        clock=clock,
    )
    return SimEngine(core, clock, executor.recorder, config)


def _scheduler(config: SimConfig, host: PluginHost, build: Any) -> Scheduler:
    if config.is_static:
        return StaticScheduler()
    name = "fcfs" if config.policy == CONTIGUOUS else config.policy
    scheduler: Scheduler = build(host.entry(Role.SCHEDULER, name))
    return scheduler
