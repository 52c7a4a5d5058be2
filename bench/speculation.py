"""What speculation brings, and costs, on this machine: prompt lookup, a perfect draft, and nothing to gain.

    python bench/speculation.py --json

One engine a part, modes in turns that rotate from round to round, ratios within a round ("paired"), their mean and 95 %
interval. Tokens per second are output tokens over the wall time of the whole batch.

copy: rewriting and extraction of text in the prompt. free: open questions. Both greedy and ended by EOS or max_tokens.
off, fixed, auto: `speculation` of the requests. perfect: a speculator that knows the answers, against the time of its
own forwards. off_cost: microseconds a step that choosing no drafts takes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from enginectl import Engine, SamplingParams
from enginectl.builtin.native.family import NativeFamily
from enginectl.context import BuildContext
from enginectl.engine.speculation import SpeculationController
from enginectl.interfaces.attention import AttentionBackend
from enginectl.interfaces.model import ForwardInput, Kept, Model, ModelFamily, ModelSpec
from enginectl.interfaces.weights import Checkpoint
from enginectl.testing.toys import AnswerSpeculator

MODES: dict[str, str | int] = {"off": "off", "fixed": 4, "auto": "auto"}
NAMES = ("Ada Lovelace", "Alan Turing", "Grace Hopper", "Edsger Dijkstra", "Barbara Liskov", "Donald Knuth")
CITIES = ("London", "Manchester", "New York", "Rotterdam", "Los Angeles", "Milwaukee")
OPEN = (
    "Explain why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "What should one consider when buying a bicycle?",
    "Describe a walk through a forest in autumn.",
    "How do vaccines work?",
    "Give advice for a first job interview.",
)
# Two-sided 97.5 % quantiles of Student's distribution by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


def demo_model() -> Path:
    """The model the tests use."""
    here = Path(__file__).resolve().parents[1] / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return Path(os.environ.get("ENGINECTL_DEMO_MODEL") or here)


def questions(kind: str, count: int, seed: int) -> list[list[dict[str, str]]]:
    """Conversations; no two of one call are equal."""
    random = np.random.default_rng(seed)
    made = []
    for i in range(count):
        if kind == "free":
            text = f"{OPEN[i % len(OPEN)]} Answer number {int(random.integers(100, 1000))}."
        else:
            lines = [
                f"{NAMES[int(random.integers(6))]}, room {int(random.integers(100, 1000))}, {CITIES[int(random.integers(6))]}"
                for _ in range(6)
            ]
            text = "Copy this list exactly, line by line, without comments:\n\n" + "\n".join(lines)
        made.append([{"role": "user", "content": text}])
    return made


def encoded(engine: Engine, conversations: Sequence[list[dict[str, str]]]) -> list[list[int]]:
    """Prompts as token ids."""
    tokenizer = engine.tokenizer
    return [
        tokenizer.encode_chat(tokenizer.apply_chat_template(one, add_generation_prompt=True)) for one in conversations
    ]


def rate(engine: Engine, prompts: Sequence[list[int]], max_tokens: int, speculation: str | int) -> float:
    """Output tokens per second."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, speculation=speculation)
    started = time.perf_counter()
    outputs = engine.generate(list(prompts), params)
    seconds = time.perf_counter() - started
    return sum(len(one.token_ids) for output in outputs for one in output.outputs) / seconds


def interval(ratios: Sequence[float]) -> dict[str, float]:
    """Mean and 95 % interval."""
    mean = statistics.fmean(ratios)
    half = math.nan
    if len(ratios) > 1:
        degrees = len(ratios) - 1
        half = STUDENT.get(degrees, 2.2) * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return {"mean": round(mean, 3), "low": round(mean - half, 3), "high": round(mean + half, 3)}


