"""Greedy output of every architecture that transformers supplies equals `generate`, under strain."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from enginectl.errors import ModelError
from enginectl.testing.architecture_check import reference, serve, traits_of
from enginectl.testing.architectures import (
    ARCHITECTURES,
    FAST,
    ONE_BY_ONE,
    REFUSALS,
    STATES,
)
from enginectl.testing.attention_mutants import lost_block, window_off_by_one, zeroed
from enginectl.testing.route_mutants import mixed_pages, mixed_states, stale_states
from enginectl.testing.tiny_models import save_refusal, save_tiny_model

Tokens = list[list[int]]


def marked(names: Iterable[str], fast: Sequence[str] = FAST) -> list[Any]:
    """Parameters: `make test` runs a few of them, `make test-slow` the others."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


NAMES = marked(ARCHITECTURES)
NATIVE = marked(name for name, each in ARCHITECTURES.items() if each.native)
OURS = marked(
    (name for name, each in ARCHITECTURES.items() if each.route != ONE_BY_ONE and "no attention" not in each.traits),
    fast=("llama", "mistral", "gemma2"),
)
"""Those whose attention is a backend's, which can be broken."""
WITH_STATE = marked((name for name, each in ARCHITECTURES.items() if each.route == STATES), fast=("mamba2", "jamba"))
BY_THEMSELVES = marked((name for name, each in ARCHITECTURES.items() if each.route == ONE_BY_ONE), fast=("bloom",))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`saved(name)` is the directory of the architecture's model, made once."""
    return functools.cache(
        lambda name: save_tiny_model(name, tmp_path_factory.mktemp("architectures") / name, tokenizer=False)
    )


@pytest.fixture(scope="module")
def expected(saved: Callable[[str], Path]) -> Callable[[str], Tokens]:
    """`expected(name)`: what the library's `generate` says."""
    return functools.cache(lambda name: reference(saved(name)))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_generate(
    name: str, depth: int, saved: Callable[[str], Path], expected: Callable[[str], Tokens]
) -> None:
    """Law 1: mixed lengths in one batch, read in chunks, with preemptions, by the route that the table names."""
    architecture = ARCHITECTURES[name]
    served = serve(saved(name), depth=depth, whole_prompts=architecture.whole_prompts)
    assert served.tokens == expected(name)
    assert served.route == architecture.route
    assert traits_of(served.spec) == architecture.traits
    assert served.num_preemptions > 0
    assert (served.num_chunks > 0) is not architecture.whole_prompts


@pytest.mark.parametrize("name", NATIVE)
def test_native_equals_generate(name: str, saved: Callable[[str], Path], expected: Callable[[str], Tokens]) -> None:
    """Law 5: the native family gives the same tokens, under the same strain."""
    served = serve(saved(name), family="native")
    assert served.tokens == expected(name)
    assert traits_of(served.spec) == ARCHITECTURES[name].traits
    assert served.num_preemptions > 0
    assert served.num_chunks > 0


@pytest.mark.parametrize("name", OURS)
def test_broken_attention_fails(name: str, saved: Callable[[str], Path], expected: Callable[[str], Tokens]) -> None:
    """Law 1: the check can fail for every architecture: nothing attended, every second block lost, windows too wide."""
    traits = ARCHITECTURES[name].traits
    mutants = [zeroed, lost_block, *([window_off_by_one] if "window" in traits else [])]
    for mutant in mutants:
        served = serve(saved(name), whole_prompts=ARCHITECTURES[name].whole_prompts, mutant=mutant)
        assert wrong(served.tokens, expected(name)), f"{mutant.__name__} is not noticed"


@pytest.mark.parametrize("name", WITH_STATE)
def test_broken_states_fail(name: str, saved: Callable[[str], Path], expected: Callable[[str], Tokens]) -> None:
    """Law 1: the same for what is kept beside the pages: states of other rows, and of a row's holder before."""
    for spoil in (mixed_states, stale_states):
        served = serve(saved(name), whole_prompts=ARCHITECTURES[name].whole_prompts, spoil=spoil)
        assert served.num_preemptions > 0
        assert wrong(served.tokens, expected(name)), f"{spoil.__name__} is not noticed"


@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_mixed_pages_fail(name: str, saved: Callable[[str], Path], expected: Callable[[str], Tokens]) -> None:
    """Law 1: the same for models that read the pages themselves."""
    assert wrong(serve(saved(name), spoil=mixed_pages).tokens, expected(name))


def wrong(found: Tokens, expected: Sequence[list[int]]) -> bool:
    return any(mine != theirs for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_the_reason(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be exact does not load, and the error says why."""
    caplog.set_level(logging.ERROR)
    with pytest.raises(ModelError) as refused:
        serve(save_refusal(name, tmp_path / "model"))
    assert REFUSALS[name].reason in str(refused.value)
    assert REFUSALS[name].model_type in str(refused.value)


def test_fast_ones_are_architectures() -> None:
    assert set(FAST) <= ARCHITECTURES.keys()
    assert len(FAST) == 12
