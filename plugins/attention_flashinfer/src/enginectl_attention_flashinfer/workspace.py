"""How much scratch FlashInfer's plans can ask for. A plan that finds too little raises.

`fa2` cuts the work into tiles of queries times the query heads of a KV head, and long contexts into chunks, until two
blocks a multiprocessor have work. Each piece of a context that was cut leaves fp32 sums for its whole tile.
"""

from __future__ import annotations

from typing import Protocol

LEAST_BYTES = 128 << 20
"""What its documentation recommends. Decode without tensor cores needs a few MiB."""

BLOCKS_PER_MULTIPROCESSOR = 2


class Heads(Protocol):
    """Of a layer."""

    @property
    def num_heads(self) -> int:
        """Of queries."""

    @property
    def num_kv_heads(self) -> int:
        """Of keys and values."""

    @property
    def head_dim(self) -> int:
        """Size of each."""


def eager_bytes(heads: Heads, num_multiprocessors: int) -> int:
    """For any batch: contexts are cut only as long as the pieces find room on the device."""
    return _bytes(heads, _pieces(heads, num_multiprocessors), 64 if heads.head_dim >= 256 else 128)


def captured_bytes(heads: Heads, num_multiprocessors: int, *, num_rows: int, num_queries: int) -> int:
    """For a graph of rows with so many queries: each of its tiles may be a piece, whatever the contexts are."""
    num_tokens, group = num_rows * num_queries, heads.num_heads // heads.num_kv_heads
    # Planned for any distribution of the tokens over the rows, one row with nearly all of them included.
    tile = _tile((num_tokens - num_rows + 1) * group, heads.head_dim)
    num_tiles = -(-num_tokens * group // tile) + num_rows - 1
    return _bytes(heads, max(_pieces(heads, num_multiprocessors), num_tiles), tile)


def _pieces(heads: Heads, num_multiprocessors: int) -> int:
    return BLOCKS_PER_MULTIPROCESSOR * num_multiprocessors // heads.num_kv_heads


def _tile(num_queries: int, head_dim: int) -> int:
    """num_queries: of a row, each as often as it has heads."""
    if num_queries > 64 and head_dim < 256:
        return 128
    return 64 if num_queries > 16 else 16


def _bytes(heads: Heads, num_pieces: int, tile: int) -> int:
    """Sums of the values and their weight, each aligned."""
    return 4 * heads.num_heads * num_pieces * tile * (heads.head_dim + 1) + 32
