"""The largest step runs on any model and backend, over one block, and leaves the engine as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from enginectl import Engine, SamplingParams
from enginectl.engine.profile_run import run_largest_step, spread
from enginectl.interfaces.model import ForwardInput, Kept


@pytest.mark.parametrize(
    ("num_tokens", "rows", "longest"), [(64, 8, 100), (5, 8, 100), (64, 3, 10), (67, 8, 9), (8, 8, 9)]
)
def test_tokens_are_spread_over_all_rows(num_tokens: int, rows: int, longest: int) -> None:
    """As many as the step may have, none longer than the longest sequence, single tokens first."""
    counts = spread(num_tokens, rows, longest)
    assert counts.sum() == min(num_tokens, rows * longest)
    assert counts.size == min(rows, num_tokens)
    assert 1 <= counts.min() <= counts.max() <= longest
    assert (np.diff(counts) >= 0).all()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_it_is_the_largest_step_and_changes_no_token(name: str, tiny: Callable[[str], Path]) -> None:
    """Tokens, rows and logits are as many as a step may have; answers afterwards are those without it."""
    prompts = [[5, 6, 7], list(range(10, 40))]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    options: dict[str, Any] = {"block_size": 4, "dtype": "float32", "num_threads": 1, "only_plugins": True}
    with Engine(str(tiny(name)), max_num_seqs=4, **options) as engine:
        plain = [output.outputs[0].token_ids for output in engine.generate(prompts, params)]
        runner: Any = engine.core.executor
        model, attention = runner.model, runner._attention
        seen: list[tuple[int, int]] = []
        forward = model.forward

        def watched(step: ForwardInput) -> Kept:
            seen.append((len(step.token_ids), len(step.keep)))
            return forward(step)

        model.forward = watched
        run_largest_step(
            model,
            attention,
            block_size=4,
            num_tokens=50,
            max_num_seqs=4,
            max_model_len=64,
            device="cpu",
            dtype=torch.float32,
        )
        assert seen == [(50, 4)]
        attention.bind(runner.kv)
        assert [output.outputs[0].token_ids for output in engine.generate(prompts, params)] == plain
