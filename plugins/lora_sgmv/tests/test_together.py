"""Law 3: adapters, a grammar, drafts of a second model and the prefix cache, all in one engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from enginectl import Engine, SamplingParams
from enginectl.interfaces.grammar import GrammarMatcher
from enginectl.testing.tiny_adapters import save_adapter
from enginectl.testing.tiny_models import EOS, VOCAB_SIZE, save_tiny_model, tiny_model
from enginectl.testing.toys import CycleGrammar, CycleMatcher
from enginectl.types import StructuredOutputs

NUM_TOKENS = 14
NAMES = (None, "support", "billing")


def grammar() -> CycleGrammar:
    return CycleGrammar(VOCAB_SIZE, [EOS])


def decode(module: Any, prompt: list[int], matcher: GrammarMatcher | None) -> list[int]:
    """One whole forward a token, what the grammar forbids left out."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + NUM_TOKENS and tokens[-1] != EOS:
        with torch.inference_mode():
            logits = module(input_ids=torch.tensor([tokens])).logits[0, -1]
        if matcher is not None:
            mask = np.zeros(VOCAB_SIZE, np.bool_)
            matcher.fill_mask(mask)
            logits = logits.masked_fill(~torch.from_numpy(mask), -torch.inf)
        tokens.append(int(logits.argmax()))
        if matcher is not None:
            assert matcher.accept(tokens[-1])
    return tokens[len(prompt) :]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("family", ["native", "transformers"])
def test_everything_at_once(family: str, depth: int, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    from peft import PeftModel

    system = np.random.default_rng(2).integers(3, 250, 26).tolist()
    prompts = [[*system, *np.random.default_rng(i).integers(3, 250, 4).tolist()] for i in range(3)]
    paths = {name: save_adapter("llama", tmp_path / name, seed=i, std=0.8) for i, name in enumerate(NAMES[1:])}
    draft = save_tiny_model("llama", tmp_path / "draft", num_hidden_layers=1)
    expected = {}
    for name in NAMES:
        module = tiny_model("llama")
        module = module if name is None else PeftModel.from_pretrained(module, paths[name]).eval()
        for i, prompt in enumerate(prompts):
            for constrained in (False, True):
                matcher = CycleMatcher(grammar()) if constrained else None
                expected[name, i, constrained] = decode(module, prompt, matcher)
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)
    options: dict[str, Any] = {
        "model_family": family,
        "dtype": "float32",
        "num_threads": 1,
        "block_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 48,
        "overlap_depth": depth,
        "enable_lora": True,
        "max_loras": 2,
        "lora_modules": {name: str(path) for name, path in paths.items()},
        "plugins": ["prefix-cache", "draft", "sgmv"],
        "plugin_options": {"draft": {"model": str(draft), "num_speculative_tokens": 2}},
    }
    with Engine(str(tiny("llama")), grammar=grammar(), **options) as engine:
        tickets = {}
        for name, i, constrained in expected:
            params = SamplingParams(
                temperature=0.0,
                max_tokens=NUM_TOKENS,
                structured_outputs=StructuredOutputs(regex="cycle") if constrained else None,
                speculation=2,
            )
            (ticket,) = engine._submit(engine._requests([prompts[i]], params, {"adapter": name}))
            tickets[name, i, constrained] = ticket
        while not all(ticket.is_done for ticket in tickets.values()):
            engine._step()
        for key, ticket in tickets.items():
            assert ticket.failure is None
            assert [token for chunk in ticket.take() for token in chunk.token_ids] == expected[key], key
        stats = engine.stats()
        assert stats.num_blocks_in_use == 0
    assert stats.prefix_hits > 0
    assert stats.num_drafted > 0
