"""The allocator kit passes its reference and fails each mutant in the test named for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from enginectl.testing.allocator import AllocatorConformance, MakeAllocator, ReferenceAllocator
from enginectl.testing.allocator_mutants import FreesTwice, IdleFirst, LosesSome, NewestFirst

KIT = AllocatorConformance()
Check = Callable[[MakeAllocator], None]


class TestReference(AllocatorConformance):
    @pytest.fixture
    def make_allocator(self) -> MakeAllocator:
        return ReferenceAllocator


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (NewestFirst, KIT.test_idle_blocks_are_evicted_in_the_order_given),
        (IdleFirst, KIT.test_free_blocks_go_before_idle_ones),
        (
            FreesTwice,
            lambda make: KIT.test_a_block_in_the_wrong_state_raises_and_changes_nothing(make, "put_free", "free"),
        ),
        (LosesSome, lambda make: KIT.test_no_block_is_lost_or_doubled(make, 0)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mutant_fails_the_test_named_for_it(mutant: MakeAllocator, check: Check) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(mutant)


@pytest.mark.parametrize("mutant", [NewestFirst, IdleFirst, FreesTwice, LosesSome])
def test_a_mutant_passes_what_it_does_right(mutant: MakeAllocator) -> None:
    KIT.test_every_block_is_handed_out_once(mutant)
