"""What the prefix cache saves and costs.

    python bench/prefix_cache.py --json

- Time to first token of a 1,000-token prompt that is fully cached, and of one that is not, on the demo model.
- Admission of a 1,000-token prompt: hashing it and finding its 62 blocks, for each hash; and a second attempt, for which
  the hashes are kept.
- What the cache adds to a step of 256 decodes that hit nothing: all of its work, and the hashing in it. Prompts differ in
  length, so that as many rows fill a block in each step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from host_overhead import BLOCK_SIZE, MAX_MODEL_LEN, make_core

from enginectl import Engine, SamplingParams
from enginectl.interfaces.kv import BlockKey
from enginectl.types import EngineRequest
from enginectl_prefix_cache.hashing import ALGORITHMS, make_hasher
from enginectl_prefix_cache.index import HashPrefixIndex

PROMPT_LEN = 1000
DEMO_MODEL = Path(__file__).resolve().parents[1] / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def median_us(call: Callable[[int], Any], repeats: int) -> float:
    """Median microseconds of `call(0)`, `call(1)` …"""
    samples = []
    for i in range(repeats):
        begin = time.perf_counter()
        call(i)
        samples.append(time.perf_counter() - begin)
    return round(statistics.median(samples) * 1e6, 2)


def first_token_s(model: str, repeats: int) -> dict[str, float]:
    """Seconds until a 1,000-token prompt has its first token, cached and not; medians of alternating runs."""
    prompt = np.random.default_rng(0).integers(100, 40_000, PROMPT_LEN).tolist()
    one = SamplingParams(temperature=0.0, max_tokens=1)
    samples: dict[str, list[float]] = {"uncached": [], "cached": []}
    with Engine(model, max_model_len=2048, max_num_seqs=4, plugins=["prefix-cache"]) as engine:
        engine.generate(prompt, one)
        for i in range(repeats):
            for name, salt, expected in (("uncached", str(i), 0), ("cached", None, PROMPT_LEN // 16 * 16)):
                begin = time.perf_counter()
                output = engine.generate(prompt, one, cache_salt=salt)[0]
                samples[name].append(time.perf_counter() - begin)
                assert output.usage.cached_tokens == expected, output.usage
    medians = {name: statistics.median(times) for name, times in samples.items()}
    return {
        "uncached_ms": round(medians["uncached"] * 1e3, 2),
        "cached_ms": round(medians["cached"] * 1e3, 2),
        "ratio": round(medians["uncached"] / medians["cached"], 1),
    }


def admission_us(algorithm: str) -> dict[str, float]:
    """Hash and match of a fully cached 1,000-token prompt."""
    index = HashPrefixIndex(100, BLOCK_SIZE, make_hasher(algorithm))
    prompt = np.random.default_rng(0).integers(0, 49_152, PROMPT_LEN, dtype=np.int32)
    blocks = np.arange(1, PROMPT_LEN // BLOCK_SIZE + 1, dtype=np.int32)
    index.publish(0, prompt[: blocks.size * BLOCK_SIZE], blocks, 0, BlockKey())
    first = median_us(lambda i: index.match(i + 1, prompt, BlockKey()), 500)
    again = median_us(lambda i: index.match(i + 1, prompt, BlockKey()), 500)
    assert index.match(1, prompt, BlockKey()).num_tokens == 992
    return {"first_us": first, "again_us": again}


def step_us(num_seqs: int, steps: int) -> dict[str, float]:
    """Median microseconds that the cache adds to a step, of which hashing, when nothing is ever found."""
    index = HashPrefixIndex(num_seqs * (MAX_MODEL_LEN // BLOCK_SIZE) + 1, BLOCK_SIZE, make_hasher("sha256"))
    core = make_core(num_seqs, index=index)
    random = np.random.default_rng(0)
    for key in range(num_seqs):
        prompt = random.integers(0, 64, 32 + key % BLOCK_SIZE, dtype=np.int32)
        core.add(_request(key, prompt))
    while len(core.table.order) < num_seqs or len(core.scheduler):
        core.step()
    publish, samples, published = core._committer.publish, list[float](), index.num_published

    def timed(plan: Any) -> None:
        begin = time.perf_counter()
        publish(plan)
        samples.append(time.perf_counter() - begin)

    setattr(core._committer, "publish", timed)  # noqa: B010
    for _ in range(steps):
        core.step()
    assert core.stats().prefix_hits == 0
    blocks = (index.num_published - published) / steps
    hasher, data = make_hasher("sha256"), bytes(4 * BLOCK_SIZE)
    one = statistics.median(median_us(lambda _: hasher.hash_block(hasher.root, data, b""), 1000) for _ in range(9))
    return {
        "blocks_per_step": round(blocks, 1),
        "publish_us": round(statistics.median(samples) * 1e6, 1),
        "hashing_us": round(one * blocks, 1),
    }


def _request(key: int, prompt: np.ndarray[Any, np.dtype[np.int32]]) -> EngineRequest:
    return EngineRequest(
        key=key,
        request_id=str(key),
        prompt=prompt.tobytes(),
        params=SamplingParams(temperature=0.0),
        seed=key,
        choice=0,
        max_tokens=1024,
        eos_token_ids=(2,),
        adapter=None,
        priority=0,
        cache_salt=str(key),
        tenant="",
        arrival_s=0.0,
        timeout_s=None,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", default=os.environ.get("ENGINECTL_DEMO_MODEL") or str(DEMO_MODEL))
    parser.add_argument("--repeats", type=int, default=5, help="pairs of time to first token")
    args = parser.parse_args()
    found: dict[str, Any] = {f"admission {name}": admission_us(name) for name in ALGORITHMS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found["step of 256 decodes"] = step_us(256, 400)
    torch.set_num_threads(threads)
    found["first token"] = first_token_s(args.model, args.repeats)
    if args.json:
        print(json.dumps(found))
        return
    for name, values in found.items():
        print(f"{name:24s}" + "  ".join(f"{key} {value}" for key, value in values.items()))


if __name__ == "__main__":
    main()
