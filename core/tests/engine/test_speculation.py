"""Drafts never change a token: whatever proposes them, whatever a request asks for, and however the work is cut."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from enginectl import Engine, RequestOutput, SamplingParams, StructuredOutputs
from enginectl.interfaces.speculator import Speculator
from enginectl.testing.dict_index import DictPrefixIndex
from enginectl.testing.tiny_models import EOS, VOCAB_SIZE
from enginectl.testing.toys import (
    AnswerSpeculator,
    BrokenSpeculator,
    ConstantAdapters,
    ConstantSpeculator,
    CycleGrammar,
    HiddenSpeculator,
)

MAX_TOKENS = 20
TARGET = "model.layers.1.mlp.down_proj"
LETTERS = tuple(string.ascii_letters)

Ask = tuple[list[int], SamplingParams, str | None]
Answer = list[tuple[tuple[int, ...], str, str, str | int | None]]


def asked() -> list[Ask]:
    """One request for each thing a request can ask for."""
    random = np.random.default_rng(5)
    start = random.integers(3, 250, 9).tolist()
    cycle = StructuredOutputs(regex="cycle")
    everything: list[tuple[dict[str, Any], str | None]] = [
        ({"temperature": 0.0}, None),
        ({"temperature": 0.0, "logprobs": 3}, None),
        ({"seed": 7}, None),
        ({"seed": 7, "n": 3, "temperature": 0.7}, None),
        ({"seed": 8, "top_k": 20, "top_p": 0.8, "logprobs": 0}, None),
        ({"temperature": 0.0, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 1.0}, None),
        ({"seed": 9, "repetition_penalty": 1.3, "logit_bias": {5: 4.0, 6: -4.0}}, None),
        ({"temperature": 0.0, "stop": LETTERS, "min_tokens": 3}, None),
        ({"seed": 10, "stop": LETTERS, "include_stop_str_in_output": True, "logprobs": 1}, None),
        ({"temperature": 0.0, "bad_word_ids": (*((i,) for i in range(3, 100)), (150, 151))}, None),
        ({"seed": 11, "min_tokens": 12, "logit_bias": {EOS: 30.0}}, None),
        ({"seed": 12, "allowed_token_ids": tuple(range(40, 80)), "stop_token_ids": (50, 51, 52)}, None),
        ({"temperature": 0.0, "structured_outputs": cycle}, None),
        ({"seed": 13, "structured_outputs": cycle, "logit_bias": {EOS: 9.0}}, None),
        ({"temperature": 0.0}, "one"),
        ({"seed": 14, "structured_outputs": cycle, "logprobs": 2}, "two"),
        ({"seed": 15, "speculation": 1}, "one"),
        ({"seed": 16, "speculation": "off"}, None),
    ]
    return [
        (
            start + random.integers(3, 250, random.integers(1, 25)).tolist(),
            SamplingParams(max_tokens=MAX_TOKENS, **p),
            a,
        )
        for p, a in everything
    ]


ASKED = asked()


def adapters() -> ConstantAdapters:
    toy = ConstantAdapters(48, TARGET, scale=1.5)
    for seed, name in enumerate(("one", "two")):
        toy.load(name, str(seed))
    return toy


def engine_of(model: Path, **options: Any) -> Engine:
    options = {
        "model_family": "transformers",
        "max_num_seqs": 16,
        "block_size": 4,
        "dtype": "float32",
        "num_threads": 1,
        "only_plugins": True,
        **options,
    }
    return Engine(
        str(model),
        grammar=CycleGrammar(VOCAB_SIZE, [EOS]),
        adapter=options.pop("adapter", None) or adapters(),
        **options,
    )


def run(engine: Engine, asks: list[Ask]) -> list[RequestOutput]:
    """All of them at once, whatever their adapters."""
    requests = [r for prompt, params, name in asks for r in engine._requests([prompt], params, {"adapter": name})]
    tickets = engine._submit(requests)
    chunks: list[list[Any]] = [[] for _ in tickets]
    while not all(ticket.is_done for ticket in tickets):
        engine._step()
        engine.core.pool.check()
        for ticket, mine in zip(tickets, chunks, strict=True):
            mine += ticket.take()
    from enginectl.api import assemble

    stats = engine.stats()
    assert (stats.num_blocks_in_use, stats.num_running, stats.num_waiting) == (0, 0, 0)
    return [assemble(ticket, mine) for ticket, mine in zip(tickets, chunks, strict=True)]


def said(output: RequestOutput) -> Answer:
    assert output.error is None
    return [(c.token_ids, c.text, c.finish_reason.value, c.stop_reason) for c in output.outputs]


def assert_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Everything but rounding of log-probabilities."""
    for (_, params, _), one, other in zip(ASKED, found, expected, strict=True):
        assert said(one) == said(other), params
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            assert (mine.logprobs is None) == (params.logprobs is None)
            for a, b in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
                assert (a.token_id, a.rank, a.top_ids) == (b.token_id, b.rank, b.top_ids)
                np.testing.assert_allclose((a.logprob, *a.top_logprobs), (b.logprob, *b.top_logprobs), atol=1e-4)


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def alone(model: Path) -> list[RequestOutput]:
    """Each request by itself, without drafts, without overlap."""
    with engine_of(model, max_num_seqs=4, max_num_batched_tokens=256, overlap_depth=0) as engine:
        found = [run(engine, [ask])[0] for ask in ASKED]
    endings = {choice.finish_reason.value for output in found for choice in output.outputs}
    assert endings == {"stop", "length"}, "the requests exercise both ends"
    return found


