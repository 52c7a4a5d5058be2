"""What one tenant's flood does to another: time to first token of the light tenant, alone and beside 50 times its load.

    python bench/fairness.py --json

Simulated, with the real schedulers: a cost like that of a mid-sized model on one GPU. The heavy tenant alone asks for
more than the engine can do, so under `fcfs` everybody waits longer and longer.
"""

from __future__ import annotations

import argparse
import json

from enginectl.plugins import PluginHost
from enginectl.simulate.cost import StepCost
from enginectl.simulate.engine import SimConfig
from enginectl.simulate.report import Summary, mean_of, summarize
from enginectl.simulate.run import simulate
from enginectl.simulate.workload import Arrival, Traffic, parse_lengths, poisson

FLOOD = 50
COST = StepCost(base_ms=15.0, row_ms=0.05, token_ms=0.02)
PROMPT, OUTPUT = parse_lengths("lognormal:median=400,p95=1200,most=2000", "prompt"), parse_lengths("100", "output")


def traffic(seed: int, duration_s: float, light_rate: float, *, flood: bool) -> list[Arrival]:
    """The light tenant's arrivals are the same with and without the flood."""
    light = Traffic(rate=light_rate, prompt=PROMPT, output=OUTPUT, duration_s=duration_s, tenant="light")
    heavy = Traffic(rate=FLOOD * light_rate, prompt=PROMPT, output=OUTPUT, duration_s=duration_s, tenant="heavy")
    return poisson([light, heavy] if flood else [light], seed)


def measure(policy: str, host: PluginHost, *, flood: bool, seeds: int, duration_s: float, light_rate: float) -> Summary:
    """The light tenant's times, means over seeds."""
    config = SimConfig(cost=COST, policy=policy, max_num_batched_tokens=2048, long_prefill_token_threshold=512)
    runs = []
    for seed in range(seeds):
        summary = summarize(simulate(traffic(seed, duration_s, light_rate, flood=flood), config, host=host))
        tenant = summary["tenants"]["light"] if flood else summary
        runs.append({"ttft_s": tenant["ttft_s"], "latency_s": tenant["latency_s"]})
    return mean_of(runs)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--duration-s", type=float, default=200.0)
    parser.add_argument("--light-rate", type=float, default=0.7, help="the light tenant's requests a second")
    args = parser.parse_args()
    host = PluginHost()
    results = {}
    for policy in ("fcfs", "fair"):
        given = {"seeds": args.seeds, "duration_s": args.duration_s, "light_rate": args.light_rate}
        alone = measure(policy, host, flood=False, **given)["ttft_s"]
        beside = measure(policy, host, flood=True, **given)["ttft_s"]
        results[policy] = {
            "alone_p99_s": alone["p99"], "flood_p99_s": beside["p99"], "ratio": beside["p99"] / alone["p99"],
            "alone_p50_s": alone["p50"], "flood_p50_s": beside["p50"],
        }  # fmt: skip
    if args.json:
        print(json.dumps({"flood": FLOOD, "light_ttft": results}))
        return
    for policy, found in results.items():
        print(f"{policy:5}  " + "  ".join(f"{name} {value:.3f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
