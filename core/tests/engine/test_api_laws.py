"""Laws of what a caller gets, through the Python API on a tiny model, at both overlap depths."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from enginectl import Engine, RequestOutput, SamplingParams, StructuredOutputs
from enginectl.errors import RequestError
from enginectl.interfaces.grammar import GrammarMatcher
from enginectl.interfaces.observer import Observer
from enginectl.testing.dict_index import DictPrefixIndex
from enginectl.testing.tiny_models import EOS, VOCAB_SIZE
from enginectl.testing.toys import AnswerSpeculator, ConstantAdapters, ConstantSpeculator, CycleGrammar, CycleMatcher
from enginectl.types import FinishedRequest, FinishReason, OutputChunk, TokenLogprobs

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
PLAIN = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPT = np.random.default_rng(11).integers(3, 250, 21).tolist()


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


def engine_of(model: Path, depth: int = 0, **options: Any) -> Engine:
    fixed = {"max_num_seqs": 8, "block_size": 4, "dtype": "float32", "num_threads": 1, "only_plugins": True}
    return Engine(str(model), overlap_depth=depth, **{**fixed, **options})


@pytest.fixture(scope="module")
def plain(model: Path) -> RequestOutput:
    """The greedy answer, alone and without overlap."""
    with engine_of(model) as engine:
        return engine.generate(PROMPT, PLAIN)[0]


def tokens(outputs: Sequence[RequestOutput]) -> list[list[tuple[int, ...]]]:
    assert all(output.error is None for output in outputs)
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


# -- streams -----------------------------------------------------------------------------------------------------------


def joined(chunks: Sequence[OutputChunk], index: int) -> tuple[Any, ...]:
    """A choice out of its chunks: text, ids, the ids of its log-probabilities, and how it ended."""
    mine = [chunk for chunk in chunks if chunk.index == index]
    assert [chunk.finish_reason for chunk in mine[:-1]] == [None] * (len(mine) - 1), "a choice ends once, last"
    scored = [entry.token_id for chunk in mine for entry in chunk.logprobs or ()]
    ids = [token for chunk in mine for token in chunk.token_ids]
    return "".join(chunk.text for chunk in mine), ids, scored, mine[-1].finish_reason, mine[-1].stop_reason


@DEPTHS
@pytest.mark.parametrize("speculates", [False, True])
def test_a_stream_is_the_whole_answer(depth: int, speculates: bool, model: Path, plain: RequestOutput) -> None:
    """Laws 6, 8 and 9: text, ids, log-probabilities and usage are cut at the same token, a stop in a draft included."""
    text = plain.outputs[0].text
    stops = [text[8:10], text[11:13] + "never", text[5:7] + "nor this"]
    asked = [
        {},
        {"stop": stops},
        {"stop": stops, "include_stop_str_in_output": True},
        {"stop": [text[2:4]], "min_tokens": 9},
        {"stop_token_ids": plain.outputs[0].token_ids[7:8]},
        {"n": 3, "seed": 5, "temperature": 0.9, "stop": ["e", "i", "u"]},
    ]
    answers = {tuple(PROMPT): plain.outputs[0].token_ids}
    extra = {"speculator": AnswerSpeculator(answers)} if speculates else {}
    reasons, longest = set(), 0
    with engine_of(model, depth, **extra) as engine:
        for fields in asked:
            params = msgspec.structs.replace(PLAIN, logprobs=1, **fields)
            chunks = list(engine.stream(PROMPT, params))
            (whole,) = engine.generate(PROMPT, params)
            for choice in whole.outputs:
                scored = [entry.token_id for entry in choice.logprobs or ()]
                end = choice.finish_reason, choice.stop_reason
                assert joined(chunks, choice.index) == (choice.text, list(choice.token_ids), scored, *end)
                assert scored == list(choice.token_ids)
                reasons.add(choice.finish_reason)
            assert whole.usage.completion_tokens == sum(len(choice.token_ids) for choice in whole.outputs)
            longest = max(longest, *(len(chunk.token_ids) for chunk in chunks))
            assert engine.stats().num_blocks_in_use == 0
        stopped = engine.generate(PROMPT, msgspec.structs.replace(PLAIN, stop=tuple(stops)))[0].outputs[0]
        assert (stopped.text, stopped.stop_reason) == (text[: text.index(stops[0])], stops[0])
        assert engine.stats().num_accepted > 0 or not speculates
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert longest > 1 or not speculates, "drafts were accepted in one step"


@DEPTHS
def test_any_of_the_eos_set_ends_a_choice_and_overrun_is_not_billed(
    depth: int, model: Path, plain: RequestOutput, tmp_path: Path
) -> None:
    """Laws 9 and 14b: the end is the set of `generation_config.json`, and found a step late at depth 1."""
    ids = plain.outputs[0].token_ids
    ends = [next(token for i, token in enumerate(ids) if i >= at and ids.index(token) == i) for at in (9, 5)]
    several = shutil.copytree(model, tmp_path / "several")
    (several / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, *ends]}))
    with engine_of(several, depth) as engine:
        (output,) = engine.generate(PROMPT, msgspec.structs.replace(PLAIN, ignore_eos=False))
        (choice,) = output.outputs
        assert choice.token_ids == ids[: ids.index(ends[1]) + 1]
        assert (choice.finish_reason, choice.stop_reason) == (FinishReason.STOP, None)
        assert output.usage.completion_tokens == len(choice.token_ids)
        assert tokens(engine.generate([PROMPT], PLAIN)) == [[ids]], "ignored when that is asked for"


@DEPTHS
def test_omitted_max_tokens_means_what_fits(depth: int, model: Path) -> None:
    """Law 14b: up to the longest context; a prompt that leaves no room is refused at admission."""
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    with engine_of(model, depth, max_model_len=40) as engine:
        for length in (1, 20, 39):
            (output,) = engine.generate((PROMPT * 2)[:length], params)
            assert len(output.outputs[0].token_ids) == 40 - length
            assert output.outputs[0].finish_reason is FinishReason.LENGTH
        with pytest.raises(RequestError, match="40"):
            engine.generate((PROMPT * 2)[:40], params)
        assert engine.stats().num_blocks_in_use == 0


# -- seeds -------------------------------------------------------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("speculates", [False, True])
def test_a_seed_gives_the_same_tokens_in_any_company(depth: int, speculates: bool, model: Path) -> None:
    """Law 4: alone, among others, preempted, in another row; choices differ, and so do equal prompts of one call."""
    params = SamplingParams(seed=7, n=3, max_tokens=16, ignore_eos=True)
    with engine_of(model) as engine:
        ((expected,), twice) = tokens(engine.generate([PROMPT], params)), tokens(engine.generate([PROMPT] * 2, params))
        assert tokens(engine.generate([PROMPT], msgspec.structs.replace(params, seed=8)))[0] != expected
    assert len({*twice[0], *twice[1]}) == 6
    assert twice[0] == expected
    random = np.random.default_rng(depth)
    others = [random.integers(3, 250, random.integers(1, 30)).tolist() for _ in range(9)]
    company = SamplingParams(temperature=1.3, max_tokens=20, ignore_eos=True)  # none ends before blocks run out
    extra = {"speculator": ConstantSpeculator()} if speculates else {}
    with engine_of(
        model, depth, max_num_batched_tokens=16, max_model_len=64, num_gpu_blocks_override=24, **extra
    ) as engine:
        for place in (0, 4, 9):
            prompts = [*others[:place], PROMPT, *others[place:]]
            each = [*[company] * place, params, *[company] * (9 - place)]
            assert tokens(engine.generate(prompts, each))[place] == expected
        assert engine.stats().num_preemptions > 0


# -- log-probabilities -------------------------------------------------------------------------------------------------


def reference_logprobs(model: Path, ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[len(ids), vocabulary]: row i scores the token at i + 1."""
    from transformers import AutoModelForCausalLM

    hugging = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        scores: np.ndarray[Any, np.dtype[np.float32]] = torch.log_softmax(
            hugging(torch.tensor([list(ids)])).logits[0], -1
        ).numpy()
    return scores


