"""The speculator kit passes what is right and fails each mutant in the test named for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from enginectl.interfaces.speculator import Speculator
from enginectl.testing.speculator import MakeSpeculator, SpeculatorConformance
from enginectl.testing.speculator_reference import (
    DrawsLots,
    IgnoresLimits,
    RemembersRows,
    SearchSpeculator,
    WritesHistory,
)

KIT = SpeculatorConformance()


class TestSearch(SpeculatorConformance):
    @pytest.fixture
    def make_speculator(self) -> MakeSpeculator:
        return SearchSpeculator


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (IgnoresLimits, KIT.test_limits_are_honoured),
        (RemembersRows, KIT.test_a_row_that_is_taken_again_starts_afresh),
        (WritesHistory, KIT.test_verified_tokens_are_left_alone),
        (DrawsLots, KIT.test_proposals_are_a_function_of_the_rows),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mutant_fails_the_test_named_for_it(
    mutant: type[Speculator], check: Callable[[MakeSpeculator], None]
) -> None:
    with pytest.raises(AssertionError):
        check(mutant)


@pytest.mark.parametrize("mutant", [IgnoresLimits, RemembersRows, WritesHistory, DrawsLots])
def test_a_mutant_passes_what_it_does_right(mutant: type[Speculator]) -> None:
    KIT.test_drafts_are_tokens(mutant)
    if mutant is not IgnoresLimits:
        KIT.test_nobody_wants_any(mutant)
