"""Speculation never changes a token, as a matrix: kinds of requests by shapes of engines, with a speculator and without.

`class TestMine(SpeculationLaws)` with its own `speculator` fixture. Every cell also asserts that drafts were accepted
and that drafts were rejected: a cell that exercises nothing fails.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginectl import Engine, RequestOutput, SamplingParams
from enginectl.testing.dict_index import DictPrefixIndex
from enginectl.testing.tiny_models import EOS, save_tiny_model

BLOCK_SIZE, MAX_TOKENS, NUM_PROMPTS, NUM_ALONE = 4, 24, 8, 4

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"seed": 1, "temperature": 0.4, "top_k": 4},
    "choices": {"seed": 2, "temperature": 0.3, "n": 3, "top_p": 0.9},
    "logprobs": {"seed": 3, "temperature": 0.3, "logprobs": 2, "top_k": 3},
    "penalties": {
        "seed": 6,
        "temperature": 0.4,
        "presence_penalty": -0.6,
        "frequency_penalty": -0.2,
        "repetition_penalty": 0.9,
        "logit_bias": {5: 1.0},
    },
    "stop": {"seed": 7, "temperature": 0.4, "top_k": 3, "stop": tuple(string.ascii_letters[:20]), "min_tokens": 8},
    "bad words": {
        "seed": 4,
        "temperature": 0.4,
        "top_k": 3,
        "bad_word_ids": (*((i,) for i in range(3, 60)), (150, 151)),
    },
    "end": {"seed": 5, "temperature": 0.4, "top_k": 4, "min_tokens": 16, "logit_bias": {EOS: 4.0}},
}
"""What requests ask for, beside what all of them do."""

SHAPES: dict[str, dict[str, Any]] = {
    "batch of 1": {"max_num_seqs": 1},
    "batch of 16": {"max_num_seqs": 16},
    "chunked prefill": {"max_num_seqs": 4, "max_num_batched_tokens": 20},
    "preemption": {"max_num_seqs": 16, "num_gpu_blocks_override": 40, "max_model_len": 72},
    "prefix hits": {"max_num_seqs": 16},
}
"""How the engine is made."""

Said = list[tuple[tuple[int, ...], str, str, str | int | None]]


def prompts() -> list[list[int]]:
    """Tokens that repeat, with something else in between."""
    random = np.random.default_rng(0)
    made = []
    for _ in range(NUM_PROMPTS):
        part = random.integers(3, 250, int(random.integers(4, 9))).tolist()
        made.append(part * 3 + random.integers(3, 250, 3).tolist() + part[:3])
    return made


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


class SpeculationLaws:
    """Law 2 for a speculator.

    speculator: the fixture to override; options of `Engine` that bring it, from the directory of the tiny target.
    num_drafts: the fixed length that the cells ask for, so that what they exercise does not depend on the clock.
    """

    num_drafts = 4

    @pytest.fixture(scope="class")
    @classmethod
    def speculator(cls, target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        raise NotImplementedError("override speculator in the subclass")

    @pytest.fixture(scope="class")
    @classmethod
    def target(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A tiny model whose answers repeat now and then."""
        return save_tiny_model("llama", tmp_path_factory.mktemp("target"), initializer_range=0.1)

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, target: Path, speculator: dict[str, Any]) -> Iterator[Callable[[str, int], Engine]]:
        """`engine(shape, depth)`, made once. The shape "plain" has no speculator."""
        made: dict[tuple[str, int], Engine] = {}

        def make(shape: str, depth: int) -> Engine:
            if (shape, depth) not in made:
                options: dict[str, Any] = {"max_num_seqs": 16} if shape == "plain" else {**SHAPES[shape], **speculator}
                if shape == "prefix hits":
                    options["prefix_index"] = DictPrefixIndex(BLOCK_SIZE)
                common = {"block_size": BLOCK_SIZE, "dtype": "float32", "num_threads": 1, "overlap_depth": depth}
                made[shape, depth] = Engine(str(target), **{**common, **options})
            return made[shape, depth]

        yield make
        for one in made.values():
            one.close()

    @pytest.fixture(scope="class")
    @classmethod
    def plain(cls, engine: Callable[[str, int], Engine]) -> Callable[[str], list[RequestOutput]]:
        """What each kind of request answers without a speculator."""
        known: dict[str, list[RequestOutput]] = {}

        def answers(kind: str) -> list[RequestOutput]:
            if kind not in known:
                known[kind] = engine("plain", 0).generate(
                    prompts(), SamplingParams(max_tokens=MAX_TOKENS, **KINDS[kind])
                )
            return known[kind]

        return answers

    @pytest.mark.parametrize("depth", [0, 1])
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_drafts_change_nothing(
        self,
        kind: str,
        shape: str,
        depth: int,
        engine: Callable[[str, int], Engine],
        plain: Callable[[str], list[RequestOutput]],
    ) -> None:
        """Law 2: drafts of a fixed length, some right and some wrong."""
        mine, expected = engine(shape, depth), plain(kind)
        params = SamplingParams(max_tokens=MAX_TOKENS, speculation=self.num_drafts, **KINDS[kind])
        before = mine.stats()
        asked = prompts()[: NUM_ALONE if shape == "batch of 1" else NUM_PROMPTS]
        found = mine.generate(asked, params)
        after = mine.stats()
        for one, other in zip(found, expected, strict=False):
            assert_same(one, other)
        accepted = after.num_accepted - before.num_accepted
        assert accepted > 0, "no draft was accepted"
        assert after.num_drafted - before.num_drafted > accepted, "no draft was rejected"
        assert sum(after.accepted_by_position) == after.num_accepted
        if shape == "preemption":
            assert after.num_preemptions > before.num_preemptions
        if shape == "prefix hits":
            assert after.prefix_hits > before.prefix_hits or kind == next(iter(KINDS))
        assert after.num_blocks_in_use == 0
        mine.core.pool.check()

    @pytest.mark.parametrize("depth", [0, 1])
    @pytest.mark.parametrize("kind", ["greedy", "sampled"])
    def test_neither_do_lengths_that_vary(
        self,
        kind: str,
        depth: int,
        engine: Callable[[str, int], Engine],
        plain: Callable[[str], list[RequestOutput]],
    ) -> None:
        """Law 2: automatic, off and several lengths in one batch."""
        words: list[str | int] = ["auto", "off", 1, "auto", 0, 3, "auto", 2]
        params = [SamplingParams(max_tokens=MAX_TOKENS, speculation=word, **KINDS[kind]) for word in words]
        found = engine("batch of 16", depth).generate(prompts(), params)
        for one, other in zip(found, plain(kind), strict=True):
            assert_same(one, other)
