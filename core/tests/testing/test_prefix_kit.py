"""The prefix-index kit passes what is right and fails each mutant in the test named for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from enginectl.errors import PoolError
from enginectl.testing.dict_index import DictPrefixIndex
from enginectl.testing.prefix_index import PrefixIndexConformance
from enginectl.testing.prefix_loop import MakeIndex, cached_loop
from enginectl.testing.prefix_mutants import (
    EvictsHeadsFirst,
    EvictsInUse,
    NoParent,
    NoSalt,
    NoTags,
    PublishesAcrossReloads,
    PublishesEarly,
)

KIT = PrefixIndexConformance()


def maker(index: type[DictPrefixIndex]) -> MakeIndex:
    return lambda num_blocks, block_size: index(block_size)


class TestReference(PrefixIndexConformance):
    @pytest.fixture
    def make_index(self) -> MakeIndex:
        return maker(DictPrefixIndex)


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (NoParent, KIT.test_equal_tokens_after_different_prefixes_share_nothing),
        (NoSalt, KIT.test_two_salts_share_nothing),
        (NoTags, KIT.test_a_salt_named_like_an_adapter_shares_nothing),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mutant_index_fails_the_test_named_for_it(
    mutant: type[DictPrefixIndex], check: Callable[[MakeIndex], None]
) -> None:
    with pytest.raises(AssertionError):
        check(maker(mutant))


@pytest.mark.parametrize("mutant", [NoParent, NoSalt])
def test_a_mutant_index_fails_in_the_loop_too(mutant: type[DictPrefixIndex]) -> None:
    with pytest.raises(AssertionError, match="prefix that it does not hold"):
        KIT.test_tokens_do_not_depend_on_the_cache(functools.partial(cached_loop, maker(mutant)), 0, 0)


@pytest.mark.parametrize(
    ("part", "check"),
    [
        ({"core_type": PublishesEarly}, KIT.test_only_verified_blocks_are_published),
        (
            {"core_type": PublishesAcrossReloads},
            lambda make: KIT.test_a_reload_under_running_rows_publishes_nothing_of_theirs(make, 0),
        ),
        ({"pool_type": EvictsInUse}, KIT.test_a_block_in_use_is_never_evicted),
        ({"pool_type": EvictsHeadsFirst}, KIT.test_tails_go_before_heads),
    ],
    ids=["PublishesEarly", "PublishesAcrossReloads", "EvictsInUse", "EvictsHeadsFirst"],
)
def test_a_mutant_loop_fails_the_test_named_for_it(part: dict[str, Any], check: Callable[..., None]) -> None:
    with pytest.raises((AssertionError, PoolError)):
        check(functools.partial(cached_loop, maker(DictPrefixIndex), **part))
