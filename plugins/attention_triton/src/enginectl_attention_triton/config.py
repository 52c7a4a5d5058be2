"""Launch configurations: a table by architecture, element size and head size. No autotuner runs.

The tables are chosen so that every kernel compiles without spills within the architecture's shared memory, by triton
3.6 and by 3.9; their speed has not been measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from enginectl.interfaces.model import LayerSpec

MIN_TILE = 16
"""Fewest rows of a tensor-core tile."""

MAX_NARROW = 64
"""Most rows of a tile of a row with few queries: more would only be padding."""

NARROW_QUERIES = 16
"""Rows with at most this many queries (decode, drafts) are split over their keys; longer ones fill the device."""

MAX_TILE_ELEMENTS = {2: 128 * 128, 4: 32 * 128}
"""Most numbers of a group's queries in a tile, by element size: more would not stay in registers."""

MAX_SPLITS = 64

MIN_SPLIT_KEYS = 128
"""A split reads at least about this many keys, or joining costs more than it brings."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows (queries times heads of a group) by keys, warps and pipeline stages."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What layers must share to share a plan. group: KV group, whose block table they read."""

    group: int
    num_kv_heads: int
    heads_per_kv: int
    head_dim: int
    v_head_dim: int
    window: int
    chunk: int

    @staticmethod
    def of(layer: LayerSpec) -> Shape:
        """The shape of a layer; a window or chunk of 0 is none."""
        return Shape(
            layer.group,
            layer.num_kv_heads,
            layer.num_heads // layer.num_kv_heads,
            layer.head_dim,
            layer.v_head_dim,
            layer.window or 0,
            layer.chunk or 0,
        )


# Keyed by the head size up to which they hold. fp32 has no tensor cores with exact products: its tiles are small.
_NARROW_16 = {64: Tile(0, 64, 4, 3), 128: Tile(0, 64, 4, 3), 256: Tile(0, 32, 4, 2)}
_NARROW_32 = {64: Tile(0, 32, 8, 3), 128: Tile(0, 16, 8, 3), 256: Tile(0, 16, 8, 2)}
_WIDE_32 = {64: Tile(32, 32, 4, 2), 128: Tile(32, 16, 8, 3), 256: Tile(16, 16, 8, 2)}
_WIDE_16 = {
    80: {64: Tile(128, 64, 8, 3), 128: Tile(128, 32, 8, 3), 256: Tile(64, 32, 8, 2)},
    86: {64: Tile(128, 64, 8, 2), 128: Tile(64, 32, 4, 2), 256: Tile(64, 16, 8, 2)},
    90: {64: Tile(128, 128, 8, 2), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)},
    100: {64: Tile(128, 128, 8, 2), 128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 2)},
}
_FAMILIES = {80: 80, 86: 86, 90: 90, 100: 100, 120: 86}
"""The table's entry from a capability on. Consumer cards share sm_86's, whose shared memory is the smallest."""


def fits_a_tile(shape: Shape, *, itemsize: int) -> bool:
    """Whether one query of a whole group of heads stays in shared memory and registers."""
    return power_of_two(shape.heads_per_kv) * _dim(shape) <= MAX_TILE_ELEMENTS[itemsize]


def wide_tile(shape: Shape, *, itemsize: int, capability: int) -> Tile:
    """For rows with many queries."""
    table = _WIDE_32 if itemsize == 4 else _WIDE_16[_family(capability)]
    tile = _for_head(table, shape)
    rows = power_of_two(shape.heads_per_kv)
    if rows <= tile.rows:
        return tile
    return Tile(rows, max(MIN_TILE, tile.keys * tile.rows // rows), 8, tile.num_stages)


def narrow_tile(shape: Shape, num_queries: int, *, itemsize: int) -> Tile:
    """For rows with at most `num_queries` queries, few."""
    tile = _for_head(_NARROW_32 if itemsize == 4 else _NARROW_16, shape)
    rows = max(MIN_TILE, power_of_two(shape.heads_per_kv))
    limit = MAX_NARROW if itemsize == 2 else 32
    rows = max(rows, min(limit, power_of_two(shape.heads_per_kv * num_queries)))
    keys = min(tile.keys, 32) if rows >= MAX_NARROW else tile.keys  # scores of more would not stay in registers
    if itemsize == 2 and rows * _dim(shape) >= MAX_TILE_ELEMENTS[2]:
        return Tile(rows, keys, 8, 3)
    return Tile(rows, keys, tile.num_warps, tile.num_stages)


def join_warps(splits: int, v_head_dim: int) -> int:
    """Up to 32 numbers a thread."""
    return min(16, max(4, splits * power_of_two(v_head_dim) // 1024))


def num_splits(shape: Shape, num_tiles: int, max_seq_len: int, *, num_queries: int, num_sms: int) -> int:
    """Into how many parts a narrow tile's keys are cut: a power of two that gives every multiprocessor two programs."""
    keys = max_seq_len
    if shape.window:
        keys = min(keys, shape.window + num_queries)
    if shape.chunk:
        keys = min(keys, shape.chunk + num_queries)
    wanted = 2 * num_sms // max(1, num_tiles * shape.num_kv_heads)
    most = min(MAX_SPLITS, keys // MIN_SPLIT_KEYS, wanted)
    return 1 << (most.bit_length() - 1) if most > 1 else 1


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def padded_dim(dim: int) -> int:
    """Elements a head takes in a tile: a power of two that tensor cores take."""
    return max(MIN_TILE, power_of_two(dim))


def _family(capability: int) -> int:
    return _FAMILIES[max(known for known in _FAMILIES if known <= capability)]


def _for_head(table: dict[int, Tile], shape: Shape) -> Tile:
    return table[min(size for size in table if _dim(shape) <= size)]


def _dim(shape: Shape) -> int:
    return padded_dim(max(shape.head_dim, shape.v_head_dim))
