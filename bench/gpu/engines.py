"""Engines over random weights, and how long a decode step of theirs takes."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import Bench, backends, capabilities
from random_model import RandomSource, config_of

ROOT = Path(__file__).resolve().parents[2]

PROMPT, SHORT, LONG = 128, 32, 160
"""Tokens of a prompt, and of the two answers whose difference in time is that of decode steps."""


def usable(bench: Bench, shape: str) -> list[str]:
    """Backends that can run this model here, in its dtype. A dry run takes torch, whose engine runs on a CPU."""
    if bench.dry_run:
        return ["torch"]
    dim = config_of(shape)["head_dim"]
    found = []
    for name, build in backends(bench).items():
        can = capabilities(name)
        # Core's own is there to be right, and says how fast on the smallest.
        if isinstance(build, str) or (name == "torch" and shape != "0.5B"):
            continue
        if (can.head_dims is None or dim in can.head_dims) and (can.dtypes is None or "bfloat16" in can.dtypes):
            found.append(name)
    return found


def engine_for(
    bench: Bench,
    shape: str,
    backend: str,
    batch: int,
    *,
    num_layers: int | None = None,
    successor: bool = False,
    **options: Any,
) -> Any:
    """An engine over random weights, made where they stay; prompts are token ids. num_layers, successor: see
    RandomSource.
    """
    from enginectl import Engine

    # What the last engine leaves in cycles would be missing from this one's pool.
    gc.collect()
    dtype = bench.sizes("bfloat16", "float32")
    options = {"max_num_seqs": batch, "max_model_len": bench.sizes(1024, 256), **options}
    if bench.dry_run:
        options["num_gpu_blocks_override"] = 200
    source = RandomSource(shape, dtype, bench.device, num_layers=num_layers, successor=successor)
    return Engine(str(ROOT), weights=source, attention=backend, dtype=dtype, device=bench.device, **options)


def decode_step_s(
    bench: Bench, engine: Any, batch: int, *, params: dict[str, Any] | None = None, adapters: Sequence[str] = ()
) -> float:
    """A step of pure decoding: the difference of a long and a short answer, so that prompts cancel out; the median."""
    short, long = bench.sizes((SHORT, LONG), (2, 6))

    def timed(num_tokens: int) -> float:
        start = time.perf_counter()
        generate(engine, batch, num_tokens, bench.sizes(PROMPT, 8), params=params, adapters=adapters)
        return time.perf_counter() - start

    timed(short)  # warms up
    differences = [timed(long) - timed(short) for _ in range(bench.sizes(3, 1))]
    return max(statistics.median(differences), 1e-9) / (long - short)


def generate(
    engine: Any,
    batch: int,
    num_tokens: int,
    prompt_len: int,
    *,
    params: dict[str, Any] | None = None,
    adapters: Sequence[str] = (),
) -> list[tuple[list[int], tuple[int, ...]]]:
    """Prompts, told apart by their first token, and what came out. adapters: given to the prompts in turn."""
    from enginectl import SamplingParams

    prompts = [[3 + i, *((7 * i + j) % 200 + 3 for j in range(1, prompt_len))] for i in range(batch)]
    wanted = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **(params or {"temperature": 0.0}))
    if not adapters:
        outputs = engine.generate(prompts, wanted)
        return [(prompt, output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
    streams = [engine.stream(prompt, wanted, adapter=adapters[i % len(adapters)]) for i, prompt in enumerate(prompts)]
    started = [next(stream).token_ids for stream in streams]  # all run once the last one has its first token
    rest = [[token for chunk in stream for token in chunk.token_ids] for stream in streams]
    return [(prompt, (*first, *more)) for prompt, first, more in zip(prompts, started, rest, strict=True)]
