"""Host cost of a step: everything between two forwards, with a model that costs nothing.

    python bench/host_overhead.py --json

For 1, 32, 256 and 1,024 running decodes it prints the median, over steady-state steps, of the time spent in schedule,
prepare, update and emit (sampling apart), in microseconds. Prompts are of 16 lengths, so that in every step a sixteenth
of the rows fill a block. With `--parts` it says where the time goes. With `--vllm PYTHON`, the interpreter of an environment that
has vLLM, its V1 scheduler runs beside us: `schedule()` and `update_from_output()` alone, in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from enginectl.builtin.allocator_paged import PagedAllocator
from enginectl.builtin.sampling.sampler import TorchSampler
from enginectl.builtin.scheduler_fcfs import FcfsScheduler
from enginectl.engine.admission import Admission
from enginectl.engine.batch import RowTable
from enginectl.engine.core_loop import EngineCore
from enginectl.engine.ledger import BlockPool
from enginectl.engine.messages import Outputs, frame
from enginectl.engine.rows import RunnerRows
from enginectl.engine.runner import LocalRunner
from enginectl.engine.speculation import SpeculationController
from enginectl.interfaces.attention import AttentionBackend, AttentionBatch
from enginectl.interfaces.model import ForwardInput, Kept, LayerSpec, Model, ModelSpec
from enginectl.interfaces.speculator import Speculator
from enginectl.types import EngineRequest, SamplingParams

BLOCK_SIZE, PROMPT_LEN, MAX_MODEL_LEN = 16, 32, 2048
_LAYER = LayerSpec(num_heads=1, num_kv_heads=1, head_dim=16, v_head_dim=16, scale=1.0)


class FreeAttention(AttentionBackend):
    """Prepares nothing and attends to nothing."""

    def bind(self, kv: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Keep nothing."""

    def prepare(self, batch: AttentionBatch) -> Any:
        """The batch, untouched."""
        return batch

    def write_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor, plan: Any) -> None:
        """Write nothing."""

    def attend(self, layer: int, q: torch.Tensor, plan: Any, *, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """The query."""
        return q


class FreeModel(Model):
    """Costs nothing: the next token is always 7. `forward_s` collects when each forward began and ended."""

    spec = ModelSpec(architecture="free", layers=(_LAYER,), vocab_size=64, hidden_size=16, max_model_len=MAX_MODEL_LEN)

    def __init__(self) -> None:
        self.sampling_s = 0.0

    def use_attention(self, attention: AttentionBackend) -> None:
        """Nothing to attend with."""

    def forward(self, step: ForwardInput) -> Kept:
        """No layer."""
        return Kept(hidden=step.keep)

    def logits(self, kept: Kept, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Never asked: every row is greedy."""
        raise AssertionError("greedy rows need no logits here")

    def greedy(self, kept: Kept, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Seven, for every row."""
        assert kept.hidden is not None, "set by forward"
        return torch.full((kept.hidden.shape[0],), 7)


def make_core(
    num_seqs: int,
    *,
    index: Any = None,
    depth: int = 0,
    model: Model | None = None,
    speculator: Speculator | None = None,
) -> EngineCore:
    """The real loop, batch, runner, scheduler and allocator around the free model, or another."""
    num_blocks = num_seqs * (MAX_MODEL_LEN // BLOCK_SIZE) + 1
    pool = BlockPool(num_blocks, PagedAllocator(num_blocks), index)
    max_drafts = 0 if speculator is None else speculator.max_drafts
    budget = max(2048, num_seqs)
    runner = LocalRunner(
        model=model or FreeModel(),
        attention=FreeAttention(),
        sampler=TorchSampler(num_seqs),
        processors=[],
        rows=RunnerRows(num_seqs, MAX_MODEL_LEN, BLOCK_SIZE, max_drafts=max_drafts),
        speculator=speculator,
    )
    return EngineCore(
        scheduler=FcfsScheduler(),
        pool=pool,
        executor=runner,
        table=RowTable(num_seqs, MAX_MODEL_LEN, BLOCK_SIZE),
        admission=Admission(pool, block_size=BLOCK_SIZE, max_drafts=max_drafts),
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=budget,
        max_drafts=max_drafts,
        speculation=None if speculator is None else SpeculationController(num_seqs, max_drafts, budget),
        overlap_depth=depth,
    )


def add_requests(core: EngineCore, num_seqs: int) -> None:
    """Greedy requests that run for the whole measurement."""
    random = np.random.default_rng(0)
    for key in range(1, num_seqs + 1):
        prompt = random.integers(0, 64, PROMPT_LEN + key % BLOCK_SIZE, dtype=np.int32)
        core.add(
            EngineRequest(
                key=key,
                request_id=str(key),
                prompt=prompt.tobytes(),
                params=SamplingParams(temperature=0.0),
                seed=key,
                choice=0,
                max_tokens=MAX_MODEL_LEN - PROMPT_LEN - BLOCK_SIZE,
                eos_token_ids=(2,),
                adapter=None,
                priority=0,
                cache_salt=None,
                tenant="",
                arrival_s=time.monotonic(),
                timeout_s=None,
            )
        )


def steady_core(num_seqs: int, *, index: Any = None) -> EngineCore:
    """All rows decode."""
    core = make_core(num_seqs, index=index)
    add_requests(core, num_seqs)
    while len(core.table.order) < num_seqs or len(core.scheduler):
        core.step()
    for _ in range(50):
        core.step()
    return core


def measure(num_seqs: int, steps: int, *, index: Any = None) -> list[float]:
    """Microseconds of each steady-state step, emitted message included."""
    core = steady_core(num_seqs, index=index)
    samples = []
    for _ in range(steps):
        begin = time.perf_counter()
        for outputs in core.step():
            frame(Outputs(outputs))
        samples.append((time.perf_counter() - begin) * 1e6)
    core.pool.check()
    return samples


def measure_parts(num_seqs: int, steps: int, *, index: Any = None) -> dict[str, float]:
    """Median microseconds a step of each part; each is measured with the cost of two clock readings on top."""
    core = steady_core(num_seqs, index=index)
    spent: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, owner: Any, attribute: str) -> None:
        inner = getattr(owner, attribute)

        def outer(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = inner(*args, **options)
            spent[name].append((time.perf_counter() - begin) * 1e6)
            return result

        setattr(owner, attribute, outer)

    timed("plan", core._planner, "plan")
    timed("launch", core, "_launch")
    timed("retire", core, "_retire")
    timed("commit", core._committer, "commit")
    if index is not None:
        timed("publish", core._committer, "publish")
    timed("emit", core.outputs, "take")
    for _ in range(steps):
        outputs = core.step()
        begin = time.perf_counter()
        for one in outputs:
            frame(Outputs(one))
        spent["encode"].append((time.perf_counter() - begin) * 1e6)
    return {f"{name}_us": round(statistics.median(values), 1) for name, values in spent.items()}


_VLLM = Path(__file__).with_name("vllm_scheduler.py")


def vllm_medians(python: str, sizes: list[int], steps: int) -> dict[int, float]:
    """The same sizes through vLLM's V1 scheduler, in its own environment."""
    command = [python, str(_VLLM), "--steps", str(steps), *map(str, sizes)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    return {int(size): value for size, value in json.loads(answer.stdout.strip().splitlines()[-1]).items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 32, 256, 1024])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--prefix-cache", action="store_true", help="with the prefix-cache plugin's index")
    parser.add_argument("--parts", action="store_true", help="where a step's time goes")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of an environment with vLLM")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    for size in args.sizes:
        index = _prefix_index(size) if args.prefix_cache else None
        samples = measure(size, args.steps, index=index)
        rows[size]["median_us"] = round(statistics.median(samples), 1)
        rows[size]["p99_us"] = round(sorted(samples)[int(len(samples) * 0.99)], 1)
        if args.parts:
            index = _prefix_index(size) if args.prefix_cache else None
            rows[size] |= measure_parts(size, args.steps, index=index)
    if args.vllm:
        for size, value in vllm_medians(args.vllm, args.sizes, args.steps).items():
            rows[size]["vllm_scheduler_us"] = round(value, 1)
    if args.json:
        print(json.dumps({str(size): values for size, values in rows.items()}))
        return
    for size, values in rows.items():
        print(f"{size:5d} rows  " + "  ".join(f"{name} {value}" for name, value in values.items()))


def _prefix_index(num_seqs: int) -> Any:
    from enginectl_prefix_cache.hashing import make_hasher
    from enginectl_prefix_cache.index import HashPrefixIndex

    return HashPrefixIndex(num_seqs * (MAX_MODEL_LEN // BLOCK_SIZE) + 1, BLOCK_SIZE, make_hasher("sha256"))


if __name__ == "__main__":
    sys.exit(main())
