"""Greedy output equals Hugging Face `generate`, whatever shares the batch and however the work is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from enginectl import Engine, SamplingParams

Reference = Callable[[str, Sequence[int], int], list[int]]

MODELS = ("llama", "qwen3", "gemma2", "mixtral")
MAX_TOKENS = 24


def prompts(num: int, vocab_size: int = 250, longest: int = 40, seed: int = 0) -> list[list[int]]:
    """Mixed lengths, 1 to `longest`."""
    random = np.random.default_rng(seed)
    return [random.integers(3, vocab_size, random.integers(1, longest)).tolist() for _ in range(num)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [16, 512])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_hugging_face(
    name: str, budget: int, depth: int, tiny: Callable[[str], Path], hugging_face: Reference
) -> None:
    """Law 1: mixed prompts batched together, chunked by a small budget or not, at both overlap depths."""
    asked = prompts(12)
    with Engine(
        str(tiny(name)),
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        overlap_depth=depth,
        block_size=4,
        dtype="float32",
    ) as engine:
        outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
        assert engine.stats().num_blocks_in_use == 0
        engine.core.pool.check()
    for prompt, output in zip(asked, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == hugging_face(name, prompt, MAX_TOKENS)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_preemption_changes_no_token(
    name: str, depth: int, tiny: Callable[[str], Path], hugging_face: Reference
) -> None:
    """Law 1 and 14: a pool so small that rows are preempted and recomputed."""
    asked = prompts(8)
    with Engine(
        str(tiny(name)),
        max_num_seqs=8,
        max_num_batched_tokens=32,
        overlap_depth=depth,
        block_size=4,
        max_model_len=72,
        num_gpu_blocks_override=40,
        dtype="float32",
    ) as engine:
        outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
        assert engine.stats().num_preemptions > 0
        engine.core.pool.check()
    for prompt, output in zip(asked, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == hugging_face(name, prompt, MAX_TOKENS)
