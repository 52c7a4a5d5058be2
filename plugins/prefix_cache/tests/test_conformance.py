"""The index keeps the contract, whatever its hash."""

from __future__ import annotations

import pytest

from enginectl.interfaces.kv import PrefixIndex
from enginectl.testing.prefix_index import PrefixIndexConformance
from enginectl.testing.prefix_loop import MakeIndex
from enginectl_prefix_cache.hashing import ALGORITHMS, make_hasher
from enginectl_prefix_cache.index import HashPrefixIndex


class TestHashPrefixIndex(PrefixIndexConformance):
    @pytest.fixture(params=ALGORITHMS)
    def make_index(self, request: pytest.FixtureRequest) -> MakeIndex:
        def make(num_blocks: int, block_size: int) -> PrefixIndex:
            return HashPrefixIndex(num_blocks, block_size, make_hasher(request.param))

        return make
