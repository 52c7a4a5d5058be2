"""Law 11: what cannot be honoured is refused before the step, with the name of the parameter."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import pytest

from enginectl.builtin.sampling import masks
from enginectl.builtin.sampling.penalties import Penalties
from enginectl.builtin.sampling.sampler import TorchSampler
from enginectl.builtin.sampling.validation import validate_params
from enginectl.errors import RequestError
from enginectl.types import SamplingParams, StructuredOutputs

VOCAB = 100

WRONG: list[tuple[str, Any, str]] = [
    ("n", 0, "at least 1"),
    ("max_tokens", 0, "at least 1"),
    ("min_tokens", -1, "at least 0"),
    ("temperature", -0.1, "at least 0"),
    ("temperature", math.nan, "finite"),
    ("temperature", math.inf, "finite"),
    ("temperature", "hot", "number"),
    ("top_k", -2, "at least -1"),
    ("top_k", 1.5, "whole number"),
    ("top_p", 1.01, "between 0 and 1"),
    ("top_p", -0.01, "between 0 and 1"),
    ("min_p", 2.0, "between 0 and 1"),
    ("presence_penalty", 2.1, "between -2 and 2"),
    ("frequency_penalty", math.nan, "between -2 and 2"),
    ("repetition_penalty", 0.0, "above 0"),
    ("logit_bias", {VOCAB: 1.0}, "0 to 99"),
    ("logit_bias", {-1: 1.0}, "0 to 99"),
    ("logit_bias", {1: math.inf}, "between -100 and 100"),
    ("allowed_token_ids", (), "at least one"),
    ("allowed_token_ids", (1, VOCAB), "0 to 99"),
    ("stop_token_ids", (VOCAB,), "0 to 99"),
    ("bad_words", ("",), "one character"),
    ("bad_words", ("word",), "bad_word_ids"),
    ("seed", 2**64, "between"),
    ("seed", -(2**63) - 1, "between"),
    ("stop", ("ok", ""), "one character"),
    ("stop", "", "one character"),
    ("stop", 8, "a string, or several"),
    ("stop", ("ok", 8), "one character"),
    ("bad_words", 8, "a string, or several"),
    ("bad_word_ids", 8, "sequences of token ids"),
    ("stop_token_ids", "8", "token ids in a tuple or list"),
    ("allowed_token_ids", "8", "token ids in a tuple or list"),
    ("logit_bias", 8, "a dict"),
    ("speculation", "maybe", '"auto", "off"'),
    ("speculation", -1, "at least 0"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(RequestError, match=re.escape(allowed)) as caught:
        validate_params(SamplingParams(**{name: value}), VOCAB)
    assert caught.value.param == name
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(min_tokens=5, max_tokens=4), "min_tokens"),
        (SamplingParams(min_tokens=1, allowed_token_ids=(3,), stop_token_ids=(3, 4)), "min_tokens"),
        (SamplingParams(allowed_token_ids=(3, 4), bad_word_ids=((3,), (4,))), "allowed_token_ids"),
        (SamplingParams(bad_words=("a",), bad_word_ids=((),)), "bad_words"),
        (SamplingParams(bad_word_ids=(5,)), "bad_words"),  # type: ignore[arg-type]
        (SamplingParams(bad_words=("a",), bad_word_ids=((1, VOCAB),)), "bad_words"),
    ],
)
def test_contradictions_are_refused(params: SamplingParams, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        validate_params(params, VOCAB)
    assert caught.value.param == name


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0, top_k=-1, top_p=0.0, min_p=1.0, seed=-5, n=128, max_tokens=1, min_tokens=1),
        SamplingParams(logit_bias={0: -100, 99: 100.0}, allowed_token_ids=(0, 99), stop_token_ids=(99,)),
        SamplingParams(bad_words=("a",), bad_word_ids=((5,), (6, 5)), allowed_token_ids=(5, 6), speculation=4),
        SamplingParams(repetition_penalty=0.01, presence_penalty=-2, frequency_penalty=2, seed=2**64 - 1),
    ],
)
def test_what_is_within_bounds_is_taken(params: SamplingParams) -> None:
    validate_params(params, VOCAB)


@pytest.mark.parametrize(
    ("part", "params"),
    [
        (TorchSampler(1), SamplingParams(top_p=3.0)),
        (Penalties(1), SamplingParams(presence_penalty=3.0)),
        (masks.LogitBias(1), SamplingParams(logit_bias={VOCAB: 1.0})),
        (masks.BadWords(1), SamplingParams(bad_words=("a",))),
        (masks.AllowedTokens(1), SamplingParams(allowed_token_ids=())),
        (masks.MinTokens(1, (2,)), SamplingParams(min_tokens=1, allowed_token_ids=(2,))),
    ],
)
def test_each_part_refuses_what_it_cannot_honour(part: Any, params: SamplingParams) -> None:
    part.validate(SamplingParams(), VOCAB)
    with pytest.raises(RequestError):
        part.validate(params, VOCAB)


@pytest.mark.parametrize(
    ("field", "given", "read"),
    [
        ("stop", "end", ("end",)),
        ("stop", ["a", "end"], ("a", "end")),
        ("stop", None, ()),
        ("bad_words", "word", ("word",)),
        ("bad_words", None, ()),
        ("bad_word_ids", None, ()),
        ("bad_word_ids", [[1, 2]], ([1, 2],)),
        ("stop_token_ids", 5, (5,)),
        ("stop_token_ids", [5, 6], (5, 6)),
        ("stop_token_ids", None, ()),
        ("allowed_token_ids", 0, (0,)),
        ("allowed_token_ids", {7}, (7,)),
        ("allowed_token_ids", None, None),
    ],
)
def test_one_value_a_list_or_none_is_read_as_a_tuple(field: str, given: Any, read: Any) -> None:
    params = SamplingParams(**{field: given})
    assert getattr(params, field) == read
    assert getattr(msgspec.structs.replace(SamplingParams(), **{field: given}), field) == read
    if field != "bad_words" or given is None:  # words are encoded first
        validate_params(params, VOCAB)


def test_one_choice_is_not_its_characters() -> None:
    assert StructuredOutputs(choice="yes").choice == ("yes",)  # type: ignore[arg-type]
    assert StructuredOutputs(choice=["yes", "no"]).choice == ("yes", "no")  # type: ignore[arg-type]
    assert StructuredOutputs(regex="a").choice is None
