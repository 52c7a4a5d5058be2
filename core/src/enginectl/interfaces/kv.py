"""KV memory: how it is laid out, which block comes next, and what full blocks contain.

*block* is a page of `block_size` tokens; block 0 is the null block and is never handed out. Core keeps the ledger
(`engine/ledger.py`); the two parts here only decide.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

BlockIds = NDArray[np.int32]
"""Block ids, [num_blocks] int32."""


class KVGroup(msgspec.Struct, frozen=True):
    """Layers that share one block table. window: tokens a layer looks back, None for all. bytes_per_block: over all
    layers of the group, keys and values.
    """

    layers: tuple[int, ...]
    window: int | None
    bytes_per_block: int


class KVLayout(msgspec.Struct, frozen=True):
    """The pool: num_blocks counts the null block. dtype is the stored dtype's name."""

    groups: tuple[KVGroup, ...]
    block_size: int
    num_blocks: int
    dtype: str


class KVAllocator(ABC):
    """Decides which block is handed out next, and which idle one is evicted: eviction *is* allocation.

    A block is free (contents worthless), idle (contents cached, nobody uses it) or in use (core counts references).
    Core checks counts before it calls; a method that is asked for the impossible raises PoolError and changes nothing.
    """

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Blocks whose contents are worthless. Called: a few times a step."""

    @property
    @abstractmethod
    def num_idle(self) -> int:
        """Blocks that are cached and unused, and may be evicted. Called: a few times a step."""

    @abstractmethod
    def take(self, count: int) -> tuple[BlockIds, BlockIds]:
        """Hand out `count` blocks: free ones first, then idle ones in eviction order.

        Returns (ids [count], evicted): evicted is the part of ids that was idle, for the prefix index to forget. Both are
        the caller's: steps in flight read them while the next blocks are taken.
        Raises PoolError if count > num_free + num_idle.
        Called: at most once a step in steady state, and once per admitted request.
        """

    @abstractmethod
    def put_free(self, ids: BlockIds) -> None:
        """Take back blocks whose contents are worthless. Raises PoolError for one that is not out."""

    @abstractmethod
    def put_idle(self, ids: BlockIds) -> None:
        """Take back cached blocks, in the order in which they should be evicted (tails before heads)."""

    @abstractmethod
    def revive(self, ids: BlockIds) -> None:
        """Idle blocks are in use again (a prefix hit). Raises PoolError for one that is not idle."""

    @abstractmethod
    def forget(self, ids: BlockIds) -> None:
        """Idle blocks become free: their contents are no longer known (a reset)."""


class PrefixMatch(msgspec.Struct, frozen=True):
    """The longest known prefix: whole blocks only. num_tokens = len(blocks) * block_size."""

    num_tokens: int
    blocks: BlockIds


class BlockKey(msgspec.Struct, frozen=True):
    """What separates equal tokens: adapter (name and content version), cache salt, multimodal hashes; each tagged so
    that none can pass for another.
    """

    adapter: str | None = None
    adapter_version: str | None = None
    salt: str | None = None
    multimodal: tuple[tuple[int, str], ...] = ()


@dataclass(slots=True)
class FilledRows:
    """Rows of one step whose blocks [starts, ends) are now full and verified. Read only; valid during the call.

    rows, starts, ends: [n] int32. sequences: [n] int64. keys: of each row. token_ids: [rows, max_tokens] int32 and block_table:
    [rows, max_blocks] int32 hold all rows, of which `rows` are meant.
    """

    rows: NDArray[np.int32]
    starts: NDArray[np.int32]
    ends: NDArray[np.int32]
    sequences: NDArray[np.int64]
    keys: list[BlockKey]
    token_ids: NDArray[np.int32]
    block_table: BlockIds
    block_size: int

    def each(self) -> Iterator[tuple[int, NDArray[np.int32], BlockIds, int, BlockKey]]:
        """What `PrefixIndex.publish` takes, row by row."""
        rows, starts, ends, sequences = (of.tolist() for of in (self.rows, self.starts, self.ends, self.sequences))
        for row, start, end, sequence, key in zip(rows, starts, ends, sequences, self.keys, strict=True):
            tokens, blocks = self.token_ids[row, : end * self.block_size], self.block_table[row, :end]
            yield sequence, tokens, blocks, start, key

    def select(self, which: NDArray[np.intp]) -> FilledRows:
        """Some of them, by index."""
        return FilledRows(
            self.rows[which],
            self.starts[which],
            self.ends[which],
            self.sequences[which],
            [self.keys[i] for i in which.tolist()],
            self.token_ids,
            self.block_table,
            self.block_size,
        )


class PrefixIndex(ABC):
    """Knows what full, verified blocks contain."""

    @abstractmethod
    def match(self, sequence: int, token_ids: NDArray[np.int32], key: BlockKey) -> PrefixMatch:
        """The longest run of known blocks that starts these tokens. Compares token ids, not hashes alone.

        sequence: the request's key, so that hashes are kept between attempts and for `publish`, until `end`. What other
        sequences find does not change. Called: once per admission attempt.
        """

    @abstractmethod
    def publish(self, sequence: int, token_ids: NDArray[np.int32], blocks: BlockIds, start: int, key: BlockKey) -> None:
        """Blocks [start, len(blocks)) of a sequence are now full and verified.

        sequence: the request's key, constant while it runs, so that hashes are chained without recomputation. The first
        call for a sequence starts behind what it matched; the next ones where the last one stopped.
        token_ids: all tokens up to the end of the last of these blocks. A block whose contents are known already under
        another id stays private. Called: when blocks fill, for rows that filled one.
        """

    def publish_rows(self, filled: FilledRows) -> None:
        """`publish` for all rows of a step that filled blocks. The default takes them one after another; an index that
        works with arrays does them at once. Called: once per step in which a row filled a block.
        """
        for one in filled.each():
            self.publish(*one)

    @abstractmethod
    def is_published(self, ids: BlockIds) -> NDArray[np.bool_]:
        """For each id whether the index would find it: such a block becomes idle, not free, when released."""

    @abstractmethod
    def forget(self, ids: BlockIds) -> None:
        """These blocks are being reused. Called: on eviction."""

    @abstractmethod
    def end(self, sequence: int) -> None:
        """The sequence ended or was preempted; drop what was kept for chaining. It may not have published."""

    @abstractmethod
    def reset(self, adapter: str | None = None) -> BlockIds:
        """Forget everything (or one adapter's blocks); returns the ids that were published."""


def layout_bytes_per_block(groups: Sequence[KVGroup]) -> int:
    """Bytes that one block costs over all groups."""
    return sum(group.bytes_per_block for group in groups)
