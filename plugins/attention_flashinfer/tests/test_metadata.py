"""The CSR builder against pure Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from enginectl_attention_flashinfer.metadata import make_pages


@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 9)), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 2, 4, 16, 64]),
    window=st.sampled_from([None, 1, 7, 16, 200]),
    seed=st.integers(0, 100),
)
def test_pages_are_those_that_queries_see(
    lengths: list[tuple[int, int]], block_size: int, window: int | None, seed: int
) -> None:
    """Row by row and position by position; null blocks behind the window are never listed."""
    lens = np.array([max(length, count) for length, count in lengths], np.int32)
    counts = np.array([count for _, count in lengths], np.int32)
    width = -(-int(lens.max()) // block_size) + 1
    table = np.random.default_rng(seed).integers(1, 1000, (len(lens), width)).astype(np.int32)
    indices: list[int] = []
    indptr = [0]
    for row, (length, count) in enumerate(zip(lens.tolist(), counts.tolist(), strict=True)):
        lowest = 0 if window is None else max(0, length - count - window + 1)
        table[row, : lowest // block_size] = 0
        seen = dict.fromkeys(position // block_size for position in range(lowest, length))
        indices += [int(table[row, page]) for page in seen]
        indptr.append(len(indices))
    pages = make_pages(torch.from_numpy(table), lens, counts, block_size=block_size, window=window)
    assert pages.indptr.tolist() == indptr
    assert pages.indices.tolist() == indices
    assert 0 not in pages.indices.tolist()
    assert pages.last_page_len.tolist() == [(length - 1) % block_size + 1 for length in lens.tolist()]
    assert {x.dtype for x in (pages.indptr, pages.indices, pages.last_page_len)} == {torch.int32}


def test_tables_may_be_strided() -> None:
    """A slice of rows and columns of a wider table."""
    wide = torch.arange(60, dtype=torch.int32).view(6, 10)
    lens, counts = np.array([5, 9], np.int32), np.array([1, 1], np.int32)
    pages = make_pages(wide[1::3, 2:6], lens, counts, block_size=4, window=None)
    assert pages.indices.tolist() == [12, 13, 42, 43, 44]


@pytest.mark.parametrize("length", [17, 31, 32])
def test_last_page_len_is_never_zero(length: int) -> None:
    """A full last page has page_size tokens."""
    lens = np.array([length], np.int32)
    pages = make_pages(torch.ones(1, 4, dtype=torch.int32), lens, np.ones(1, np.int32), block_size=16, window=None)
    assert pages.last_page_len.tolist() == [length - 16]
    assert pages.indptr.tolist() == [0, 2]
