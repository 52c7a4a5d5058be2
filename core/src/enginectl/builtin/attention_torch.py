"""Attention over paged keys and values in plain torch, on any device.

A step's rows become *tiles*: rows with the same number of queries and a similar context are gathered into one padded
block and attended in one call, with the query heads of a KV head folded into the query rows. A row's padded length is a
function of that row alone, so that its result does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from enginectl.context import BuildContext
from enginectl.errors import ConfigError
from enginectl.interfaces.attention import AttentionBackend, AttentionBatch
from enginectl.interfaces.model import LayerSpec
from enginectl.transfer import to_device

MAX_PIECE = {"cpu": 256, "cuda": 1024}
"""Most queries of one row in a tile; a longer prompt is cut, which also skips keys its early queries cannot see."""

PADDED_QUERIES = 16
"""Rows with at most this many queries are padded to share a tile; longer ones dominate it and are taken exactly."""

MAX_TILE_SCORES = 1 << 21
"""Most query-key pairs of one tile, per head: bounds the memory of masks and of scores."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What layers must share to share tiles."""

    group: int
    window: int | None
    chunk: int | None
    heads_per_kv: int

    @staticmethod
    def of(layer: LayerSpec) -> Geometry:
        """The geometry of a layer."""
        return Geometry(layer.group, layer.window, layer.chunk, layer.num_heads // layer.num_kv_heads)


@dataclass(slots=True)
class Tile:
    """Rows attended together. tokens: which of the step's tokens, row after row. slots: [num_rows * length] where
    their context lies. mask: added to the scores, [num_rows, 1, num_queries * heads_per_kv or 1, length].
    """

    tokens: slice | Tensor
    num_rows: int
    num_queries: int
    length: int
    slots: Tensor
    mask: Tensor


@dataclass(slots=True)
class TorchPlan:
    """One step: where each group's tokens are written, and the tiles of each geometry."""

    num_tokens: int
    slot_mapping: Tensor
    tiles: list[list[Tile]]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Rows cut to at most MAX_PIECE queries: [num_pieces] int64 each. stop: keys its last query sees end here."""

    row: NDArray[np.int64]
    token: NDArray[np.int64]
    num_queries: NDArray[np.int64]
    stop: NDArray[np.int64]


class TorchAttention(AttentionBackend):
    """The backend that works everywhere: windows, chunks, soft caps and sinks, on a CPU or a GPU, in any float dtype."""

    def __init__(self, layers: Sequence[LayerSpec], *, block_size: int, device: str, dtype: torch.dtype) -> None:
        self._layers = tuple(layers)
        self._block_size = block_size
        self._device = torch.device(device)
        self._dtype = dtype
        self._geometries = tuple(dict.fromkeys(Geometry.of(layer) for layer in layers))
        self._geometry_of = [self._geometries.index(Geometry.of(layer)) for layer in layers]
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def bind(self, kv: list[tuple[Tensor, Tensor]]) -> None:
        """Keep the store, flattened to slots."""
        assert len(kv) == len(self._layers), f"store has {len(kv)} layers, the model {len(self._layers)}"
        self._keys = [keys.view(-1, *keys.shape[2:]) for keys, _ in kv]
        self._values = [values.view(-1, *values.shape[2:]) for _, values in kv]

    def prepare(self, batch: AttentionBatch) -> TorchPlan:
        """Gather indices and masks, once for all layers of a geometry."""
        pieces = cut_rows(batch, MAX_PIECE.get(self._device.type, 256))
        tiles = [list(self._tiles(geometry, pieces, batch)) for geometry in self._geometries]
        return TorchPlan(batch.num_tokens, batch.slot_mapping, tiles)

    def write_kv(self, layer: int, k: Tensor, v: Tensor, plan: TorchPlan) -> None:
        """Scatter this step's keys and values to their slots."""
        slots = plan.slot_mapping[self._layers[layer].group]
        keys, values = self._keys[layer], self._values[layer]
        keys.index_copy_(0, slots, k.to(keys.dtype))
        values.index_copy_(0, slots, v.to(values.dtype))

    def attend(self, layer: int, q: Tensor, plan: TorchPlan, *, sinks: Tensor | None = None) -> Tensor:
        """Tile by tile: gather the context, attend, put the rows back in the step's order."""
        spec = self._layers[layer]
        tiles = plan.tiles[self._geometry_of[layer]]
        if len(tiles) == 1 and tiles[0].num_rows * tiles[0].num_queries == plan.num_tokens:
            return self._attend_tile(layer, spec, q, tiles[0], sinks)
        out = q.new_empty(plan.num_tokens, spec.num_heads, spec.v_head_dim)
        for tile in tiles:
            out[tile.tokens] = self._attend_tile(layer, spec, q[tile.tokens], tile, sinks)
        return out

    def _attend_tile(self, layer: int, spec: LayerSpec, q: Tensor, tile: Tile, sinks: Tensor | None) -> Tensor:
        """[num_rows * num_queries, num_heads, head_dim] -> the same with v_head_dim, contiguous."""
        rows, queries, kv_heads = tile.num_rows, tile.num_queries, spec.num_kv_heads
        per_kv = spec.num_heads // kv_heads
        keys = self._keys[layer].index_select(0, tile.slots).to(q.dtype)
        values = self._values[layer].index_select(0, tile.slots).to(q.dtype)
        keys = keys.view(rows, tile.length, kv_heads, spec.head_dim).transpose(1, 2)
        values = values.view(rows, tile.length, kv_heads, spec.v_head_dim).transpose(1, 2)
        folded = q.reshape(rows, queries, kv_heads, per_kv, spec.head_dim).transpose(1, 2)
        folded = folded.reshape(rows, kv_heads, queries * per_kv, spec.head_dim)
        if spec.soft_cap is None and sinks is None:
            out = scaled_dot_product_attention(folded, keys, values, attn_mask=tile.mask, scale=spec.scale)
        else:
            out = explicit_attention(folded, keys, values, tile.mask, spec, sinks)
        out = out.view(rows, kv_heads, queries, per_kv, spec.v_head_dim).transpose(1, 2)
        return out.reshape(rows * queries, spec.num_heads, spec.v_head_dim).contiguous()

    def _tiles(self, geometry: Geometry, pieces: Pieces, batch: AttentionBatch) -> Iterator[Tile]:
        """Group pieces by their number of queries and padded length."""
        start = first_key(pieces.stop - pieces.num_queries, geometry)
        count = pieces.stop - start
        length = np.where(pieces.num_queries <= PADDED_QUERIES, padded_length(count), count)
        shapes, shape_of = np.unique(np.stack([pieces.num_queries, length]), axis=1, return_inverse=True)
        for i, (num_queries, num_keys) in enumerate(shapes.T.tolist()):
            members = np.flatnonzero(shape_of.reshape(-1) == i)
            step = max(1, MAX_TILE_SCORES // (num_queries * num_keys))
            for at in range(0, len(members), step):
                yield self._tile(geometry, pieces, members[at : at + step], start, num_keys, batch)

    def _tile(
        self,
        geometry: Geometry,
        pieces: Pieces,
        members: NDArray[np.intp],
        start: NDArray[np.int64],
        length: int,
        batch: AttentionBatch,
    ) -> Tile:
        num_queries = int(pieces.num_queries[members[0]])
        packed = np.stack([pieces.row[members], start[members], pieces.stop[members]])
        row, first, stop = to_device(packed, self._device).unsqueeze(-1)
        key = first + torch.arange(length, device=self._device)  # [num_rows, length]
        # Padding repeats the row's own last key: no slot is ever read that its sequence has not written.
        stored = torch.minimum(key, stop - 1)
        block = batch.block_tables[geometry.group][row, stored // self._block_size]
        slots = block.to(torch.int64) * self._block_size + stored % self._block_size
        query = stop - num_queries + torch.arange(num_queries, device=self._device)  # [num_rows, num_queries]
        lowest = lowest_key(query, geometry)
        hidden = (key.unsqueeze(1) > query.unsqueeze(-1)) | (key.unsqueeze(1) < lowest.unsqueeze(-1))
        # The lowest finite number, not -inf: a block of keys that is hidden whole must not make NaN in any kernel.
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        mask.masked_fill_(hidden, torch.finfo(self._dtype).min)
        if num_queries > 1:
            mask = mask.repeat_interleave(geometry.heads_per_kv, dim=1)
        tokens = token_index(pieces.token[members], num_queries, self._device)
        return Tile(tokens, len(members), num_queries, length, slots.view(-1), mask.unsqueeze(1))


def cut_rows(batch: AttentionBatch, most: int) -> Pieces:
    """Cut the step's rows into pieces of at most `most` queries."""
    starts = batch.query_start_host[: batch.num_seqs].astype(np.int64)
    num_queries = np.diff(batch.query_start_host[: batch.num_seqs + 1]).astype(np.int64)
    stop = batch.seq_lens_host[: batch.num_seqs].astype(np.int64)
    row = np.arange(batch.num_seqs)
    if batch.max_query_len <= most:
        return Pieces(row, starts, num_queries, stop)
    cuts = -(-num_queries // most)
    row = np.repeat(row, cuts)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * most
    size = np.minimum(most, num_queries[row] - offset)
    return Pieces(row, starts[row] + offset, size, stop[row] - num_queries[row] + offset + size)


def first_key(query: NDArray[np.int64], geometry: Geometry) -> NDArray[np.int64]:
    """The first key that the query at each position sees."""
    lowest = np.zeros_like(query)
    if geometry.window is not None:
        lowest = np.maximum(lowest, query - geometry.window + 1)
    if geometry.chunk is not None:
        lowest = np.maximum(lowest, query // geometry.chunk * geometry.chunk)
    return lowest


def lowest_key(query: Tensor, geometry: Geometry) -> Tensor:
    """`first_key` on the device."""
    lowest = torch.zeros_like(query)
    if geometry.window is not None:
        lowest = torch.maximum(lowest, query - geometry.window + 1)
    if geometry.chunk is not None:
        lowest = torch.maximum(lowest, query // geometry.chunk * geometry.chunk)
    return lowest


def padded_length(count: NDArray[np.int64]) -> NDArray[np.int64]:
    """Round up to 16, 24, 32, 48, 64, 96 … so that few distinct lengths exist and at most half of one is padding."""
    power = np.exp2(np.ceil(np.log2(np.maximum(count, 16)))).astype(np.int64)
    three_quarters = power // 4 * 3
    return np.where(count <= three_quarters, np.maximum(three_quarters, 16), power)


def token_index(starts: NDArray[np.int64], num_queries: int, device: torch.device) -> slice | Tensor:
    """The tokens of pieces that begin at `starts`: a slice where they follow each other."""
    if len(starts) == 1 or np.all(np.diff(starts) == num_queries):
        return slice(int(starts[0]), int(starts[-1]) + num_queries)
    tokens = (starts[:, None] + np.arange(num_queries)).reshape(-1)
    return to_device(tokens, device)


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, spec: LayerSpec, sinks: Tensor | None) -> Tensor:
    """Attention with a soft cap on the scores or sinks, in fp32.

    A sink is a logit a head may spend attention on without receiving a value: it only enlarges the denominator.
    """
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * spec.scale
    if spec.soft_cap is not None:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    scores += mask
    total = torch.logsumexp(scores, dim=-1, keepdim=True)
    if sinks is not None:
        per_kv = spec.num_heads // spec.num_kv_heads
        sink = sinks.float().view(spec.num_kv_heads, 1, per_kv).expand(-1, q.shape[2] // per_kv, -1)
        total = torch.logaddexp(total, sink.reshape(1, spec.num_kv_heads, q.shape[2], 1))
    return torch.matmul(torch.exp(scores - total), v.float()).to(q.dtype)


def build(ctx: BuildContext) -> TorchAttention:
    """The factory: needs ctx.model_spec, ctx.engine.block_size, ctx.device and ctx.dtype."""
    assert ctx.model_spec is not None, "attention is built once the model's layers are known"
    if not isinstance(dtype := getattr(torch, ctx.dtype, None), torch.dtype):
        raise ConfigError(f"attention 'torch' cannot compute in {ctx.dtype!r}; use float32, bfloat16 or float16")
    return TorchAttention(ctx.model_spec.layers, block_size=ctx.engine.block_size, device=ctx.device, dtype=dtype)
