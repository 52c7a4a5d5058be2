"""Law 2 as a matrix, with toys: one that always proposes the same token, and one that reads hidden states."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginectl import Engine, RequestOutput
from enginectl.testing.speculation_laws import FEATURES, MODES, SHAPES, SpeculationLaws, is_covering
from enginectl.testing.toys import ConstantSpeculator, HiddenSpeculator


class TestConstant(SpeculationLaws):
    @pytest.fixture(scope="class")
    @classmethod
    def speculator(cls) -> Callable[[], dict[str, Any]]:
        return lambda: {"speculator": ConstantSpeculator(max_drafts=4)}

    def prepare(self, engine: Engine, expected: list[RequestOutput]) -> None:
        """The token that is right most often where drafts are made: not for the first token, nor for the last ones."""
        tokens = Counter(token for output in expected for choice in output.outputs for token in choice.token_ids[1:-2])
        engine._assembled.parts["speculator"].token = tokens.most_common(1)[0][0]


class TestHidden(SpeculationLaws):
    @pytest.fixture(scope="class")
    @classmethod
    def speculator(cls, target: Path) -> Callable[[], dict[str, Any]]:
        from safetensors.torch import load_file

        head = load_file(str(target / "model.safetensors"))["lm_head.weight"]
        return lambda: {"speculator": HiddenSpeculator(head, max_drafts=4)}


def test_every_two_values_meet_in_what_runs_always() -> None:
    axes: list[list[Any]] = [[*FEATURES], [*MODES], [*SHAPES], [0, 1]]
    chosen = [cell for cell in itertools.product(*axes) if is_covering(*cell)]
    assert len(chosen) == len(FEATURES) * len(SHAPES)
    for one, other in itertools.combinations(range(4), 2):
        assert {(cell[one], cell[other]) for cell in chosen} == {*itertools.product(axes[one], axes[other])}