def assert_scores(entry: TokenLogprobs, scores: np.ndarray[Any, np.dtype[np.float32]], token: int) -> None:
    assert entry.token_id == token, "the chosen token is always there"
    assert entry.logprob == pytest.approx(float(scores[token]), abs=1e-3)
    assert entry.rank == int((scores > scores[token]).sum()) + 1
    best = np.argsort(-scores)[: len(entry.top_ids)]
    assert list(entry.top_ids) == best.tolist()
    np.testing.assert_allclose(entry.top_logprobs, scores[best], atol=1e-3)


@DEPTHS
@pytest.mark.parametrize("speculates", [False, True])
def test_log_probabilities_are_those_of_the_model_however_the_work_is_cut(
    depth: int, speculates: bool, model: Path, plain: RequestOutput
) -> None:
    """Law 10: of prompt and output, in chunks of 5, behind prefix hits, with drafts; none asked, none given."""
    ids = [*PROMPT, *plain.outputs[0].token_ids]
    scores = reference_logprobs(model, ids)
    params = msgspec.structs.replace(PLAIN, logprobs=3)
    extra = {"speculator": AnswerSpeculator({tuple(PROMPT): plain.outputs[0].token_ids})} if speculates else {}
    with engine_of(model, depth, max_num_batched_tokens=5, prefix_index=DictPrefixIndex(4), **extra) as engine:
        for fields in ({}, {"prompt_logprobs": 2}, {"logprobs": 0}, {"logprobs": None}):
            asked = msgspec.structs.replace(params, **fields)
            _, output = engine.generate([PROMPT[:2], PROMPT], [PLAIN, asked])  # chunks lie behind a decode
            (choice,) = output.outputs
            assert choice.token_ids == plain.outputs[0].token_ids
            assert (choice.logprobs is None) == (asked.logprobs is None)
            for i, entry in enumerate(choice.logprobs or ()):
                assert len(entry.top_ids) == asked.logprobs
                assert_scores(entry, scores[len(PROMPT) + i - 1], choice.token_ids[i])
            assert (output.prompt_logprobs is None) == (asked.prompt_logprobs is None)
            for i, scored in enumerate((output.prompt_logprobs or ())[1:]):
                assert scored is not None
                assert_scores(scored, scores[i], PROMPT[i + 1])
        assert engine.stats().prefix_hits > 0
        assert engine.stats().num_accepted > 0 or not speculates


