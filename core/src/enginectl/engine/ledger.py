"""The block ledger: who holds which KV block. `free + cached idle + in use = pool` after every step.

The ledger counts references; the allocator decides which block comes next, the prefix index which contents are known.
"""

from __future__ import annotations

import numpy as np

from enginectl.errors import PoolError
from enginectl.interfaces.kv import BlockIds, KVAllocator, PrefixIndex

NULL_BLOCK = 0
"""Never handed out; pads block tables, and takes the writes of padding tokens."""

_NONE = np.zeros(0, np.int32)


class BlockPool:
    """References to `num_blocks` blocks, the null block included."""

    def __init__(self, num_blocks: int, allocator: KVAllocator, index: PrefixIndex | None = None) -> None:
        self.num_blocks = num_blocks
        self.allocator = allocator
        self.index = index
        self._references = np.zeros(num_blocks, np.int32)
        self.num_in_use = 0

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be handed out (all but the null block)."""
        return self.num_blocks - 1

    @property
    def num_available(self) -> int:
        """Blocks that `take` could hand out now: free ones and evictable ones."""
        return self.allocator.num_free + self.allocator.num_idle

    def take(self, count: int) -> BlockIds:
        """`count` blocks with one reference each. Raises PoolError, changing nothing, if there are not as many."""
        if count == 0:
            return _NONE
        if count > self.num_available:
            raise PoolError(f"{count} blocks wanted, {self.num_available} available of {self.num_usable}")
        ids, evicted = self.allocator.take(count)
        if evicted.size:
            assert self.index is not None, "idle blocks exist only with a prefix index"
            self.index.forget(evicted)
        held = self._references[ids]
        if held.any():
            raise PoolError(f"the allocator handed out blocks that are in use: {ids[held > 0].tolist()}")
        self._references[ids] = 1
        self.num_in_use += count
        return ids

    def share(self, ids: BlockIds) -> None:
        """One more reference to each of these blocks, idle or in use (a prefix hit)."""
        if ids.size == 0:
            return
        idle = ids[self._references[ids] == 0]
        if idle.size:
            self.allocator.revive(idle)
            self.num_in_use += idle.size
        self._references[ids] += 1

    def num_idle_among(self, ids: BlockIds) -> int:
        """How many of these blocks nobody uses: sharing them lowers `num_available` by as much."""
        return int((self._references[ids] == 0).sum())

    def release(self, ids: BlockIds) -> None:
        """One sequence's blocks, head first, lose one reference each; unused ones become idle or free.

        Raises PoolError, changing nothing, for a block that is not in use.
        """
        if ids.size == 0:
            return
        held = self._references[ids]
        if (held <= 0).any() or (ids == NULL_BLOCK).any():
            raise PoolError(f"released blocks that are not in use: {ids[held <= 0].tolist()}")
        self._references[ids] = held - 1
        unused = ids[held == 1][::-1]  # tails first
        if unused.size == 0:
            return
        self.num_in_use -= unused.size
        if self.index is None:
            self.allocator.put_free(unused)
            return
        known = self.index.is_published(unused)
        self.allocator.put_free(unused[~known])
        self.allocator.put_idle(unused[known])

    def reset_index(self, adapter: str | None = None) -> int:
        """Forget cached contents; idle blocks become free. Returns how many blocks were known."""
        if self.index is None:
            return 0
        known = self.index.reset(adapter)
        idle = known[self._references[known] == 0]
        self.allocator.forget(idle)
        return int(known.size)

    def check(self) -> None:
        """Raise PoolError unless free + idle + in use is the whole pool and counts agree. For tests and debugging."""
        in_use = int((self._references > 0).sum())
        free, idle = self.allocator.num_free, self.allocator.num_idle
        if in_use != self.num_in_use or free + idle + in_use != self.num_usable:
            raise PoolError(
                f"ledger broken: {free} free + {idle} idle + {in_use} in use (counted {self.num_in_use}), "
                f"expected {self.num_usable}"
            )
