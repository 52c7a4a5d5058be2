"""Ways for a prefix cache to be wrong. The kit must notice each in the test named for it."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from enginectl.engine.commit import Committer
from enginectl.engine.core_loop import EngineCore
from enginectl.engine.ledger import BlockPool
from enginectl.interfaces.executor import StepPlan
from enginectl.interfaces.kv import BlockIds, BlockKey
from enginectl.testing.dict_index import DictPrefixIndex


class NoParent(DictPrefixIndex):
    """A block is known by its own tokens, whatever comes before it."""

    def _name(self, token_ids: NDArray[np.int32], end: int, key: BlockKey) -> tuple[BlockKey, bytes]:
        return super()._name(token_ids[end - self._block_size : end], self._block_size, key)


class NoSalt(DictPrefixIndex):
    """The salt is left out of the key."""

    def _name(self, token_ids: NDArray[np.int32], end: int, key: BlockKey) -> tuple[BlockKey, bytes]:
        return super()._name(token_ids, end, replace(key, salt=None))


class NoTags(DictPrefixIndex):
    """Adapter, version and salt are joined without tags."""

    def _name(self, token_ids: NDArray[np.int32], end: int, key: BlockKey) -> tuple[BlockKey, bytes]:
        joined = "".join(part for part in (key.adapter, key.adapter_version, key.salt) if part)
        return super()._name(token_ids, end, BlockKey(salt=joined))


class _EarlyCommitter(Committer):
    def publish(self, plan: StepPlan) -> None:
        """As if every computed token were verified."""
        t = self.table
        verified = t.num_tokens[plan.rows].copy()
        t.num_tokens[plan.rows] = plan.num_computed + plan.num_tokens + 2
        super().publish(plan)
        t.num_tokens[plan.rows] = verified


class PublishesEarly(EngineCore):
    """Blocks are published as soon as they are computed, drafts included."""

    committer_type = _EarlyCommitter


class PublishesAcrossReloads(EngineCore):
    """Rows that run while an adapter is replaced go on publishing."""

    def reset_prefix_cache(self, adapter: str | None = None) -> int:
        """The index alone forgets."""
        self.drain()
        return self.pool.reset_index(adapter)


class EvictsInUse(BlockPool):
    """A second reader is not counted: when the first one leaves, the block is idle, and soon somebody else's."""

    def share(self, ids: BlockIds) -> None:
        """One reference, however many share."""
        super().share(ids)
        self._references[ids] = 1

    def release(self, ids: BlockIds) -> None:
        """Releases what is still held, and does not mind what is not."""
        super().release(ids[self._references[ids] > 0])


class EvictsHeadsFirst(BlockPool):
    """A sequence's blocks become idle head first."""

    def release(self, ids: BlockIds) -> None:
        """In the wrong order."""
        super().release(ids[::-1])