SHAPES: dict[str, dict[str, Any]] = {
    "batch": {"max_num_batched_tokens": 512},
    "chunks": {"max_num_batched_tokens": 12},
    "one_row": {"max_num_seqs": 1, "max_num_batched_tokens": 64},
    "preempted": {"max_num_batched_tokens": 64, "max_model_len": 64, "num_gpu_blocks_override": 34},
}


def speculators(alone: list[RequestOutput]) -> dict[str, Callable[[], Speculator | None]]:
    answers = {tuple(prompt): output.outputs[0].token_ids for (prompt, _, _), output in zip(ASKED, alone, strict=True)}
    return {
        "none": lambda: None,
        "constant": lambda: ConstantSpeculator(),
        "right": lambda: AnswerSpeculator(answers),
        "mixed": lambda: AnswerSpeculator(answers, spoil=lambda position: position % 3 == 2),
    }


@pytest.fixture(params=["none", "constant", "right", "mixed"])
def speculator(request: pytest.FixtureRequest, alone: list[RequestOutput]) -> Speculator | None:
    return speculators(alone)[request.param]()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_drafts_change_nothing(
    shape: str, depth: int, speculator: Speculator | None, model: Path, alone: list[RequestOutput]
) -> None:
    """Laws 2, 4, 22: greedy, seeded, penalties, stops, masks, grammars, adapters, choices, log-probabilities."""
    backend = adapters()
    options = {"speculator": speculator, "overlap_depth": depth, "adapter": backend, **SHAPES[shape]}
    with engine_of(model, **options) as engine:
        found = run(engine, ASKED)
        stats = engine.stats()
    assert_same(found, alone)
    assert backend.references == [0, 0]
    assert backend.max_at_once == (1 if shape == "one_row" else 2)
    assert (stats.num_preemptions > 0) == (shape == "preempted")
    if isinstance(speculator, AnswerSpeculator):
        assert stats.num_drafted > stats.num_accepted > stats.num_drafted // 5
    elif speculator is not None:
        assert stats.num_drafted > stats.num_accepted


@pytest.mark.parametrize("depth", [0, 1])
def test_prefix_hits_change_nothing(depth: int, model: Path, alone: list[RequestOutput]) -> None:
    """Laws 2 and 19: hits and evictions together with drafts, grammars and adapters; an adapter never hits the base."""
    index = DictPrefixIndex(4)
    options = {"prefix_index": index, "max_model_len": 64, "num_gpu_blocks_override": 60, "overlap_depth": depth}
    answers = speculators(alone)["mixed"]()
    with engine_of(model, speculator=answers, max_num_batched_tokens=40, **options) as engine:
        for _ in range(2):
            assert_same(run(engine, ASKED), alone)
        stats = engine.stats()
        assert stats.prefix_hits > 0
        assert 0 < stats.num_blocks_idle == index.num_known
        engine.core.pool.reset_index()
        assert engine.core.pool.num_available == 60
    assert index.num_sequences == 0


def test_a_request_says_how_many_drafts_it_takes(model: Path) -> None:
    """`speculation` is honoured: off, or a number."""
    for speculation, most in (("off", 0), (1, 1), ("auto", 3)):
        toy = ConstantSpeculator()
        with engine_of(model, speculator=toy) as engine:
            engine.generate([[5, 6]], SamplingParams(max_tokens=12, temperature=0.0, speculation=speculation))
            assert toy.most_asked == most
            assert (engine.stats().num_drafted > 0) == (most > 0)


def test_a_row_that_stops_takes_its_drafts_along(model: Path) -> None:
    """Those proposed behind its last token stayed, and every later step of other rows looked for drafts."""
    with engine_of(model, speculator=ConstantSpeculator()) as engine:
        plain = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, speculation="off")
        last = engine.generate([[5, 6]], plain)[0].outputs[0].token_ids[-1]
        stopped = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, stop_token_ids=(last,))
        assert engine.generate([[5, 6]], stopped)[0].outputs[0].finish_reason == "stop"
        assert engine.stats().num_drafted > 0
        assert not engine.core.table.num_drafts.any()


@pytest.mark.parametrize("depth", [0, 1])
def test_hidden_rows_are_those_that_predicted_the_last_token(depth: int, model: Path) -> None:
    """A speculator that reads hidden states gets the row behind the last verified token, accepted drafts or not."""
    from safetensors.torch import load_file

    toy = HiddenSpeculator(load_file(str(model / "model.safetensors"))["lm_head.weight"])
    prompts = [prompt for prompt, _, _ in ASKED[:6]]
    params = SamplingParams(temperature=0.0, max_tokens=16, prompt_logprobs=1)
    with engine_of(model, speculator=toy, overlap_depth=depth, max_num_batched_tokens=24) as engine:
        engine.generate(prompts, params)
    assert toy.num_seen > 50
    assert toy.num_agreed == toy.num_seen


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("where", ["add_row", "remove_row", "propose", "strange"])
def test_a_broken_speculator_costs_nothing(where: str, depth: int, model: Path, alone: list[RequestOutput]) -> None:
    """Law 14a: drafts are a bonus. What raises, or proposes what is no token, changes no answer."""
    toy = BrokenSpeculator(where)
    with engine_of(model, speculator=toy, overlap_depth=depth) as engine:
        assert_same(run(engine, ASKED), alone)
    assert toy.num_raised > 0


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
