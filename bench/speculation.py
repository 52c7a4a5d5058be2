"""What speculation brings, and costs, on this machine: prompt lookup, a perfect draft, and nothing to gain.

    python bench/speculation.py --json

One engine a part, modes in turns that rotate from round to round, each round with prompts of its own. Ratios are taken
within a round ("paired"); reported are their geometric mean and its 95 % interval. Tokens per second are output tokens
over the wall time of all prompts of a round, so many of them at once as there are streams.

copy: rewriting and extraction of text in the prompt. free: open questions. Both greedy and ended by EOS or max_tokens.
off, fixed, auto: `speculation` of the requests. perfect: a speculator that knows the answers, against the time of its
own forwards. off_cost: microseconds a step of the whole loop, around a model that costs nothing, with prompt lookup that
has turned itself off, against one without a speculator.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from host_overhead import MAX_MODEL_LEN, FreeModel, add_requests, make_core

from enginectl import Engine, SamplingParams
from enginectl.builtin.native.family import NativeFamily
from enginectl.context import BuildContext
from enginectl.engine.core_loop import EngineCore
from enginectl.interfaces.attention import AttentionBackend
from enginectl.interfaces.model import ForwardInput, Kept, Model, ModelFamily, ModelSpec
from enginectl.interfaces.weights import Checkpoint
from enginectl.testing.toys import AnswerSpeculator
from enginectl_spec_ngram.config import NgramConfig
from enginectl_spec_ngram.speculator import NgramSpeculator

ROUNDS = {1: 8, 2: 4, 4: 4, 8: 8, 16: 4, 64: 5}
"""By number of streams: enough for an interval that says something, ten minutes in all on two cores."""
LEAST_PROMPTS = 4
"""Prompts of a round, where there are fewer streams."""
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
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 11: 2.20}


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


def rate(engine: Engine, prompts: Sequence[list[int]], streams: int, max_tokens: int, speculation: str | int) -> float:
    """Output tokens per second, so many prompts at once."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, speculation=speculation)
    started, num_tokens = time.perf_counter(), 0
    for at in range(0, len(prompts), streams):
        outputs = engine.generate(list(prompts[at : at + streams]), params)
        num_tokens += sum(len(one.token_ids) for output in outputs for one in output.outputs)
    return num_tokens / (time.perf_counter() - started)


def mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of its 95 % interval."""
    if len(values) < 2:
        return statistics.fmean(values), math.nan
    quantile = STUDENT.get(len(values) - 1, 2.1)
    return statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def interval(ratios: Sequence[float]) -> dict[str, float]:
    """Geometric mean and 95 % interval."""
    mean, half = mean_and_half([math.log(ratio) for ratio in ratios])
    return {
        "mean": round(math.exp(mean), 3),
        "low": round(math.exp(mean - half), 3),
        "high": round(math.exp(mean + half), 3),
        "rounds": len(ratios),
    }


def ngram(
    model: Path, kinds: Sequence[str], streams: Sequence[int], rounds: int | None, max_tokens: int
) -> list[dict[str, Any]]:
    """Off, fixed and auto for both workloads at each concurrency."""
    found = []
    with Engine(str(model), plugins=["ngram"], max_num_seqs=max(streams), max_model_len=1024) as engine:
        for kind in kinds:
            for count in streams:
                found.append(compare_modes(engine, kind, count, rounds or ROUNDS.get(count, 4), max_tokens))
                print(f"ngram {json.dumps(found[-1])}", file=sys.stderr, flush=True)
    return found


def compare_modes(engine: Engine, kind: str, streams: int, rounds: int, max_tokens: int) -> dict[str, Any]:
    """Rounds of off, fixed and auto, in turns."""
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    num_prompts = max(streams, LEAST_PROMPTS)
    rate(engine, encoded(engine, questions(kind, streams, seed=1000)), streams, max_tokens, "auto")  # warms up
    before = engine.stats()
    for i in range(rounds):
        prompts = encoded(engine, questions(kind, num_prompts, seed=i))
        for mode in [*MODES][i % 3 :] + [*MODES][: i % 3]:
            rates[mode].append(rate(engine, prompts, streams, max_tokens, MODES[mode]))
    after = engine.stats()
    drafted, accepted = after.num_drafted - before.num_drafted, after.num_accepted - before.num_accepted
    return {
        "workload": kind,
        "streams": streams,
        "tokens_per_s": {mode: round(statistics.median(values), 1) for mode, values in rates.items()},
        "ratio_to_off": {
            mode: interval([a / b for a, b in zip(rates[mode], rates["off"], strict=True)])
            for mode in ("fixed", "auto")
        },
        "accepted_share": round(accepted / max(drafted, 1), 3),
    }


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


def perfect(model: Path, streams: Sequence[int], rounds: int | None, max_tokens: int) -> list[dict[str, Any]]:
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
            for i in range((rounds or 5) + 1):  # the first warms up
                plain = rate(engine, prompts, count, max_tokens, "off")
                before, started = family.model.seconds, time.perf_counter()
                fast = rate(engine, prompts, count, max_tokens, 4)
                if i:
                    shares.append((family.model.seconds - before) / (time.perf_counter() - started))
                    ratios.append(fast / plain)
            found.append({"streams": count, "share_of_ideal": interval(shares), "ratio_to_off": interval(ratios)})
    return found


class ChattyModel(FreeModel):
    """Costs nothing and says nothing twice for long: drafts are seldom right."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0

    def greedy(self, kept: Kept, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Other tokens in every step and row, never one that ends it."""
        assert kept.hidden is not None, "set by forward"
        self.num_steps += 1
        return 3 + (torch.arange(kept.hidden.shape[0]) * 7 + self.num_steps**2 // 5) % (self.spec.vocab_size - 3)


def off_cost(streams: Sequence[int], num_rounds: int = 24, steps_a_round: int = 64) -> list[dict[str, Any]]:
    """Two loops in turns, one of them with a speculator that does not pay."""
    found = []
    for count in streams:
        lookup = NgramSpeculator(NgramConfig(), max_num_seqs=count, max_model_len=MAX_MODEL_LEN)
        cores = [make_core(count, model=ChattyModel(), speculator=one) for one in (None, lookup)]
        for core in cores:
            add_requests(core, count)
            while len(core.table.order) < count or len(core.scheduler):
                core.step()
            microseconds_a_step(core, 300)
        extra = []
        before = cores[1].stats()
        for i in range(num_rounds):
            order = (0, 1) if i % 2 else (1, 0)
            taken = {which: microseconds_a_step(cores[which], steps_a_round) for which in order}
            extra.append(taken[1] - taken[0])
        drafted = cores[1].stats().num_drafted - before.num_drafted
        mean, half = mean_and_half(extra)
        found.append(
            {
                "rows": count,
                "extra_us_a_step": {
                    "mean": round(mean, 1),
                    "low": round(mean - half, 1),
                    "high": round(mean + half, 1),
                },
                "drafts_a_row_and_step": round(drafted / (num_rounds * steps_a_round * count), 3),
            }
        )
    return found


def microseconds_a_step(core: EngineCore, num_steps: int) -> float:
    """Mean, probes included."""
    started = time.perf_counter()
    for _ in range(num_steps):
        core.step()
    return (time.perf_counter() - started) / num_steps * 1e6


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
    parser.add_argument("--parts", nargs="+", choices=["off_cost", "ngram", "perfect"])
    parser.add_argument("--workloads", nargs="+", default=["copy", "free"], choices=["copy", "free"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64])
    parser.add_argument("--rounds", type=int, help="default: by the number of streams")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--plot", type=Path, help="write an SVG here")
    given = parser.parse_args()
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "off_cost": lambda: off_cost([1, 64, 256]),
        "ngram": lambda: ngram(given.model, given.workloads, given.streams, given.rounds, given.max_tokens),
        "perfect": lambda: perfect(given.model, [1, 8], given.rounds, given.max_tokens),
    }
    result = {name: parts[name]() for name in given.parts or parts}
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
