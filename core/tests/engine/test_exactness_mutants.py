"""The check that greedy output equals Hugging Face's can fail: broken attention does not pass it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from enginectl import SamplingParams
from enginectl.compose import compose
from enginectl.config import EngineConfig
from enginectl.plugins import PluginHost
from enginectl.provider import Provider, Role
from enginectl.testing.attention_mutants import lost_block, window_off_by_one, zeroed
from enginectl.testing.free_executor import Answers, free_request

Reference = Callable[[str, Sequence[int], int], list[int]]
Mutant = Callable[[Provider], Provider]

NUM_TOKENS = 12


def prompts() -> list[list[int]]:
    random = np.random.default_rng(4)
    return [random.integers(3, 250, length).tolist() for length in (3, 11, 18, 26)]


def agree(name: str, mutant: Mutant, tiny: Callable[[str], Path], hugging_face: Reference) -> list[bool]:
    """For each prompt whether the engine with this attention says what Hugging Face says."""
    host = PluginHost(only_named=True)
    entry = host.entry(Role.ATTENTION, "torch")
    host.catalogue[Role.ATTENTION]["torch"] = dataclasses.replace(entry, provider=mutant(entry.provider))
    config = EngineConfig(
        model=str(tiny(name)), dtype="float32", block_size=4, max_num_seqs=4, max_num_batched_tokens=20, num_threads=1
    )
    engine = compose(config, host=host)
    try:
        answers = Answers()
        for key, prompt in enumerate(prompts()):
            params = SamplingParams(temperature=0.0)
            engine.core.add(
                free_request(key, prompt, NUM_TOKENS, params=params, eos_token_ids=engine.info.eos_token_ids)
            )
        while engine.core.has_work:
            answers.take(engine.core.step())
    finally:
        engine.close()
    return [answers.tokens[key] == hugging_face(name, prompt, NUM_TOKENS) for key, prompt in enumerate(prompts())]


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_unbroken_attention_passes(name: str, tiny: Callable[[str], Path], hugging_face: Reference) -> None:
    """Law 1."""
    assert all(agree(name, lambda provider: provider, tiny, hugging_face))


@pytest.mark.parametrize(
    ("name", "mutant"), [("llama", zeroed), ("llama", lost_block), ("mistral", window_off_by_one), ("mistral", zeroed)]
)
def test_broken_attention_fails(
    name: str, mutant: Mutant, tiny: Callable[[str], Path], hugging_face: Reference
) -> None:
    """Law 1: nothing attended, every second block lost, a window one token too wide."""
    assert not all(agree(name, mutant, tiny, hugging_face)[1:])
