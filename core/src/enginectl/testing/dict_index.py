"""A prefix index without hashes: a dictionary from all tokens before a block's end to its id. Slow, obviously right."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from enginectl.interfaces.kv import BlockIds, BlockKey, PrefixIndex, PrefixMatch

_Name = tuple[BlockKey, bytes]


class DictPrefixIndex(PrefixIndex):
    """For tests of the ledger and the loop: sharing, idling and eviction without a plugin."""

    def __init__(self, block_size: int) -> None:
        self.num_matched = 0
        self.num_forgotten = 0
        self._block_size = block_size
        self._block_of: dict[_Name, int] = {}
        self._name_of: dict[int, _Name] = {}
        self._sequences: dict[int, int] = {}

    @property
    def num_known(self) -> int:
        """Blocks it would find."""
        return len(self._block_of)

    def contents(self) -> list[tuple[BlockKey, list[int]]]:
        """Of each known block its key, and all tokens up to its end."""
        return [(key, np.frombuffer(tokens, np.int32).tolist()) for key, tokens in self._block_of]

    @property
    def num_sequences(self) -> int:
        """Sequences that have published and not ended."""
        return len(self._sequences)

    def match(self, sequence: int, token_ids: NDArray[np.int32], key: BlockKey) -> PrefixMatch:
        """Block after block, while the tokens up to its end are known."""
        found: list[int] = []
        for end in range(self._block_size, len(token_ids) + 1, self._block_size):
            block = self._block_of.get(self._name(token_ids, end, key))
            if block is None:
                break
            found.append(block)
        self.num_matched += len(found)
        return PrefixMatch(len(found) * self._block_size, np.array(found, np.int32))

    def publish(self, sequence: int, token_ids: NDArray[np.int32], blocks: BlockIds, start: int, key: BlockKey) -> None:
        """Name each new block by the tokens up to its end, unless that name is taken."""
        assert len(token_ids) == len(blocks) * self._block_size, "whole blocks are published"
        assert start == self._sequences.get(sequence, start), "a sequence publishes its blocks in order"
        self._sequences[sequence] = len(blocks)
        for i in range(start, len(blocks)):
            name = self._name(token_ids, (i + 1) * self._block_size, key)
            block = int(blocks[i])
            assert block not in self._name_of, f"block {block} is published twice"
            if name not in self._block_of:
                self._block_of[name] = block
                self._name_of[block] = name

    def _name(self, token_ids: NDArray[np.int32], end: int, key: BlockKey) -> _Name:
        """What the block that ends there is known by: all that its contents depend on."""
        if key.multimodal:
            key = replace(key, multimodal=tuple(item for item in key.multimodal if item[0] < end))
        return key, token_ids[:end].tobytes()

    def is_published(self, ids: BlockIds) -> NDArray[np.bool_]:
        """Whether the block has a name."""
        return np.array([block in self._name_of for block in ids.tolist()], np.bool_)

    def forget(self, ids: BlockIds) -> None:
        """Drop these names."""
        self.num_forgotten += len(ids)
        for block in ids.tolist():
            del self._block_of[self._name_of.pop(block)]

    def end(self, sequence: int) -> None:
        """Nothing is kept for chaining."""
        self._sequences.pop(sequence, None)

    def reset(self, adapter: str | None = None) -> BlockIds:
        """Drop every name, or those of one adapter."""
        gone = [block for block, (key, _) in self._name_of.items() if adapter is None or key.adapter == adapter]
        ids = np.array(gone, np.int32)
        self.forget(ids)
        self.num_forgotten -= len(ids)  # evictions only
        return ids
