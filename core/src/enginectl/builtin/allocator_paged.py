"""The `paged` KV allocator: a stack of free blocks, then the longest-idle cached one."""

from __future__ import annotations

import numpy as np

from enginectl.context import BuildContext
from enginectl.errors import PoolError
from enginectl.interfaces.kv import BlockIds, KVAllocator

_FREE, _IDLE, _OUT = 0, 1, 2


class PagedAllocator(KVAllocator):
    """Free blocks on a stack; idle blocks in least-recently-used order. Every operation is O(count)."""

    def __init__(self, num_blocks: int) -> None:
        self._state = np.full(num_blocks, _FREE, np.int8)
        self._state[0] = _OUT  # the null block
        self._stack = np.arange(num_blocks - 1, 0, -1, dtype=np.int32)  # hands out 1, 2, 3 …
        self._num_free = num_blocks - 1
        self._idle: dict[int, None] = {}  # insertion order is eviction order

    @property
    def num_free(self) -> int:
        """Blocks on the stack."""
        return self._num_free

    @property
    def num_idle(self) -> int:
        """Cached blocks that may be evicted."""
        return len(self._idle)

    def take(self, count: int) -> tuple[BlockIds, BlockIds]:
        """Free blocks first, then the longest idle."""
        if count > self._num_free + len(self._idle):
            raise PoolError(f"{count} blocks wanted, {self._num_free} free and {len(self._idle)} idle")
        from_stack = min(count, self._num_free)
        ids = self._stack[self._num_free - from_stack : self._num_free][::-1].copy()
        self._num_free -= from_stack
        evicted = ids[:0]
        if from_stack < count:
            oldest = iter(self._idle)
            evicted = np.fromiter((next(oldest) for _ in range(count - from_stack)), np.int32)
            for block in evicted.tolist():
                del self._idle[block]
            ids = np.concatenate((ids, evicted))
        self._state[ids] = _OUT
        return ids, evicted

    def put_free(self, ids: BlockIds) -> None:
        """Back on the stack; the first given is handed out first."""
        if ids.size == 0:
            return
        self._expect(ids, _OUT, "put back")
        self._push(ids)

    def put_idle(self, ids: BlockIds) -> None:
        """Cached; evicted in this order, after those already idle."""
        if ids.size == 0:
            return
        self._expect(ids, _OUT, "cached")
        self._state[ids] = _IDLE
        self._idle.update(dict.fromkeys(ids.tolist()))

    def revive(self, ids: BlockIds) -> None:
        """In use again."""
        self._expect(ids, _IDLE, "revived")
        self._state[ids] = _OUT
        for block in ids.tolist():
            del self._idle[block]

    def forget(self, ids: BlockIds) -> None:
        """Idle becomes free."""
        if ids.size == 0:
            return
        self.revive(ids)
        self._push(ids)

    def _push(self, ids: BlockIds) -> None:
        self._state[ids] = _FREE
        self._stack[self._num_free : self._num_free + ids.size] = ids[::-1]
        self._num_free += ids.size

    def _expect(self, ids: BlockIds, state: int, what: str) -> None:
        wrong = self._state[ids] != state
        if wrong.any() or (ids == 0).any():
            raise PoolError(f"blocks {ids[wrong].tolist() or [0]} cannot be {what}: they are not in that state")
        if ids.size > 1 and np.bincount(ids).max() > 1:
            raise PoolError(f"a block is named twice among those to be {what}")


def build(ctx: BuildContext) -> PagedAllocator:
    """Provider factory."""
    assert ctx.kv_layout is not None, "the pool is sized before the allocator is built"
    return PagedAllocator(ctx.kv_layout.num_blocks)
