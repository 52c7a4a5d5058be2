"""The `prefix-cache` index: which block holds which prefix, found by chained hashes and checked by comparison.

Everything is bounded by the pool (per block) or by the live sequences (`_Chain`, dropped by `end`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from enginectl.context import BuildContext
from enginectl.errors import PoolError
from enginectl.interfaces.kv import BlockIds, BlockKey, PrefixIndex, PrefixMatch
from enginectl_prefix_cache.hashing import BlockHasher, extras_by_block, make_hasher

_ROOT = 0
"""Serial number of what comes before a first block; also that of a block which is not published."""

_UNKNOWN = -1
"""Serial number of a parent that the index does not hold at the moment."""

_NO_MATCH = PrefixMatch(0, np.zeros(0, np.int32))


class _Chain:
    """What is kept of a live sequence, so that no block is hashed twice.

    extras: encoded, of the blocks that have any. digests: of its blocks, head first, as far as they were needed.
    num_published: blocks it has published or found known. tail_block, tail_serial: the block under which the index
    holds the last of them (not its own, if its contents were known already).
    """

    __slots__ = ("digests", "extras", "key", "num_published", "tail_block", "tail_serial")

    def __init__(self, key: BlockKey, extras: dict[int, bytes]) -> None:
        self.key = key
        self.extras = extras
        self.digests: list[bytes] = []
        self.num_published = 0
        self.tail_block = 0
        self.tail_serial = _UNKNOWN


class HashPrefixIndex(PrefixIndex):
    """Knows up to `num_blocks` blocks of `block_size` tokens.

    A published block has a serial number that is never used again, and its parent's. A hit needs an equal digest, equal
    tokens and extras, and the block found before it as parent: whatever the hash does, no wrong block is found.
    """

    def __init__(self, num_blocks: int, block_size: int, hasher: BlockHasher) -> None:
        self._block_size = block_size
        self._width = 4 * block_size
        self._hasher = hasher
        self._hash = hasher.hash_block
        self._by_digest: dict[bytes, int] = {}
        self._chains: dict[int, _Chain] = {}
        self._last_serial = _ROOT
        # By block id.
        self._is_published = np.zeros(num_blocks, np.bool_)
        self._tokens: list[bytes] = [b""] * num_blocks
        self._digests: list[bytes] = [b""] * num_blocks
        self._serials = [_ROOT] * num_blocks
        self._parents = [_UNKNOWN] * num_blocks
        self._extras: dict[int, bytes] = {}
        self._adapters: dict[int, str] = {}

    @property
    def num_published(self) -> int:
        """Blocks whose contents are known."""
        return int(self._is_published.sum())

    @property
    def num_sequences(self) -> int:
        """Sequences that something is kept of."""
        return len(self._chains)

    # -- finding -------------------------------------------------------------------------------------------------

    def match(self, sequence: int, token_ids: NDArray[np.int32], key: BlockKey) -> PrefixMatch:
        """Hash block after block until one is not known; compare the tokens of all of them at once."""
        size, width = self._block_size, self._width
        most = len(token_ids) // size
        if most == 0:
            return _NO_MATCH
        chain = self._chain(sequence, key)
        digests, by_digest, hash_block = chain.digests, self._by_digest, self._hash
        serials, parents = self._serials, self._parents
        num_hashed = len(digests)
        data = token_ids[: most * size].tobytes()
        digest = digests[-1] if digests else self._hasher.root
        parent = _ROOT
        found: list[int] = []
        for i in range(most):
            if i < num_hashed:
                digest = digests[i]
            else:
                digest = hash_block(digest, data[i * width : (i + 1) * width], chain.extras.get(i, b""))
                digests.append(digest)
            block = by_digest.get(digest)
            if block is None or (parents[block] != parent and not self._adopt(block, parent)):
                break
            parent = serials[block]
            found.append(block)
        if not found:
            return _NO_MATCH
        count = self._count_equal(found, data, chain.extras)
        return PrefixMatch(count * size, np.array(found[:count], np.int32))

    def _count_equal(self, blocks: list[int], data: bytes, extras: dict[int, bytes]) -> int:
        """How many of the first blocks hold exactly these tokens, with these extras."""
        count, width = len(blocks), self._width
        held = [self._tokens[block] for block in blocks]
        if b"".join(held) != data[: count * width]:
            count = next(i for i, one in enumerate(held) if one != data[i * width : (i + 1) * width])
        if extras or self._extras:
            for i, block in enumerate(blocks[:count]):
                if self._extras.get(block, b"") != extras.get(i, b""):
                    return i
        return count

    def _adopt(self, block: int, parent: int) -> bool:
        """The block's parent was evicted and came back under another serial number: take it for the same if its digest,
        which covers all before it, cannot be forged.
        """
        if not self._hasher.is_cryptographic:
            return False
        self._parents[block] = parent
        return True

    # -- publishing ----------------------------------------------------------------------------------------------

    def publish(self, sequence: int, token_ids: NDArray[np.int32], blocks: BlockIds, start: int, key: BlockKey) -> None:
        """Give each new block its digest, unless equal contents have it. Raises PoolError, changing nothing, for a
        block that is published already.
        """
        new = blocks[start:].tolist()
        self._check_new(new)
        chain = self._chain(sequence, key)
        parent = self._parent_of(chain, blocks, start)
        if parent is None:
            return
        count, width = len(blocks), self._width
        if len(chain.digests) < start:  # it has not been matched
            self._extend(chain, token_ids[: start * self._block_size].tobytes(), 0)
        data = token_ids[start * self._block_size : count * self._block_size].tobytes()
        self._extend(chain, data, start)
        digests, all_extras, adapter = chain.digests, chain.extras, key.adapter
        for i, block in enumerate(new, start):
            digest = digests[i]
            extras = all_extras.get(i, b"") if all_extras else b""
            at = (i - start) * width
            tokens = data[at : at + width]
            holder = self._by_digest.get(digest)
            if holder is not None and self._holds(holder, tokens, extras, parent):
                parent = self._serials[holder]
                chain.tail_block = holder
                continue
            self._last_serial += 1
            self._by_digest[digest] = block
            self._digests[block] = digest
            self._tokens[block] = tokens
            self._parents[block] = parent
            self._serials[block] = parent = self._last_serial
            self._is_published[block] = True
            if extras:
                self._extras[block] = extras
            if adapter is not None:
                self._adapters[block] = adapter
            chain.tail_block = block
        chain.num_published = count
        chain.tail_serial = parent

    def _check_new(self, blocks: list[int]) -> None:
        serials = self._serials
        for block in blocks:
            if serials[block] != _ROOT or block == 0:
                raise PoolError(f"block {block} is published already, or is the null block; forget it first")

    def _parent_of(self, chain: _Chain, blocks: BlockIds, start: int) -> int | None:
        """Serial number of what the first new block follows; None if that is not known, and so cannot be found again."""
        if start == 0:
            return _ROOT
        serial = self._serials[blocks.item(start - 1)]
        if serial != _ROOT:
            return serial
        if chain.num_published == start and self._serials[chain.tail_block] == chain.tail_serial:
            return chain.tail_serial
        return _UNKNOWN if self._hasher.is_cryptographic else None  # it may come back, see `_adopt`

    def _holds(self, block: int, tokens: bytes, extras: bytes, parent: int) -> bool:
        """Whether a block with the same digest has the same contents too."""
        if self._tokens[block] != tokens or self._extras.get(block, b"") != extras:
            return False
        return self._parents[block] == parent or self._adopt(block, parent)

    # -- chains --------------------------------------------------------------------------------------------------

    def _chain(self, sequence: int, key: BlockKey) -> _Chain:
        chain = self._chains.get(sequence)
        if chain is None or (chain.key is not key and chain.key != key):  # a new adapter version is a new chain
            extras = {i: self._hasher.encode(some) for i, some in extras_by_block(key, self._block_size).items()}
            chain = self._chains[sequence] = _Chain(key, extras)
        return chain

    def _extend(self, chain: _Chain, data: bytes, start: int) -> None:
        """Digests of the blocks from `start` on, whose tokens are in data; only those that are missing are hashed."""
        digests, width, hash_block = chain.digests, self._width, self._hash
        digest = digests[-1] if digests else self._hasher.root
        first = len(digests) - start
        for i in range(first, len(data) // width):
            digest = hash_block(digest, data[i * width : (i + 1) * width], chain.extras.get(start + i, b""))
            digests.append(digest)

    # -- forgetting ----------------------------------------------------------------------------------------------

    def is_published(self, ids: BlockIds) -> NDArray[np.bool_]:
        """One look-up for all."""
        known: NDArray[np.bool_] = self._is_published[ids]
        return known

    def forget(self, ids: BlockIds) -> None:
        """Drop what is known of these blocks; unknown ones are ignored."""
        self._is_published[ids] = False
        self._drop(ids.tolist())

    def _drop(self, blocks: Iterable[int]) -> None:
        by_digest = self._by_digest
        for block in blocks:
            digest = self._digests[block]
            if by_digest.get(digest) == block:
                del by_digest[digest]
            self._digests[block] = self._tokens[block] = b""
            self._serials[block] = _ROOT
            self._parents[block] = _UNKNOWN
        if self._extras:
            for block in blocks:
                self._extras.pop(block, None)
        if self._adapters:
            for block in blocks:
                self._adapters.pop(block, None)

    def end(self, sequence: int) -> None:
        """Drop the sequence's chain; what it published stays."""
        self._chains.pop(sequence, None)

    def reset(self, adapter: str | None = None) -> BlockIds:
        """Forget all blocks, or those of every version of one adapter."""
        if adapter is None:
            ids = np.flatnonzero(self._is_published).astype(np.int32)
        else:
            ids = np.array([block for block, name in self._adapters.items() if name == adapter], np.int32)
        self.forget(ids)
        return ids


def build(ctx: BuildContext) -> HashPrefixIndex:
    """Provider factory."""
    assert ctx.kv_layout is not None, "the pool is sized before the index is built"
    hasher = make_hasher(ctx.engine.prefix_caching_hash_algo)
    return HashPrefixIndex(ctx.kv_layout.num_blocks, ctx.kv_layout.block_size, hasher)
