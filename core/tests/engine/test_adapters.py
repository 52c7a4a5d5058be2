"""An adapter per token slot: what a toy adds is what Hugging Face computes with the same constant added."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from enginectl import Engine, SamplingParams
from enginectl.errors import RequestError
from enginectl.testing.dict_index import DictPrefixIndex
from enginectl.testing.toys import ConstantAdapters, ConstantSpeculator

TARGET = "model.layers.1.mlp.down_proj"
NAMES = (None, "one", "two", "three")
NUM_TOKENS = 10
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)


def toy_adapters() -> ConstantAdapters:
    toy = ConstantAdapters(48, TARGET, num_slots=2, scale=1.5)
    for seed, name in enumerate(NAMES[1:]):
        toy.load(str(name), str(seed))
    return toy


def prompts() -> list[list[int]]:
    random = np.random.default_rng(6)
    return [random.integers(3, 250, random.integers(2, 20)).tolist() for _ in range(8)]


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str | None, list[list[int]]]:
    """By adapter, what `generate` gives with the constant added by a hook of its own."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    toy = toy_adapters()
    found: dict[str | None, list[list[int]]] = {}
    for name in NAMES:
        added = torch.zeros(48) if name is None else torch.from_numpy(toy.vector(name))
        hook = module.get_submodule(TARGET).register_forward_hook(lambda _m, _i, out, added=added: out + added)
        found[name] = []
        for prompt in prompts():
            asked = torch.tensor([prompt])
            out = module.generate(
                asked, attention_mask=torch.ones_like(asked), max_new_tokens=NUM_TOKENS, do_sample=False
            )
            found[name].append(out[0, len(prompt) :].tolist())
        hook.remove()
    return found


def engine_of(model: Path, **options: Any) -> Engine:
    fixed = {"max_num_seqs": 16, "block_size": 4, "dtype": "float32", "num_threads": 1, "only_plugins": True}
    return Engine(str(model), model_family="transformers", **{**fixed, **options})


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("crossed", [False, True])
def test_rows_with_different_adapters_share_a_batch(
    crossed: bool, depth: int, model: Path, expected: dict[str | None, list[list[int]]]
) -> None:
    """Law 3 with a toy: more adapters than slots, chunks, and crossed with drafts and prefix hits."""
    toy, index = toy_adapters(), DictPrefixIndex(4)
    extra = {"speculator": ConstantSpeculator(), "prefix_index": index} if crossed else {}
    with engine_of(model, adapter=toy, overlap_depth=depth, max_num_batched_tokens=32, **extra) as engine:
        for _ in range(2):
            requests = [r for name in NAMES for r in engine._requests(prompts(), PARAMS, {"adapter": name})]
            tickets = engine._submit(requests)
            while not all(ticket.is_done for ticket in tickets):
                engine._step()
            found = [[t for chunk in ticket.take() for t in chunk.token_ids] for ticket in tickets]
            for i, name in enumerate(NAMES):
                assert found[8 * i : 8 * i + 8] == expected[name], name
        assert (engine.stats().prefix_hits > 0) == crossed
    assert toy.max_at_once == 2
    assert toy.references == [0, 0]
    assert expected[None] != expected["one"] != expected["two"], "the adapters change the output"


def test_an_unknown_adapter_is_refused_before_anything_runs(model: Path) -> None:
    """Law 11: exact names only, with the nearest."""
    with engine_of(model, adapter=toy_adapters()) as engine, pytest.raises(RequestError, match="did you mean 'one'"):
        engine.generate([[5]], PARAMS, adapter="oone")


def test_an_adapter_that_went_away_ends_what_waits_for_it(model: Path) -> None:
    """Law 21: the request never ran, so it is refused; the others go on."""
    toy = toy_adapters()
    with engine_of(model, adapter=toy, max_num_seqs=1) as engine:
        tickets = engine._submit(
            [r for name in (None, "two") for r in engine._requests([[5, 6]], PARAMS, {"adapter": name})]
        )
        engine._step()
        toy.unload("two")
        while not all(ticket.is_done for ticket in tickets):
            engine._step()
        assert tickets[0].failure is None
        assert "no adapter named 'two'" in str(tickets[1].failure)
        assert engine.stats().num_blocks_in_use == 0


def test_a_reloaded_adapter_does_not_hit_its_old_blocks(model: Path) -> None:
    """Laws 17 and 20: the key holds the content version; rows that ran across the reload published under the new one."""
    toy, index = toy_adapters(), DictPrefixIndex(4)
    asked = list(range(3, 40))
    with engine_of(model, adapter=toy, prefix_index=index) as engine:
        (old,) = engine.generate([asked], PARAMS, adapter="one")
        toy.load("one", "77", replace=True)
        (new,) = engine.generate([asked], PARAMS, adapter="one")
        assert new.usage.cached_tokens == 0
        (again,) = engine.generate([asked], PARAMS, adapter="one")
        assert again.usage.cached_tokens == 36
        assert new.outputs[0].token_ids == again.outputs[0].token_ids != old.outputs[0].token_ids
