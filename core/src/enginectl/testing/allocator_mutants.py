"""Broken allocators, each of which the kit must notice in the test named for it."""

from __future__ import annotations

from enginectl.errors import PoolError
from enginectl.interfaces.kv import BlockIds
from enginectl.testing.allocator import ReferenceAllocator, block_ids


class NewestFirst(ReferenceAllocator):
    """Evicts what became idle last."""

    def put_idle(self, ids: BlockIds) -> None:
        """At the front."""
        self.idle = self._leave(self.out, ids) + self.idle


class IdleFirst(ReferenceAllocator):
    """Evicts although blocks are free."""

    def take(self, count: int) -> tuple[BlockIds, BlockIds]:
        """From the idle list, then from the free list."""
        if count > len(self.free) + len(self.idle):
            raise PoolError(f"{count} blocks wanted")
        evicted, self.idle = self.idle[:count], self.idle[count:]
        ids = self.free[: count - len(evicted)]
        self.free = self.free[len(ids) :]
        self.out += ids + evicted
        return block_ids(*ids, *evicted), block_ids(*evicted)


class FreesTwice(ReferenceAllocator):
    """Takes back what it has."""

    def put_free(self, ids: BlockIds) -> None:
        """Whoever had it."""
        self.out = [block for block in self.out if block not in ids]
        self.free += [block for block in ids.tolist() if block not in self.free]


class LosesSome(ReferenceAllocator):
    """Of three blocks that come back together, one stays away."""

    def put_free(self, ids: BlockIds) -> None:
        """All but the third."""
        super().put_free(ids)
        if ids.size >= 3:
            self.out.append(self.free.pop())
