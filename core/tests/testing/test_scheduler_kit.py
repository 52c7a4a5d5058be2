"""The scheduler kit passes its reference and fails each mutant in the test named for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from enginectl.testing.scheduler import MakeScheduler, ReferenceScheduler, SchedulerConformance
from enginectl.testing.scheduler_mutants import ForgetsWhoRan, GrantsTooMuch, PassesTheBig, SkipsAfterRemoval

KIT = SchedulerConformance()
Check = Callable[[MakeScheduler], None]


class TestReference(SchedulerConformance):
    @pytest.fixture
    def make_scheduler(self) -> MakeScheduler:
        return ReferenceScheduler


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (ForgetsWhoRan, KIT.test_preempted_requests_come_before_those_that_never_ran),
        (PassesTheBig, lambda make: KIT.test_small_requests_do_not_starve_a_big_one(make, 0)),
        (PassesTheBig, lambda make: KIT.test_small_requests_do_not_starve_a_big_one(make, 1)),
        (GrantsTooMuch, lambda make: KIT.test_grants_keep_to_the_budget(make, 7, 16)),
        (SkipsAfterRemoval, KIT.test_the_candidate_that_was_yielded_may_be_removed),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mutant_fails_the_test_named_for_it(mutant: MakeScheduler, check: Check) -> None:
    with pytest.raises((AssertionError, KeyError)):
        check(mutant)


@pytest.mark.parametrize("mutant", [ForgetsWhoRan, PassesTheBig, GrantsTooMuch, SkipsAfterRemoval])
def test_a_mutant_passes_what_it_does_right(mutant: MakeScheduler) -> None:
    KIT.test_every_waiting_request_is_a_candidate_once(mutant)
    KIT.test_victims_name_every_row_once(mutant)