def ngram(model: Path, streams: Sequence[int], rounds: int, max_tokens: int) -> list[dict[str, Any]]:
    """Off, fixed and auto for both workloads at each concurrency."""
    found = []
    with Engine(str(model), plugins=["ngram"], max_num_seqs=max(streams), max_model_len=1024) as engine:
        for kind in ("copy", "free"):
            for count in streams:
                rates: dict[str, list[float]] = {mode: [] for mode in MODES}
                before = engine.stats()
                for i in range(rounds + 1):  # the first warms up
                    prompts = encoded(engine, questions(kind, count, seed=i))
                    names = [*MODES][i % 3 :] + [*MODES][: i % 3]
                    for mode in names:
                        measured = rate(engine, prompts, max_tokens, MODES[mode])
                        if i:
                            rates[mode].append(measured)
                after = engine.stats()
                found.append(
                    {
                        "workload": kind,
                        "streams": count,
                        "tokens_per_s": {mode: round(statistics.median(values), 1) for mode, values in rates.items()},
                        "ratio_to_off": {
                            mode: interval([a / b for a, b in zip(rates[mode], rates["off"], strict=True)])
                            for mode in ("fixed", "auto")
                        },
                        "accepted_share": round(
                            (after.num_accepted - before.num_accepted) / max(after.num_drafted - before.num_drafted, 1),
                            3,
                        ),
                    }
                )
    return found


class TimedModel(Model):
    """A model that adds up how long its forwards and heads take."""

    def __init__(self, inner: Model) -> None:
        self.inner, self.spec, self.keeps_hidden = inner, inner.spec, inner.keeps_hidden
        self.seconds = 0.0

    def use_attention(self, attention: AttentionBackend) -> None:
        """As the inner one."""
        self.inner.use_attention(attention)

    def forward(self, step: ForwardInput) -> Kept:
        """Timed."""
        started = time.perf_counter()
        kept = self.inner.forward(step)
        self.seconds += time.perf_counter() - started
        return kept

    def logits(self, kept: Kept, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Timed."""
        started = time.perf_counter()
        logits = self.inner.logits(kept, rows)
        self.seconds += time.perf_counter() - started
        return logits

    def greedy(self, kept: Kept, rows: torch.Tensor | None = None) -> torch.Tensor | None:
        """Timed."""
        started = time.perf_counter()
        best = self.inner.greedy(kept, rows)
        self.seconds += time.perf_counter() - started
        return best


class TimedFamily(ModelFamily):
    """The native family with timed models."""

    needs_op_set = True

    def __init__(self) -> None:
        self.inner = NativeFamily()
        self.model: TimedModel | None = None

    def refuses(self, checkpoint: Checkpoint) -> str | None:
        """As the inner one."""
        return self.inner.refuses(checkpoint)

    def spec(self, checkpoint: Checkpoint, ctx: BuildContext) -> ModelSpec:
        """As the inner one."""
        return self.inner.spec(checkpoint, ctx)

    def load(self, checkpoint: Checkpoint, ctx: BuildContext) -> Model:
        """The inner one's, timed."""
        self.model = TimedModel(self.inner.load(checkpoint, ctx))
        return self.model


def perfect(model: Path, streams: Sequence[int], rounds: int, max_tokens: int) -> list[dict[str, Any]]:
    """A speculator that is always right: how much of the wall time is forwards and heads, the rest is the pipeline's."""
    found = []
    for count in streams:
        with Engine(str(model), max_num_seqs=count, max_model_len=1024) as engine:
            prompts = encoded(engine, questions("free", count, seed=0))
            outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens))
        answers = {tuple(p): [*o.outputs[0].token_ids] for p, o in zip(prompts, outputs, strict=True)}
        family = TimedFamily()
        speculator = AnswerSpeculator(answers, max_drafts=4)
        options: dict[str, Any] = {"speculator": speculator, "model_family": family, "overlap_depth": 0}
        with Engine(str(model), max_num_seqs=count, max_model_len=1024, **options) as engine:
            assert family.model is not None, "loaded"
            shares, ratios = [], []
            for i in range(rounds + 1):
                plain = rate(engine, prompts, max_tokens, "off")
                before, started = family.model.seconds, time.perf_counter()
                fast = rate(engine, prompts, max_tokens, 4)
                if i:
                    shares.append((family.model.seconds - before) / (time.perf_counter() - started))
                    ratios.append(fast / plain)
            found.append({"streams": count, "share_of_ideal": interval(shares), "ratio_to_off": interval(ratios)})
    return found


