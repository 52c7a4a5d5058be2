"""The paged allocator conforms."""

from __future__ import annotations

import pytest

from enginectl.builtin.allocator_paged import PagedAllocator
from enginectl.testing.allocator import AllocatorConformance, MakeAllocator


class TestPaged(AllocatorConformance):
    @pytest.fixture
    def make_allocator(self) -> MakeAllocator:
        return PagedAllocator


def test_a_block_put_back_is_used_next() -> None:
    """Its pages are the likeliest to be in a cache."""
    allocator = PagedAllocator(9)
    ids, _ = allocator.take(5)
    allocator.put_free(ids[[3, 1]])
    assert allocator.take(2)[0].tolist() == ids[[3, 1]].tolist()
