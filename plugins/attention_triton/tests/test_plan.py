"""The host side: tiles, splits and configurations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from enginectl.interfaces.attention import AttentionBatch
from enginectl.testing.paging import Pages
from enginectl_attention_triton.config import (
    MAX_SPLITS,
    MIN_SPLIT_KEYS,
    Shape,
    fits_a_tile,
    narrow_tile,
    num_splits,
    padded_dim,
    wide_tile,
)
from enginectl_attention_triton.plan import Device, TritonPlan, make_plan, tile_table

DEVICE = Device("cpu", 90, 132)
LLAMA = Shape(0, 8, 4, 128, 128, 0, 0)


def plan_for(work: list[tuple[int, int]], shape: Shape = LLAMA) -> tuple[AttentionBatch, TritonPlan]:
    pages = Pages(block_size=16, num_blocks=4000)
    batch = pages.advance(work)
    return batch, make_plan(batch, [shape], itemsize=2, device=DEVICE)


def covered(batch: AttentionBatch, plan: TritonPlan) -> list[tuple[int, int]]:
    """Every (row, query) that some tile computes."""
    found = []
    for part in plan.parts[0]:
        tiles = [[i, 0] for i in range(part.num_tiles)] if part.tiles is None else part.tiles.tolist()
        for row, first in tiles:
            count = int(batch.query_start_host[row + 1] - batch.query_start_host[row])
            found += [(row, query) for query in range(first, min(first + part.queries, count))]
    return found


@pytest.mark.parametrize(
    "work",
    [
        [(0, 1), (1, 1)],
        [(0, 1), (1, 5), (2, 16)],
        [(0, 1), (1, 17), (2, 300)],
        [(0, 200), (1, 3), (2, 33)],
        [(0, 4)],
    ],
)
@pytest.mark.parametrize("shape", [LLAMA, Shape(0, 4, 7, 64, 64, 0, 0), Shape(0, 1, 71, 64, 64, 0, 0)])
def test_every_query_is_in_exactly_one_tile(work: list[tuple[int, int]], shape: Shape) -> None:
    """Decodes, drafts and chunks in any mixture."""
    batch, plan = plan_for(work, shape)
    wanted = [(row, query) for row, (_, count) in enumerate(work) for query in range(count)]
    assert sorted(covered(batch, plan)) == wanted
    assert all(part.queries * shape.heads_per_kv <= part.tile.rows for part in plan.parts[0])


def test_pure_decode_needs_no_table() -> None:
    """Tile i is row i."""
    _, plan = plan_for([(i, 1) for i in range(5)])
    (part,) = plan.parts[0]
    assert part.tiles is None
    assert part.num_tiles == 5


def test_late_tiles_of_a_prompt_come_first() -> None:
    """They read the most keys."""
    table = tile_table(np.array([0, 2]), np.array([5, 9], np.int32), 4)
    assert table.tolist() == [[2, 8], [0, 4], [2, 4], [0, 0], [2, 0]]


def test_splits_fill_the_device_and_no_more() -> None:
    """Few rows with long contexts are split; many rows, short contexts and narrow windows are not."""

    def splits(num_rows: int, length: int, shape: Shape = LLAMA) -> int:
        return num_splits(shape, num_rows, length, num_queries=1, num_sms=132)

    assert splits(1, 32_768) == 32
    assert splits(1, 1 << 20, Shape(0, 1, 4, 128, 128, 0, 0)) == MAX_SPLITS
    assert splits(256, 32_768) == 1
    assert splits(1, MIN_SPLIT_KEYS) == 1
    assert splits(1, 32_768, Shape(0, 8, 4, 128, 128, 256, 0)) == 2
    assert all(splits(n, 5000).bit_count() == 1 for n in range(1, 300))


def test_scratch_holds_every_split_of_every_query() -> None:
    """partial has a row for each (query, head, split)."""
    batch, plan = plan_for([(0, 1), (1, 4)])
    batch.max_seq_len = 8192
    plan = make_plan(batch, [LLAMA], itemsize=2, device=DEVICE)
    (part,) = plan.parts[0]
    assert part.num_splits > 1
    assert part.partial_lse.numel() == part.num_tiles * part.queries * 32 * part.num_splits
    assert part.partial.numel() == part.partial_lse.numel() * 128
    assert part.partial.dtype == torch.float32


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 16, 71])
def test_there_is_a_configuration_for_every_shape(itemsize: int, head_dim: int, group: int) -> None:
    """Tiles hold at least one query of a whole group, in powers of two that tensor cores take."""
    shape = Shape(0, 2, group, head_dim, head_dim, 0, 0)
    fits = fits_a_tile(shape, itemsize=itemsize)
    assert fits == (group < 71 or head_dim <= (128 if itemsize == 2 else 32))
    if not fits:
        return
    for capability in (80, 86, 89, 90, 100, 103, 120):
        wide = wide_tile(shape, itemsize=itemsize, capability=capability)
        for tile in (wide, *(narrow_tile(shape, n, itemsize=itemsize) for n in (1, 5, 16))):
            assert tile.rows >= max(16, group)
            assert all(n.bit_count() == 1 for n in (tile.rows, tile.keys, tile.num_warps))
            assert tile.keys >= 16
            query_bytes = tile.rows * padded_dim(head_dim) * itemsize
            assert query_bytes <= (64 << 10 if capability in (100, 103) else 32 << 10), "no room for keys and values"
