"""The sampler kit passes what is right and fails each mutant in the test named for it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from enginectl.interfaces.sampler import Sampler
from enginectl.testing.sampler import FILTERS, MakeSampler, SamplerConformance, chi_square_limit
from enginectl.testing.sampler_reference import NoiseByRow, ReferenceSampler, TiesToHighest, TopPOneShort
from enginectl.testing.tolerances import TOLERANCES

KIT = SamplerConformance()
Check = Callable[[MakeSampler], None]


class TestReference(SamplerConformance):
    num_draws = 1500

    @pytest.fixture
    def make_sampler(self) -> MakeSampler:
        return ReferenceSampler


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (NoiseByRow, KIT.test_a_row_does_not_depend_on_the_batch),
        (TopPOneShort, lambda make: KIT.test_top_p_keeps_the_nucleus(make, 0.8)),
        (TiesToHighest, KIT.test_greedy_ties_go_to_the_lowest_id),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mutant_fails_the_test_named_for_it(mutant: type[Sampler], check: Check) -> None:
    with pytest.raises(AssertionError):
        check(mutant)


@pytest.mark.parametrize("mutant", [NoiseByRow, TopPOneShort, TiesToHighest])
def test_a_mutant_passes_what_it_does_right(mutant: type[Sampler]) -> None:
    KIT.test_greedy_is_the_argmax(mutant)
    KIT.test_tokens_come_as_often_as_the_distribution_says(mutant, FILTERS[0])


@pytest.mark.parametrize("degrees", [2, 10, 40, 200])
def test_the_chi_square_limit_is_passed_by_about_one_in_thirty_thousand(degrees: int) -> None:
    """For even degrees of freedom the tail is a Poisson sum."""
    half = chi_square_limit(degrees) / 2
    tail = math.exp(-half) * sum(half**i / math.factorial(i) for i in range(degrees // 2))
    assert 1e-5 < tail < 5e-5


def test_the_table_has_every_dtype_the_engine_computes_in() -> None:
    assert set(TOLERANCES) == {"float32", "bfloat16", "float16"}
