"""Adapters on models that take a step apart: recurrent ones, and those that attend by themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginectl import Engine, SamplingParams
from enginectl.errors import ConfigError
from enginectl.testing.architectures import ARCHITECTURES
from enginectl.testing.tiny_adapters import ATTENTION, MLP, peft_greedy, save_adapter
from enginectl.testing.tiny_models import save_tiny_model

TARGETS = {
    "qwen3_next": [*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate"],
    "mamba2": ["in_proj"],
    "jamba": [*ATTENTION, "in_proj", "x_proj", "dt_proj", "out_proj"],
    "lfm2": ["q_proj", "k_proj", "v_proj", "in_proj", "out_proj", "w1", "w2", "w3"],
    "bloom": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "gpt_neo": ["q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"],
    "doge": [*ATTENTION, *MLP],
}
NUM_TOKENS = 10

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")


def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(3, 250, length).tolist() for length in (1, 23, 7, 30, 12, 18)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`saved(name)` is a directory with the model and the adapters `a` and `b`."""

    def save(name: str) -> Path:
        directory = tmp_path_factory.mktemp(name)
        save_tiny_model(name, directory / "model", tokenizer=False)
        for seed, adapter in enumerate("ab"):
            save_adapter(name, directory / adapter, seed=seed, std=0.5, target_modules=TARGETS[name])
        return directory

    return cache(save)


def engine_of(directory: Path, *, whole_prompts: bool = False, **options: Any) -> Engine:
    fixed: dict[str, Any] = {
        "dtype": "float32",
        "plugins": ["sgmv"],
        "only_plugins": True,
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 8,
        "lora_modules": {adapter: str(directory / adapter) for adapter in "ab"},
        "max_num_seqs": 8,
        "max_num_batched_tokens": 48 if whole_prompts else 16,
        "max_model_len": 48,
        "block_size": 4,
        "num_gpu_blocks_override": 20,
        "num_threads": 1,
    }
    return Engine(str(directory / "model"), **fixed | options)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_rows_equal_peft(name: str, depth: int, saved: Callable[[str], Path]) -> None:
    """Law 3: rows with either adapter and with none share steps, prompts are read in chunks, rows give way."""
    directory = saved(name)
    used = [None, "a", "b", "b", "a", None]
    expected = {
        adapter: peft_greedy(name, directory / adapter if adapter else None, prompts(), NUM_TOKENS)
        for adapter in (None, "a", "b")
    }
    assert expected["a"] != expected[None] != expected["b"], "these adapters change nothing and prove nothing"
    with engine_of(directory, whole_prompts=ARCHITECTURES[name].whole_prompts, overlap_depth=depth) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        asked = zip(prompts(), used, strict=True)
        tickets = [
            engine._submit(engine._requests([prompt], params, {"adapter": adapter}))[0] for prompt, adapter in asked
        ]
        while not all(ticket.is_done for ticket in tickets):
            engine._step()
        found = [[token for chunk in ticket.take() for token in chunk.token_ids] for ticket in tickets]
        assert engine.stats().num_preemptions > 0
        assert engine.stats().num_blocks_in_use == 0
    assert found == [expected[adapter][i] for i, adapter in enumerate(used)]


def test_linears_that_see_more_than_the_steps_tokens_are_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Law 21: doge computes its mask from the values of all tokens so far; what an adapter adds there is never lost."""
    adapter = save_adapter("doge", tmp_path / "adapter", target_modules=["dt_proj"])
    with pytest.raises(ConfigError, match="dt_proj"):
        engine_of(saved("doge"), lora_modules={"mine": str(adapter)})
