"""One step on the host: which queries form a tile, and how many splits it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from enginectl.interfaces.attention import AttentionBatch
from enginectl.transfer import to_device
from enginectl_attention_triton.config import NARROW_QUERIES, Shape, Tile, narrow_tile, num_splits, wide_tile


@dataclass(frozen=True, slots=True)
class Device:
    """What configurations depend on. capability: 80, 90 …; num_sms: multiprocessors."""

    name: str
    capability: int
    num_sms: int


@dataclass(slots=True)
class Part:
    """One launch a layer: tiles with the same configuration.

    queries: most of one tile. tiles: [num_tiles, 2] int32 (row, first query of the row), or None where tile i is row i's only query.
    partial, partial_lse: scratch of the splits, shared by all layers; empty for one split.
    """

    tile: Tile
    queries: int
    num_tiles: int
    tiles: Tensor | None
    num_splits: int
    partial: Tensor
    partial_lse: Tensor


@dataclass(slots=True)
class TritonPlan:
    """One step: its arrays on the device, and the launches of each shape."""

    num_tokens: int
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    parts: list[list[Part]] = field(default_factory=list)


def make_plan(batch: AttentionBatch, shapes: Sequence[Shape], *, itemsize: int, device: Device) -> TritonPlan:
    """Rows with few queries go into one part, whose keys may be split; rows with many into another."""
    plan = TritonPlan(batch.num_tokens, batch.query_start, batch.seq_lens, batch.block_tables, batch.slot_mapping)
    counts = np.diff(batch.query_start_host[: batch.num_seqs + 1])
    few = np.nonzero(counts <= NARROW_QUERIES)[0]
    many = np.nonzero(counts > NARROW_QUERIES)[0]
    for shape in shapes:
        parts = []
        if few.size:
            parts.append(_narrow_part(shape, few, counts[few], batch.max_seq_len, itemsize=itemsize, device=device))
        if many.size:
            tile = wide_tile(shape, itemsize=itemsize, capability=device.capability)
            queries = tile.rows // shape.heads_per_kv
            parts.append(_part(shape, tile, queries, tile_table(many, counts[many], queries), 1, device))
        plan.parts.append(parts)
    return plan


def _narrow_part(
    shape: Shape, rows: NDArray[np.intp], counts: NDArray[np.int32], max_seq_len: int, *, itemsize: int, device: Device
) -> Part:
    most = int(counts.max())
    tile = narrow_tile(shape, most, itemsize=itemsize)
    if is_decode(rows, most):
        queries, table, num_tiles = 1, None, rows.size
    else:
        queries = tile.rows // shape.heads_per_kv
        table = tile_table(rows, counts, queries)
        num_tiles = len(table)
    splits = num_splits(shape, num_tiles, max_seq_len, num_queries=queries, num_sms=device.num_sms)
    return _part(shape, tile, queries, table, splits, device, num_tiles)


def is_decode(rows: NDArray[np.intp], most_queries: int) -> bool:
    """Single queries, in the first rows: tile i is token i of row i, and no table is needed."""
    return most_queries == 1 and int(rows[-1]) == rows.size - 1


def tile_table(rows: NDArray[np.intp], counts: NDArray[np.int32], queries: int) -> NDArray[np.int32]:
    """[num_tiles, 2] (row, first query): each row cut into tiles of `queries`, those that see most keys first."""
    cuts = -(-counts // queries)
    row = np.repeat(rows, cuts)
    first = (np.arange(row.size) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * queries
    # Late tiles of a prompt read the most keys: started first, they do not trail behind the others.
    return np.stack([row, first], axis=1)[np.argsort(-first, kind="stable")].astype(np.int32)


def _part(
    shape: Shape,
    tile: Tile,
    queries: int,
    table: NDArray[np.int32] | None,
    splits: int,
    device: Device,
    num_tiles: int | None = None,
) -> Part:
    if num_tiles is None:
        assert table is not None, "tiles are counted or listed"
        num_tiles = len(table)
    heads = shape.num_kv_heads * shape.heads_per_kv
    rows = num_tiles * queries * heads * splits if splits > 1 else 0
    return Part(
        tile,
        queries,
        num_tiles,
        None if table is None else to_device(table, device.name),
        splits,
        torch.empty(rows * shape.v_head_dim, dtype=torch.float32, device=device.name),
        torch.empty(rows, dtype=torch.float32, device=device.name),
    )