def off_cost(streams: Sequence[int], num_steps: int = 2000) -> list[dict[str, float]]:
    """Choosing, and learning, while drafts do not pay: what the loop calls in every step."""
    found = []
    for count in streams:
        controller = SpeculationController(count, 4, 8192)
        rows, room, none = np.arange(count, dtype=np.int32), np.full(count, 4, np.int32), np.zeros(count, np.int32)
        for row in range(count):
            controller.open_row(row, SamplingParams())
        drafts, spent, num_on = none, 0.0, 0
        for step in range(num_steps + 200):
            started = time.perf_counter()
            limits = controller.limits(rows, room)
            num_drafts, longest = int(drafts.sum()), int(limits.max())
            seconds = 0.002 * (count + num_drafts)
            controller.observe_step(count + num_drafts, num_drafts, seconds, 0.0, longest)
            if limits.any():
                controller.observe_proposals(rows, limits, limits)
            if drafts.any():
                controller.observe_verified(rows, drafts, none)
            if step >= 200:
                spent += time.perf_counter() - started
                num_on += bool(limits.any())
            drafts = limits
        found.append({"rows": count, "mean_us": round(spent / num_steps * 1e6, 1), "probing_share": num_on / num_steps})
    return found


def svg(rows: Sequence[dict[str, Any]]) -> str:
    """Throughput against concurrency, a panel a workload, both axes logarithmic."""
    colors = {"off": "#555", "fixed": "#c60", "auto": "#06c"}
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="760" height="340" font-family="sans-serif" font-size="12">'
    ]
    rates = [value for row in rows for value in row["tokens_per_s"].values()]
    low, high = math.log(min(rates) * 0.9), math.log(max(rates) * 1.1)
    widest = math.log(max(row["streams"] for row in rows)) or 1.0
    for panel, kind in enumerate(("copy", "free")):
        left = 60 + panel * 360
        parts.append(f'<text x="{left}" y="20">{kind}: tokens/s by streams</text>')
        parts.append(f'<rect x="{left}" y="30" width="290" height="270" fill="none" stroke="#999"/>')
        mine = [row for row in rows if row["workload"] == kind]
        for n, (mode, color) in enumerate(colors.items()):
            points = [
                (
                    left + 290 * math.log(row["streams"]) / widest,
                    300 - 270 * (math.log(row["tokens_per_s"][mode]) - low) / (high - low),
                )
                for row in mine
            ]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
            parts.append(f'<text x="{left + 10}" y="{50 + 16 * n}" fill="{color}">{mode}</text>')
        parts += [
            f'<text x="{left + 290 * math.log(row["streams"]) / widest - 4:.0f}" y="316">{row["streams"]}</text>'
            for row in mine
        ]
    return "\n".join([*parts, "</svg>"])


def main() -> None:
    """Run the parts and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", type=Path, default=demo_model())
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--plot", type=Path, help="write an SVG here")
    given = parser.parse_args()
    result = {
        "off_cost": off_cost(given.streams),
        "ngram": ngram(given.model, given.streams, given.rounds, given.max_tokens),
        "perfect": perfect(given.model, [n for n in given.streams if n <= 8], given.rounds, given.max_tokens),
    }
    if given.plot:
        given.plot.write_text(svg(result["ngram"]))
    if given.json:
        print(json.dumps(result, indent=2))
        return
    for part, rows in result.items():
        for row in rows:
            print(part, json.dumps(row))


if __name__ == "__main__":
    main()
