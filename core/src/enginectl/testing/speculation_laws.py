"""Speculation never changes a token, as a matrix: what requests ask for, greedy and sampled, by shapes of engines and
overlap depths, with a speculator and without.

`class TestMine(SpeculationLaws)` with its own `speculator` fixture. Every cell also asserts that drafts were accepted
and that drafts were rejected: a cell that exercises nothing fails. A subset in which every two values meet runs always;
the other cells are marked `slow`, a mark that your pytest configuration must know.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginectl import Engine, RequestOutput, SamplingParams, StructuredOutputs
from enginectl.testing.dict_index import DictPrefixIndex
from enginectl.testing.tiny_models import EOS, VOCAB_SIZE, save_tiny_model
from enginectl.testing.toys import CycleGrammar

BLOCK_SIZE, MAX_TOKENS = 4, 24

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"seed": 1, "temperature": 0.4, "top_k": 4, "top_p": 0.95},
}

_BAD = (*((token,) for token in range(3, 60)), (150, 151))

FEATURES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "choices": {"n": 3},
    "logprobs": {"logprobs": 2},
    "penalties": {
        "presence_penalty": -0.6,
        "frequency_penalty": 0.2,
        "repetition_penalty": 0.9,
        "logit_bias": {5: 1.0},
    },
    "stop strings": {"stop": tuple(string.ascii_letters + string.digits + string.punctuation), "min_tokens": 8},
    "bad words": {"bad_word_ids": _BAD},
    "end": {"min_tokens": 16, "logit_bias": {EOS: 4.0}},
    "grammar": {"structured_outputs": StructuredOutputs(regex="cycle")},
    "adapters": {},
}
"""What requests ask for, beside what all of them do. Those of "adapters" name one, the other or none."""

SHAPES: dict[str, dict[str, Any]] = {
    "batch of 1": {"max_num_seqs": 1},
    "batch of 16": {"max_num_seqs": 16},
    "chunked prefill": {"max_num_seqs": 4, "max_num_batched_tokens": 20},
    "preemption": {"max_num_seqs": 16, "num_gpu_blocks_override": 40, "max_model_len": 72},
    "prefix hits": {"max_num_seqs": 16},
}
"""How the engine is made."""

_NUM_PROMPTS = {"batch of 1": 3, "batch of 16": 16, "chunked prefill": 6, "preemption": 6, "prefix hits": 6}
_ADAPTERS = ("one", None, "two")

Said = list[tuple[tuple[int, ...], str, str, str | int | None]]
MakeEngine = Callable[[str, int, str], Engine]
Plain = Callable[[str, str], list[RequestOutput]]


def is_covering(feature: str, mode: str, shape: str, depth: int) -> bool:
    """Whether the cell is of the subset that runs always: every feature in every shape, and both with every mode and
    depth together.
    """
    diagonal = [*FEATURES].index(feature) + [*SHAPES].index(shape)
    return ([*MODES].index(mode), depth) == (diagonal % 2, diagonal // 2 % 2)


def cells() -> list[Any]:
    """Every cell; those outside of the covering subset are marked slow."""
    return [
        pytest.param(*cell, marks=() if is_covering(*cell) else pytest.mark.slow, id="-".join(map(str, cell)))
        for cell in itertools.product(FEATURES, MODES, SHAPES, (0, 1))
    ]


def prompts(count: int = max(_NUM_PROMPTS.values())) -> list[list[int]]:
    """Tokens that repeat, with something else in between."""
    random = np.random.default_rng(0)
    made = []
    for _ in range(count):
        part = random.integers(3, 250, int(random.integers(4, 9))).tolist()
        made.append(part * 3 + random.integers(3, 250, 3).tolist() + part[:3])
    return made


def serve(engine: Engine, feature: str, asked: Sequence[list[int]], params: SamplingParams) -> list[RequestOutput]:
    """All of them at once; with adapters they name different ones."""
    from enginectl.api import assemble

    names = itertools.cycle(_ADAPTERS if feature == "adapters" else (None,))
    requests = [
        request
        for prompt, name in zip(asked, names, strict=False)
        for request in engine._requests([prompt], params, {"adapter": name})
    ]
    chunks: dict[Any, list[Any]] = {ticket: [] for ticket in engine._submit(requests)}
    while not all(ticket.is_done for ticket in chunks):
        engine._step()
        for ticket, mine in chunks.items():
            mine += ticket.take()
    return [assemble(ticket, mine) for ticket, mine in chunks.items()]


def said(output: RequestOutput) -> Said:
    """Everything a caller sees of a request but its log-probabilities."""
    assert output.error is None, output.error
    return [(one.token_ids, one.text, one.finish_reason.value, one.stop_reason) for one in output.outputs]


def assert_same(found: RequestOutput, expected: RequestOutput) -> None:
    """Equal tokens, text, ends and ranks; log-probabilities up to rounding."""
    assert said(found) == said(expected)
    for mine, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert (mine.logprobs is None) == (theirs.logprobs is None)
        for one, other in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
            assert (one.token_id, one.rank, one.top_ids) == (other.token_id, other.rank, other.top_ids)
            np.testing.assert_allclose(
                (one.logprob, *one.top_logprobs), (other.logprob, *other.top_logprobs), atol=1e-4
            )


def assert_exercised(feature: str, mode: str, outputs: list[RequestOutput], base: list[RequestOutput]) -> None:
    """What the feature is about happened. base: the same requests without it."""
    choices = [choice for output in outputs for choice in output.outputs]
    if feature == "choices":
        assert all(len(output.outputs) == 3 for output in outputs)
        differ = [len({choice.token_ids for choice in output.outputs}) > 1 for output in outputs]
        assert any(differ) == (mode == "sampled")
    if feature == "logprobs":
        assert all(choice.logprobs for choice in choices)
    if feature == "stop strings":
        assert any(isinstance(choice.stop_reason, str) for choice in choices)
    if feature == "end":
        assert any(choice.finish_reason.value == "stop" for choice in choices)
    if feature in ("penalties", "bad words", "grammar", "adapters"):
        assert [said(one) for one in outputs] != [said(one) for one in base], f"{feature} change nothing"


def _joined(*options: dict[str, Any]) -> dict[str, Any]:
    """One set of options for `Engine`, the plugins of all."""
    plugins = [name for some in options for name in some.get("plugins", ())]
    return {key: value for some in options for key, value in some.items()} | {"plugins": plugins}


class SpeculationLaws:
    """Law 2 for a speculator.

    speculator: the fixture to override; a function without arguments whose result are options of `Engine` that bring
    one: `lambda: {"plugins": ["mine"]}` or `lambda: {"speculator": Mine()}`. It may use `target`, the directory of the
    model. adapters: options that bring the adapters "one" and "two"; the plugin sgmv's, where that is installed.
    num_drafts: the fixed length that the cells ask for, so that what they exercise does not depend on the clock.
    """

    num_drafts = 4

    @pytest.fixture(scope="class")
    @classmethod
    def speculator(cls, target: Path) -> Callable[[], dict[str, Any]]:
        raise NotImplementedError("override speculator in the subclass")

    def prepare(self, engine: Engine, expected: list[RequestOutput]) -> None:
        """Called before each cell with what must come out, for toys whose drafts depend on it."""

    @pytest.fixture(scope="class")
    @classmethod
    def target(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A tiny model whose answers repeat now and then: its head likes the last token."""
        from safetensors.torch import load_file, save_file

        path = save_tiny_model("llama", tmp_path_factory.mktemp("target"), initializer_range=0.1)
        file = str(path / "model.safetensors")
        weights = load_file(file)
        weights["lm_head.weight"] += 1.0 * weights["model.embed_tokens.weight"]
        save_file(weights, file, metadata={"format": "pt"})
        return path

    @pytest.fixture(scope="class")
    @classmethod
    def adapters(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        pytest.importorskip("peft")
        pytest.importorskip("enginectl_lora_sgmv")
        from enginectl.testing.tiny_adapters import save_adapter

        directory = tmp_path_factory.mktemp("adapters")
        paths = {
            name: str(save_adapter("llama", directory / name, seed=seed, std=0.1))
            for seed, name in enumerate(("one", "two"))
        }
        return {"plugins": ["sgmv"], "enable_lora": True, "max_loras": 2, "lora_modules": paths}

    @pytest.fixture(scope="class")
    @classmethod
    def engine(
        cls, target: Path, speculator: Callable[[], dict[str, Any]], request: pytest.FixtureRequest
    ) -> Iterator[MakeEngine]:
        """`engine(shape, depth, feature)`, made once. The shape "plain" has no speculator."""
        made: dict[tuple[str, int, bool], Engine] = {}

        def make(shape: str, depth: int, feature: str) -> Engine:
            key = shape, depth, feature == "adapters"
            if key not in made:
                adapters = request.getfixturevalue("adapters") if feature == "adapters" else {}
                options: dict[str, Any] = (
                    {"max_num_seqs": 16} if shape == "plain" else _joined(SHAPES[shape], speculator())
                )
                if shape == "prefix hits":
                    options["prefix_index"] = DictPrefixIndex(BLOCK_SIZE)
                common = {"block_size": BLOCK_SIZE, "dtype": "float32", "num_threads": 1, "overlap_depth": depth}
                grammar = CycleGrammar(VOCAB_SIZE, [EOS], period=2, hold=3)
                made[key] = Engine(str(target), grammar=grammar, **_joined(common, adapters, options))
            return made[key]

        yield make
        for one in made.values():
            one.close()

    @pytest.fixture(scope="class")
    @classmethod
    def plain(cls, engine: MakeEngine) -> Plain:
        """What each kind of request answers without a speculator."""
        known: dict[tuple[str, str], list[RequestOutput]] = {}

        def answers(feature: str, mode: str) -> list[RequestOutput]:
            if (feature, mode) not in known:
                params = SamplingParams(max_tokens=MAX_TOKENS, **MODES[mode], **FEATURES[feature])
                found = serve(engine("plain", 0, feature), feature, prompts(), params)
                if feature != "nothing":
                    assert_exercised(feature, mode, found, answers("nothing", mode))
                known[feature, mode] = found
            return known[feature, mode]

        return answers

    @pytest.mark.parametrize(("feature", "mode", "shape", "depth"), cells())
    def test_drafts_change_nothing(
        self, feature: str, mode: str, shape: str, depth: int, engine: MakeEngine, plain: Plain
    ) -> None:
        """Law 2: drafts of a fixed length, some right and some wrong."""
        asked = prompts()[: _NUM_PROMPTS[shape]]
        mine, expected = engine(shape, depth, feature), plain(feature, mode)[: len(asked)]
        self.prepare(mine, expected)
        params = SamplingParams(max_tokens=MAX_TOKENS, speculation=self.num_drafts, **MODES[mode], **FEATURES[feature])
        before = mine.stats()
        for _ in range(2 if shape == "prefix hits" else 1):
            found = serve(mine, feature, asked, params)
            for one, other in zip(found, expected, strict=True):
                assert_same(one, other)
        after = mine.stats()
        accepted = after.num_accepted - before.num_accepted
        assert accepted > 0, "no draft was accepted"
        assert after.num_drafted - before.num_drafted > accepted, "no draft was rejected"
        assert sum(after.accepted_by_position) == after.num_accepted
        num_tokens, num_steps = (
            after.num_generation_tokens - before.num_generation_tokens,
            after.num_steps - before.num_steps,
        )
        if shape == "batch of 16":
            assert num_tokens > num_steps * (1 + self.num_drafts), "rows shared steps"
        if shape == "preemption":
            assert after.num_preemptions > before.num_preemptions
        if shape == "prefix hits":
            assert after.prefix_hits > before.prefix_hits
        assert after.num_blocks_in_use == 0
        mine.core.pool.check()

    @pytest.mark.parametrize("depth", [0, 1])
    @pytest.mark.parametrize("mode", MODES)
    def test_neither_do_lengths_that_vary(self, mode: str, depth: int, engine: MakeEngine, plain: Plain) -> None:
        """Law 2: automatic, off and several lengths in one batch."""
        words: list[str | int] = ["auto", "off", 1, "auto", 0, 3, "auto", 2]
        params = [SamplingParams(max_tokens=MAX_TOKENS, speculation=word, **MODES[mode]) for word in words]
        found = engine("batch of 16", depth, "nothing").generate(prompts(len(words)), params)
        for one, other in zip(found, plain("nothing", mode), strict=False):
            assert_same(one, other)
