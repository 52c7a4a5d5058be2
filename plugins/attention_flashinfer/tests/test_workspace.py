"""Scratch for the largest plans, by the planner's own arithmetic."""

from __future__ import annotations

import pytest

from enginectl.testing.attention import layer_spec
from enginectl_attention_flashinfer.workspace import LEAST_BYTES, captured_bytes, eager_bytes

H200 = 132
"""Multiprocessors."""


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "tile"),
    [(32, 8, 128, 128), (64, 8, 128, 128), (128, 8, 128, 128), (14, 2, 64, 128), (16, 8, 256, 64)],
)
def test_eager_plans_leave_sums_for_two_pieces_a_multiprocessor(
    num_heads: int, num_kv_heads: int, head_dim: int, tile: int
) -> None:
    """Groups of 8 heads of 128 and more need more than FlashInfer recommends; a plan that finds less raises."""
    layer = layer_spec(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    pieces = 2 * H200 // num_kv_heads
    sums = num_heads * pieces * tile * 4
    assert sums * (head_dim + 1) <= eager_bytes(layer, H200) <= sums * (head_dim + 1) + 64
    assert (eager_bytes(layer, H200) > LEAST_BYTES) == (num_heads // num_kv_heads >= 8)


@pytest.mark.parametrize(
    ("num_rows", "num_queries", "tiles", "tile"),
    # The fourth: of 12 tokens 10 may be one row's, with 4 heads each.
    [(1, 1, 33, 16), (64, 1, 79, 16), (512, 1, 639, 16), (3, 4, 33, 64), (64, 5, 73, 128)],
)
def test_graphs_leave_sums_for_each_tile(num_rows: int, num_queries: int, tiles: int, tile: int) -> None:
    """Llama-3.1-8B's heads: 512 rows need 161 MiB; with what FlashInfer recommends they had no graph."""
    layer = layer_spec(num_heads=32, num_kv_heads=8, head_dim=128)
    found = captured_bytes(layer, H200, num_rows=num_rows, num_queries=num_queries)
    sums = 32 * tiles * tile * 4 * 129
    assert sums <= found <= sums + 64
