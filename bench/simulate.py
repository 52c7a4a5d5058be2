"""The simulator against published comparisons of batching and KV memory, and how fast it is.

    python bench/simulate.py --json

Batching: t(B) = 50.3 + 6.0 B ms, 64 Poisson arrivals 120 ms apart, lognormal outputs of median 34 rescaled to 2,926
tokens, at most 8 rows. The spread of the lengths was not published; SIGMA is one under which the whole published run,
static and continuous, is likely. Memory: 500 lognormal lengths (median 260, p95 735), max_len 2,048, memory for 8
contiguous requests. Hour: 10 requests a second for an hour on one engine.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from enginectl.plugins import PluginHost
from enginectl.simulate.cost import StepCost
from enginectl.simulate.engine import SimConfig
from enginectl.simulate.report import Summary, mean_of, summarize
from enginectl.simulate.run import simulate
from enginectl.simulate.workload import Lengths, Traffic, parse_lengths, poisson

SIGMA = 0.58
BATCHING = Traffic(
    rate=1 / 0.12, prompt=Lengths(median=1), output=Lengths(median=34, sigma=SIGMA, total=2926), count=64
)
PUBLISHED = {
    "static": {"duration_s": 79.0, "output_tokens_per_s": 37.0, "latency_p50_s": 29.4},
    "continuous": {"duration_s": 40.0, "output_tokens_per_s": 73.2, "latency_p50_s": 13.0},
    "contiguous": {"wasted_share": 0.83, "rows": 8},
    "paged": {"wasted_share": 0.022, "rows": 45},
}
LENGTHS = parse_lengths("lognormal:median=260,p95=735,most=2047", "lengths")


def batching(policy: str, seeds: int, host: PluginHost) -> Summary:
    """Means and deviations over seeds of one policy."""
    config = SimConfig(cost=StepCost(50.3, 6.0), policy=policy, max_num_seqs=8, num_blocks=4096)
    return mean_of([summarize(simulate(poisson([BATCHING], seed), config, host=host)) for seed in range(seeds)])


def memory(policy: str, seeds: int, host: PluginHost) -> Summary:
    """500 sequences of full length at once: each step admits what fits, and the next step starts anew."""
    config = SimConfig(
        cost=StepCost(1.0), policy=policy, max_num_seqs=512, max_num_batched_tokens=1 << 20, max_model_len=2048,
        num_blocks=8 * 2048 // 16,
    )  # fmt: skip
    whole = Traffic(rate=0, prompt=LENGTHS, output=Lengths(median=1), count=500)
    return mean_of([summarize(simulate(poisson([whole], seed), config, host=host)) for seed in range(seeds)])


def hour(host: PluginHost, seconds: float = 3600.0) -> dict[str, float]:
    """What it takes to simulate an hour of a mid-sized model on one GPU."""
    traffic = Traffic(
        rate=10.0,
        prompt=parse_lengths("lognormal:median=300,p95=1500,most=3000", "prompt"),
        output=parse_lengths("lognormal:median=150,p95=500,most=1000", "output"),
        duration_s=seconds,
    )
    begin, cpu = time.perf_counter(), time.process_time()
    summary = summarize(simulate(poisson([traffic], 0), SimConfig(cost=StepCost(12.0, 0.05, 0.02)), host=host))
    return {
        "simulated_s": summary["duration_s"],
        "requests": summary["requests"],
        "steps": summary["steps"],
        "wall_s": round(time.perf_counter() - begin, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
    }


def flat(summary: Summary) -> dict[str, Any]:
    """The numbers that were published, and their deviations over seeds."""
    std = summary.get("std", summary)
    return {
        "duration_s": summary["duration_s"],
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "latency_p50_s": summary["latency_s"]["p50"],
        "wasted_share": summary["wasted_share"],
        "rows": summary["rows"],
        "std": {
            "duration_s": std["duration_s"],
            "output_tokens_per_s": std["output_tokens_per_s"],
            "latency_p50_s": std["latency_s"]["p50"],
        },
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--no-hour", action="store_true", help="leave out the longest part")
    args = parser.parse_args()
    host = PluginHost()
    results = {
        "static": flat(batching("static", args.seeds, host)),
        "continuous": flat(batching("fcfs", args.seeds, host)),
        "contiguous": flat(memory("contiguous", args.seeds, host)),
        "paged": flat(memory("fcfs", args.seeds, host)),
    }
    speed = None if args.no_hour else hour(host)
    if args.json:
        print(json.dumps({"seeds": args.seeds, "simulated": results, "published": PUBLISHED, "hour": speed}))
        return
    for name, published in PUBLISHED.items():
        for key, value in published.items():
            spread = f" ± {results[name]['std'][key]:.2f}" if key in results[name]["std"] else ""
            print(f"{name:10}  {key:20}  {results[name][key]:8.3f}{spread:9}  published {value:g}")
    if speed is not None:
        print("  ".join(f"{key} {value:,.1f}" for key, value in speed.items()))


if __name__ == "__main__":
    main()