# -- clients that go away ----------------------------------------------------------------------------------------------


class WatchedGrammar(CycleGrammar):
    """Knows which of its matchers are alive."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE, [EOS], least=100)
        self.matchers: weakref.WeakSet[GrammarMatcher] = weakref.WeakSet()

    def matcher(self, compiled: object) -> GrammarMatcher:
        made = CycleMatcher(self)
        self.matchers.add(made)
        return made


class Listening(Observer):
    """Keeps what it is told of ends."""

    def __init__(self) -> None:
        self.reasons: list[tuple[str, ...]] = []

    def on_finished(self, finished: FinishedRequest) -> None:
        self.reasons.append(tuple(str(reason.value) for reason in finished.reasons))


@DEPTHS
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_steps", [0, 1, 6])
def test_a_caller_that_leaves_frees_what_each_choice_held(depth: int, n: int, num_steps: int, model: Path) -> None:
    """Law 13: blocks, adapter pin and grammar within one step, beside somebody who goes on; counted as aborted."""
    grammar, observer = WatchedGrammar(), Listening()
    adapters = ConstantAdapters(48, "model.layers.1.mlp.down_proj")
    adapters.load("one", "1")
    params = SamplingParams(
        temperature=0.0, n=n, max_tokens=90, structured_outputs=StructuredOutputs(regex="cycle"), seed=1
    )
    parts = {"grammar": grammar, "adapter": adapters, "observer": observer}
    with engine_of(model, depth, model_family="transformers", max_num_seqs=3, **parts) as engine:
        bystander = engine._submit(engine._requests([PROMPT[:3]], PLAIN, {}))
        engine._step()
        alone = engine.stats().num_blocks_in_use
        tickets = engine._submit(engine._requests([PROMPT], params, {"adapter": "one"}))
        for _ in range(num_steps):
            engine._step()
        if num_steps == 6:
            assert engine.stats().num_blocks_in_use > alone + 4
            assert sum(adapters.references) > 0
            assert len(grammar.matchers) > 0
        engine._abort(tickets)
        engine._step()
        gc.collect()
        assert adapters.references == [0, 0]
        assert list(grammar.matchers) == []
        assert engine.stats().num_blocks_in_use <= alone + 3, "the bystander's few"
        assert engine.stats().num_running == 1
        assert observer.reasons == [("abort",) * n]
        while not bystander[0].is_done:
            engine._step()
        assert engine.stats().num_blocks_in_use == 0
        engine.core.pool.check()
    assert observer.reasons[1:] == [("length",)]


@DEPTHS
def test_leaving_a_stream_early_frees_everything(depth: int, model: Path) -> None:
    """Law 13: the generator is closed in the middle."""
    with engine_of(model, depth) as engine:
        stream = engine.stream(PROMPT, PLAIN)
        next(stream)
        assert engine.stats().num_blocks_in_use > 0
        stream.close()  # type: ignore[attr-defined]
        engine._step()
        assert (engine.stats().num_blocks_in_use, engine.core.has_work) == (0, False)
