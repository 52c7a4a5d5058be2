"""The `prefix-cache` index: which block holds which prefix, found by chained hashes and checked by comparison.

Everything is bounded by the pool (per block) or by the live sequences (`_Chain`, dropped by `end`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from enginectl.context import BuildContext
from enginectl.errors import PoolError
from enginectl.interfaces.kv import BlockIds, BlockKey, FilledRows, PrefixIndex, PrefixMatch
from enginectl_prefix_cache.hashing import BlockHasher, extras_by_block, make_hasher, split_raw

_ROOT = 0
"""Serial number of what comes before a first block; also that of a block which is not published."""

_UNKNOWN = -1
"""Serial number of a parent that the index does not hold at the moment."""

_Known = tuple[bytes, bytes, int, int]
"""What is known of a published block: digest, tokens as int32 bytes, its parent's serial number, its own."""

_SPAN = 64
"""Blocks that are split for the hash at once."""

_NO_MATCH = PrefixMatch(0, np.zeros(0, np.int32))


class _Chain:
    """What is kept of a live sequence, so that no block is hashed twice.

    extras: encoded, of the blocks that have any. digests: of its blocks, head first, as far as they were needed: a
    decode step goes on from the block before, without it.
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
        self._block_dtype = np.dtype((np.void, 4 * block_size))
        self._hasher = hasher
        self._hash = hasher.hash_block
        self._by_digest: dict[bytes, int] = {}
        self._chains: dict[int, _Chain] = {}
        self._last_serial = _ROOT
        # By block id.
        self._known: list[_Known | None] = [None] * num_blocks
        self._flags = bytearray(num_blocks)  # whether it is known: to set one by one, and as an array to look at many
        self._is_published = np.frombuffer(self._flags, np.bool_)
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
        """Hash block after block until one is not known; compare what all of them hold at once."""
        most = len(token_ids) // self._block_size
        if most == 0:
            return _NO_MATCH
        chain = self._chain(sequence, key)
        digests, by_digest, hash_block, known = chain.digests, self._by_digest, self._hash, self._known
        num_hashed = len(digests)
        blocks = self._blocks(token_ids, num_hashed, most)
        digest = digests[-1] if digests else self._hasher.root
        parent, found = _ROOT, list[_Known]()
        ids: list[int] = []
        for i in range(most):
            if i < num_hashed:
                digest = digests[i]
            else:
                digest = hash_block(digest, next(blocks), chain.extras.get(i, b""))
                digests.append(digest)
            block = by_digest.get(digest)
            if block is None:
                break
            one = known[block]
            assert one is not None, "what a digest leads to is published"
            if one[2] != parent and not self._adopt(block, parent):
                break
            parent = one[3]
            ids.append(block)
            found.append(one)
        if not ids:
            return _NO_MATCH
        count = self._count_equal(found, token_ids[: len(ids) * self._block_size].tobytes())
        if chain.extras or self._extras:
            count = self._count_alike(ids[:count], chain.extras)
        return PrefixMatch(count * self._block_size, np.array(ids[:count], np.int32))

    def _count_equal(self, blocks: list[_Known], data: bytes) -> int:
        """How many of the first blocks hold exactly these tokens."""
        if b"".join([tokens for _, tokens, _, _ in blocks]) == data:
            return len(blocks)
        width = self._width
        return next(i for i, (_, tokens, _, _) in enumerate(blocks) if tokens != data[i * width : (i + 1) * width])

    def _count_alike(self, blocks: list[int], extras: dict[int, bytes]) -> int:
        """How many of the first blocks have exactly these extras."""
        for i, block in enumerate(blocks):
            if self._extras.get(block, b"") != extras.get(i, b""):
                return i
        return len(blocks)

    def _adopt(self, block: int, parent: int) -> bool:
        """The block's parent was evicted and came back under another serial number: take it for the same if its digest,
        which covers all before it, cannot be forged.
        """
        known = self._known[block]
        if known is None or not self._hasher.is_cryptographic:
            return False
        digest, tokens, _, serial = known
        self._known[block] = digest, tokens, parent, serial
        return True

    def _serial(self, block: int) -> int:
        known = self._known[block]
        return _ROOT if known is None else known[3]

    # -- publishing ----------------------------------------------------------------------------------------------

    def publish(self, sequence: int, token_ids: NDArray[np.int32], blocks: BlockIds, start: int, key: BlockKey) -> None:
        """Give each new block its digest, unless equal contents have it. Raises PoolError, changing nothing, for a
        block that is published already.
        """
        self._check_new(blocks[start:])
        chain = self._chain(sequence, key)
        parent = self._parent_of(chain, blocks, start)
        if parent is None:
            return
        width, count = self._width, len(blocks)
        self._extend(chain, token_ids, count)
        data = token_ids[start * self._block_size : count * self._block_size].tobytes()
        for i, block in enumerate(blocks[start:].tolist(), start):
            digest, extras, at = chain.digests[i], chain.extras.get(i, b""), (i - start) * width
            tokens = data[at : at + width]
            holder = self._by_digest.get(digest)
            if holder is None or not self._holds(holder, tokens, extras, parent):
                self._last_serial += 1
                self._by_digest[digest] = holder = block
                self._known[block] = digest, tokens, parent, self._last_serial
                self._flags[block] = True
                if extras:
                    self._extras[block] = extras
                if key.adapter is not None:
                    self._adapters[block] = key.adapter
            chain.tail_block, parent = holder, self._serial(holder)
        chain.num_published = count
        chain.tail_serial = parent

    def publish_rows(self, filled: FilledRows) -> None:
        """A step's rows at once. Nearly all rows of a decode step fill one block behind one that is published, with
        contents that are new; the others go through `publish`.
        """
        size, split, rows, starts = self._block_size, self._hasher.split, filled.rows, filled.starts
        most = filled.token_ids.shape[1] // size
        whole = filled.token_ids[:, : most * size].view(self._block_dtype)  # [rows, most]
        tokens: list[bytes] = whole[rows, starts].tolist()
        hashed = tokens if split is split_raw else split(np.frombuffer(b"".join(tokens), np.int32), size)
        left = self._publish_next(filled, tokens, hashed)
        if left:
            super().publish_rows(filled.select(np.array(left)))

    def _publish_next(self, filled: FilledRows, tokens: list[bytes], hashed: list[bytes]) -> list[int]:
        """Publish one block a row, and return the indices of rows that are not as simple as that.

        tokens: of each row's block, as int32 bytes. hashed: what is hashed of them. The digest goes on from that of the
        block before: no chain is looked at.
        """
        at, table = filled.rows * filled.block_table.shape[1] + filled.starts, filled.block_table.ravel()
        before, blocks = table.take(at - 1, mode="clip").tolist(), table.take(at).tolist()
        by_digest, known, flags, adapters = self._by_digest, self._known, self._flags, self._adapters
        hash_block, serial, left = self._hash, self._last_serial, list[int]()
        starts, ends = filled.starts.tolist(), filled.ends.tolist()
        rows = zip(starts, ends, before, blocks, tokens, hashed, filled.keys, strict=True)
        for i, (start, end, last, block, contents, data, key) in enumerate(rows):
            parent = known[last]
            if parent is None or start == 0 or start + 1 != end or flags[block] or not block or key.multimodal:
                left.append(i)
                continue
            digest = hash_block(parent[0], data, b"")
            if by_digest.setdefault(digest, block) != block:
                left.append(i)
                continue
            serial += 1
            known[block] = digest, contents, parent[3], serial
            flags[block] = True
            if key.adapter is not None:
                adapters[block] = key.adapter
        self._last_serial = serial
        return left

    def _check_new(self, blocks: BlockIds) -> None:
        for block in blocks.tolist():
            if self._flags[block] or block == 0:
                raise PoolError(f"block {block} is published already, or is the null block; forget it first")

    def _parent_of(self, chain: _Chain, blocks: BlockIds, start: int) -> int | None:
        """Serial number of what the first new block follows; None if that is not known, and so cannot be found again."""
        if start == 0:
            return _ROOT
        serial = self._serial(blocks.item(start - 1))
        if serial != _ROOT:
            return serial
        if chain.num_published == start and self._serial(chain.tail_block) == chain.tail_serial:
            return chain.tail_serial
        return _UNKNOWN if self._hasher.is_cryptographic else None  # it may come back, see `_adopt`

    def _holds(self, block: int, tokens: bytes, extras: bytes, parent: int) -> bool:
        """Whether a block with the same digest has the same contents too."""
        known = self._known[block]
        if known is None or known[1] != tokens or self._extras.get(block, b"") != extras:
            return False
        return known[2] == parent or self._adopt(block, parent)

    # -- chains --------------------------------------------------------------------------------------------------

    def _chain(self, sequence: int, key: BlockKey) -> _Chain:
        chain = self._chains.get(sequence)
        if chain is None or (chain.key is not key and chain.key != key):  # a new adapter version is a new chain
            extras = {i: self._hasher.encode(some) for i, some in extras_by_block(key, self._block_size).items()}
            chain = self._chains[sequence] = _Chain(key, extras)
        return chain

    def _extend(self, chain: _Chain, token_ids: NDArray[np.int32], count: int) -> None:
        """Digests of the first `count` blocks of these tokens; only those that are missing are hashed."""
        digests, hash_block, extras = chain.digests, self._hash, chain.extras
        digest = digests[-1] if digests else self._hasher.root
        for i, block in enumerate(self._blocks(token_ids, len(digests), count), len(digests)):
            digest = hash_block(digest, block, extras.get(i, b""))
            digests.append(digest)

    def _blocks(self, token_ids: NDArray[np.int32], start: int, end: int) -> Iterator[bytes]:
        """What is hashed of blocks [start, end), split a span at a time: few may be asked for."""
        size, split = self._block_size, self._hasher.split
        for at in range(start, end, _SPAN):
            yield from split(token_ids[at * size : min(at + _SPAN, end) * size], size)

    # -- forgetting ----------------------------------------------------------------------------------------------

    def is_published(self, ids: BlockIds) -> NDArray[np.bool_]:
        """One look-up for all."""
        known: NDArray[np.bool_] = self._is_published[ids]
        return known

    def forget(self, ids: BlockIds) -> None:
        """Drop what is known of these blocks; unknown ones are ignored."""
        by_digest, blocks = self._by_digest, ids.tolist()
        for block in blocks:
            known = self._known[block]
            if known is not None and by_digest.get(known[0]) == block:
                del by_digest[known[0]]
            self._known[block] = None
            self._flags[block] = False
        for of_block in (self._extras, self._adapters):
            if of_block:
                for block in blocks:
                    of_block.pop(block, None)

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
