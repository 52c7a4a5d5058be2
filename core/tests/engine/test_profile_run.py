"""The largest step runs on any model and backend, over one block, and leaves the engine as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from enginectl import Engine, SamplingParams
from enginectl.context import BuildContext, LoadedModel
from enginectl.engine.profile_run import Largest, measure_kv, run_largest_step, spread
from enginectl.engine.runner import LocalRunner
from enginectl.interfaces.model import ForwardInput, Kept
from enginectl.kv_memory import MARGIN_BYTES, DeviceMemory, KVMemory
from enginectl.machine import detect_machine
from enginectl.testing.tiny_models import save_tiny_model
from enginectl.testing.toys import ConstantSpeculator


class CpuMemory(DeviceMemory):
    """Enough, and nothing ever takes any of it."""

    def free_and_total(self) -> tuple[int, int]:
        return 8 << 30, 8 << 30

    def held(self) -> int:
        return 0

    def peak(self) -> int:
        return 0

    def reset_peak(self) -> None:
        pass

    def release(self) -> None:
        pass


def watch(model: Any, seen: list[tuple[int, int]]) -> None:
    """Notes (tokens, logits) of each forward from now on."""
    forward: Callable[[ForwardInput], Kept] = model.forward

    def watched(step: ForwardInput) -> Kept:
        kept = forward(step)
        some = kept.logits if kept.hidden is None else kept.hidden
        assert some is not None, "it keeps something"
        seen.append((len(step.token_ids), len(some)))
        return kept

    model.forward = watched


def measured(engine: Engine, seen: list[tuple[int, int]], beside: Sequence[LoadedModel] = ()) -> int:
    """Bytes for KV, of an engine that is there already."""
    parts, runner = engine._assembled.parts, engine.core.executor
    assert isinstance(runner, LocalRunner)
    for model in (runner.model, *(other.model for other in beside)):
        watch(model, seen)
    context = BuildContext(
        engine._assembled.config, detect_machine(), device="cpu", dtype="float32", model=runner.model, parts=parts
    )
    return measure_kv(context, KVMemory(CpuMemory(), 1.0), beside)


@pytest.mark.parametrize("name", ["qwen3_next", "bloom"])
def test_models_that_read_rows_are_measured_too(name: str, tmp_path: Path) -> None:
    """The longest row by itself and as many single tokens as there are rows; their state was there, and counts once."""
    path = save_tiny_model(name, tmp_path)
    params, prompts = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), [[5, 6, 7], [8, 9]]
    options: dict[str, Any] = {"block_size": 4, "dtype": "float32", "num_threads": 1, "only_plugins": True}
    with Engine(str(path), max_num_seqs=4, max_num_batched_tokens=24, max_model_len=64, **options) as engine:
        plain = [output.outputs[0].token_ids for output in engine.generate(prompts, params)]
        runner: Any = engine.core.executor
        seen: list[tuple[int, int]] = []
        found = measured(engine, seen)
        assert seen == [(24, 4), (4, 4)]
        assert found == (8 << 30) - MARGIN_BYTES + 4 * runner.model.spec.state_bytes_per_row
        runner._attention.bind(runner.kv)
        runner.model.bind(runner.kv, 4)
        assert [output.outputs[0].token_ids for output in engine.generate(prompts, params)] == plain


def test_drafts_make_more_logits_and_models_beside_are_run(tiny: Callable[[str], Path]) -> None:
    """Verifying three drafts a row takes logits for four; a draft model has steps as large as the target's."""
    options: dict[str, Any] = {"block_size": 4, "dtype": "float32", "num_threads": 1, "only_plugins": True}
    with (
        Engine(str(tiny("gemma2")), max_num_seqs=2, **options) as other,
        Engine(
            str(tiny("llama")),
            max_num_seqs=4,
            max_num_batched_tokens=40,
            speculator=ConstantSpeculator(max_drafts=3),
            **options,
        ) as engine,
    ):
        draft: Any = other.core.executor
        beside = LoadedModel(cast(Any, None), draft.model, draft._attention)
        seen: list[tuple[int, int]] = []
        measured(engine, seen, [beside])
    assert seen == [(40, 16), (40, 16)]


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


def largest(num_logits: int = 4) -> Largest:
    return Largest(
        num_tokens=50,
        num_rows=4,
        num_logits=num_logits,
        max_model_len=64,
        block_size=4,
        device="cpu",
        dtype=torch.float32,
    )


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
        watch(model, seen)
        run_largest_step(model, attention, largest(num_logits=12))
        assert seen == [(50, 12)]
        attention.bind(runner.kv)
        assert [output.outputs[0].token_ids for output in engine.generate(prompts, params)] == plain
