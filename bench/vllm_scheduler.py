"""vLLM's V1 scheduler alone: `schedule()` and `update_from_output()` in decode steady state, no model.

Run by `bench/host_overhead.py --vllm PYTHON` with the interpreter of an environment that has vLLM (0.32.0 was used; it
calls internals, which another version may have moved). Prints one JSON object: rows to median microseconds a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any


def make_scheduler(model: str, num_seqs: int) -> Any:
    """A scheduler over a pool that holds every row to the end."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = EngineArgs(
        model=model,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(2048, num_seqs),
        max_model_len=2048,
        block_size=16,
        enable_prefix_caching=False,
        async_scheduling=False,
    ).create_engine_config()
    num_blocks = num_seqs * 128 + 16
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
    kv = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return Scheduler(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
        log_stats=False,
    )


def measure(model: str, num_seqs: int, steps: int) -> float:
    """Median microseconds of a step with `num_seqs` running decodes."""
    from vllm import SamplingParams
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    scheduler = make_scheduler(model, num_seqs)
    for i in range(num_seqs):
        params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
        scheduler.add_request(Request(str(i), [7] * 32, params, None))

    def step() -> float:
        begin = time.perf_counter()
        planned = scheduler.schedule()
        middle = time.perf_counter()
        names = list(planned.num_scheduled_tokens)
        output = ModelRunnerOutput(names, {n: k for k, n in enumerate(names)}, [[7]] * len(names))
        resumed = time.perf_counter()
        scheduler.update_from_output(planned, output)
        return (time.perf_counter() - resumed + middle - begin) * 1e6

    while len(scheduler.running) < num_seqs:
        step()
    for _ in range(40):  # every prompt is through, and the pace is steady
        step()
    return statistics.median(step() for _ in range(steps))


def main() -> None:
    """Measure each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", type=int, nargs="+")
    parser.add_argument("--model", default=os.environ.get("BENCH_MODEL"), help="any small model's directory")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    print(json.dumps({size: measure(args.model, size, args.steps) for size in args.sizes}))


if __name__ == "__main__":
    main()
