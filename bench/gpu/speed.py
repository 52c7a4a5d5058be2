"""Sections that ask how fast whole models are: decode steps, beside transformers; the host's gap between steps."""

from __future__ import annotations

import time
from typing import Any

import torch
from engines import LONG, PROMPT, SHORT, decode_step_s, engine_for, generate, usable
from harness import Bench
from random_model import config_of, kv_bytes_per_token, weight_bytes
from rooflines import measure_copy


def steps(bench: Bench) -> None:
    """Decode steps of random-weight models by batch and backend, against the time that reading their bytes takes."""
    copy_gb_s = measure_copy(bench)
    bench.add(what="copy", gb_s=copy_gb_s)
    shapes = bench.sizes(["8B", "0.5B", "1.5B"], ["tiny"])
    for backend in ("triton", "flashinfer", "torch"):
        for shape in shapes:
            if backend in usable(bench, shape):
                with bench.attempt(model=shape, backend=backend):
                    model_steps(bench, shape, backend, copy_gb_s)


def model_steps(bench: Bench, shape: str, backend: str, copy_gb_s: float) -> None:
    """One engine, all batch sizes."""
    few = shape == "8B" or backend == "torch"  # long steps
    batches = bench.sizes([1, 64] if few else [1, 64, 8, 256], [1, 3])
    context = PROMPT + (SHORT + LONG) // 2
    with engine_for(bench, shape, backend, max(batches)) as engine:
        for batch in batches:
            seconds = decode_step_s(bench, engine, batch)
            floor = (weight_bytes(shape, 2) + batch * context * kv_bytes_per_token(shape, 2)) / copy_gb_s / 1e9
            row = {"model": shape, "backend": backend, "batch": batch, "step_ms": seconds * 1e3}
            bench.add(**row, tokens_s=batch / seconds, of_floor=seconds / floor)


def baseline(bench: Bench) -> None:
    """Hugging Face `generate` over the same shapes in the same run."""
    for shape in bench.sizes(["0.5B", "1.5B"], ["tiny"]):
        for batch in bench.sizes([1, 64], [2]):
            with bench.attempt(model=shape, batch=batch):
                seconds = transformers_step_s(bench, shape, batch)
                bench.add(
                    model=shape, backend="transformers", batch=batch, step_ms=seconds * 1e3, tokens_s=batch / seconds
                )


def transformers_step_s(bench: Bench, shape: str, batch: int) -> float:
    """Hugging Face `generate` on the same shape, by the same difference."""
    from transformers import LlamaConfig, LlamaForCausalLM

    values = {key: value for key, value in config_of(shape).items() if key not in ("model_type", "architectures")}
    with torch.device(bench.device):
        model = LlamaForCausalLM(LlamaConfig(**values)).to(bench.sizes(torch.bfloat16, torch.float32)).eval()
    ids = torch.randint(3, 200, (batch, bench.sizes(PROMPT, 8)), device=bench.device)
    short, long = bench.sizes((8, 72), (2, 4))

    def timed(num_tokens: int) -> float:
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        if not bench.dry_run:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    timed(short)  # warms up
    return max(timed(long) - timed(short), 1e-9) / (long - short)


Span = tuple[float, float, int]
"""Start and end of a kernel or copy in microseconds, and the number of the launch that it came with."""


def host_gap(bench: Bench) -> None:
    """The part of a decode step in which the device has nothing to do because the host has not launched the next piece.

    A graph is one launch: pauses between its kernels are the device's own. The profiler slows a step down, so its gap is
    taken in microseconds and compared with a step that nobody watches.
    """
    for shape, batch in bench.sizes([("8B", 64), ("0.5B", 1), ("0.5B", 64), ("8B", 1)], [("tiny", 2)]):
        backend = usable(bench, shape)[0]
        row = {"model": shape, "backend": backend, "batch": batch}
        with bench.attempt(**row), engine_for(bench, shape, backend, batch) as engine:
            step_us = decode_step_s(bench, engine, batch) * 1e6
            num_tokens = bench.sizes(96, 4)
            spans = decode_part(profiled(bench, engine, batch, num_tokens))
            num_steps = num_tokens * KEPT
            length = spans_end(spans) - spans[0][0]
            idle = idle_us(spans)
            num_launches = len({launch for _, _, launch in spans})
            # Launches that cannot be told apart would leave no gap between them.
            gap = idle_us(by_launch(spans)) if num_launches >= num_steps else idle
            bench.add(
                **row,
                step_us=step_us,
                watched_step_us=length / num_steps,
                gap_us=gap / num_steps,
                gap_part=gap / num_steps / step_us,
                idle_us=idle / num_steps,
                launches_a_step=num_launches / num_steps,
            )


def profiled(bench: Bench, engine: Any, batch: int, num_tokens: int) -> list[Span]:
    """What the device did while an answer was made, in order. In a dry run, what the host did."""
    generate(engine, batch, num_tokens, bench.sizes(16, 4))
    kind = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[bench.sizes(kind.CUDA, kind.CPU)]) as profile:
        generate(engine, batch, num_tokens, bench.sizes(16, 4))
    wanted = bench.sizes("CUDA", "CPU")
    found = [event for event in profile.events() if event.device_type.name == wanted]
    assert found, "the profiler saw nothing"
    return sorted((event.time_range.start, event.time_range.end, event.id) for event in found)


KEPT = 0.75
"""The last part of a profile: decode steps only."""


def decode_part(spans: list[Span]) -> list[Span]:
    """Without the prompts at its beginning."""
    first, last = spans[0][0], spans_end(spans)
    return [span for span in spans if span[0] >= last - KEPT * (last - first)]


def spans_end(spans: list[Span]) -> float:
    """When the last one is over."""
    return max(end for _, end, _ in spans)


def by_launch(spans: list[Span]) -> list[Span]:
    """Spans of one launch that follow each other, joined."""
    joined: list[Span] = []
    for start, end, launch in spans:
        if joined and launch and joined[-1][2] == launch:
            first, last, _ = joined.pop()
            start, end = first, max(last, end)
        joined.append((start, end, launch))
    return joined


def idle_us(spans: list[Span]) -> float:
    """Time within their range that no span covers."""
    idle, reached = 0.0, spans[0][0]
    for start, end, _ in spans:
        idle += max(0.0, start - reached)
        reached = max(reached, end)
    return idle
