"""A loop without a model whose pages depend on everything before them, around a prefix index that is watched.

`ChainedExecutor` computes a page's word from the token, the word before it and the adapter's contents, as keys and values
do: a block found for another prefix, or one that is overwritten while somebody reads it, changes tokens. `WatchedIndex`
checks what each hit promises. `cached_loop` wires both; `chained_tokens` is what a choice must get.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from enginectl.builtin.allocator_paged import PagedAllocator
from enginectl.builtin.scheduler_fcfs import FcfsScheduler
from enginectl.engine.admission import Admission
from enginectl.engine.batch import RowTable
from enginectl.engine.core_loop import EngineCore
from enginectl.engine.deferred import DeferredExecutor
from enginectl.engine.ledger import BlockPool
from enginectl.engine.rows import Packed
from enginectl.errors import NotFoundError
from enginectl.interfaces.adapter import AdapterBackend, AdapterInfo
from enginectl.interfaces.executor import NewRow
from enginectl.interfaces.kv import BlockIds, BlockKey, FilledRows, KVGroup, KVLayout, PrefixIndex, PrefixMatch
from enginectl.interfaces.model import Model
from enginectl.testing.free_executor import FreeExecutor, FreeLoop, IntRows, Words

MakeIndex = Callable[[int, int], PrefixIndex]
"""(num_blocks, block_size) to an index. num_blocks counts the null block."""

MakeLoop = Callable[..., "CachedLoop"]

BLOCK_SIZE, VOCAB_SIZE, MAX_MODEL_LEN = 4, 16, 96
_MASK = (1 << 64) - 1


def content_of(version: str | None) -> int:
    """What weights add to every word; none for the base model."""
    return 0 if version is None else zlib.crc32(version.encode()) + 1


def next_word(word: int, token: int, content: int) -> int:
    """What a page holds of a token, after a page that holds `word`."""
    mixed = (word * 0x9E3779B97F4A7C15 + (token + 1) * 0xD1B54A32D192ED03 + content * 0x2545F4914F6CDD1D) & _MASK
    return mixed ^ (mixed >> 29)


def chained_words(token_ids: Sequence[int], content: int) -> list[int]:
    """What the pages of these tokens hold."""
    words, word = [], 0
    for token in token_ids:
        word = next_word(word, int(token), content)
        words.append(word)
    return words


@functools.lru_cache(maxsize=4096)
def last_words(prefix: bytes, content: int) -> list[int]:
    """What the last block of a prefix of whole blocks holds. prefix: int32 bytes."""
    return chained_words(np.frombuffer(prefix, np.int32).tolist(), content)[-BLOCK_SIZE:]


def chosen_token(state: int) -> int:
    """The token after pages whose words add up to `state`."""
    state = ((state ^ (state >> 31)) * 0xBF58476D1CE4E5B9) & _MASK
    return (state >> 33) % VOCAB_SIZE


def chained_tokens(prompt: Sequence[int], max_tokens: int, *, version: str | None = None) -> list[int]:
    """The output that a choice must get, computed without pages."""
    content, found = content_of(version), list[int]()
    words = chained_words(prompt, content)
    state, word = sum(words) & _MASK, words[-1]
    while len(found) < max_tokens:
        found.append(chosen_token(state))
        word = next_word(word, found[-1], content)
        state = (state + word) & _MASK
    return found


class SlotAdapters(AdapterBackend):
    """Adapters that are a version each. Replacing one changes the slot under the rows that use it: the worst case."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.versions = dict.fromkeys(names, "1")

    def attach(self, model: Model) -> None:
        """There is no model."""

    def load(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        """The path is the version."""
        self.versions[name] = path
        return AdapterInfo(name, path, 8, path)

    def unload(self, name: str) -> None:
        """Not used."""
        raise NotFoundError(f"no adapter {name!r}")

    def list(self) -> tuple[AdapterInfo, ...]:
        """All of them."""
        return tuple(AdapterInfo(name, version, 8, version) for name, version in self.versions.items())

    def acquire(self, name: str) -> int | None:
        """Its own slot, always free."""
        return self.names.index(name)

    def release(self, slot: int) -> None:
        """Nothing is counted."""

    def begin_step(self, slots: object) -> None:
        """Nothing is prepared."""

    def content(self, slot: int) -> int:
        """What the slot's adapter adds now."""
        return content_of(None if slot < 0 else f"{self.names[slot]}@{self.versions[self.names[slot]]}")


class ChainedExecutor(FreeExecutor):
    """Pages that depend on the whole prefix and on the adapter."""

    def __init__(self, max_num_seqs: int, *, num_drafts: int, adapters: SlotAdapters) -> None:
        super().__init__(max_num_seqs, MAX_MODEL_LEN, BLOCK_SIZE, vocab_size=VOCAB_SIZE, num_drafts=num_drafts)
        self.adapters = adapters
        self._slots = np.full(max_num_seqs, -1, np.int32)

    def words_of(self, block: int) -> list[int]:
        """What a block holds now."""
        words: list[int] = self._store[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE].tolist()
        return words

    def _add(self, new: NewRow) -> None:
        super()._add(new)
        self._slots[new.row] = new.adapter_slot

    def _slot(self, row: int, position: int) -> int:
        block, offset = divmod(position, BLOCK_SIZE)
        return int(self.rows.block_table[0, row, block]) * BLOCK_SIZE + offset

    def _write(self, packed: Packed) -> None:
        for row, position in zip(packed.token_rows.tolist(), packed.positions.tolist(), strict=True):
            before = int(self._store[self._slot(row, position - 1)]) if position else 0
            token, content = int(self.rows.token_ids[row, position]), self.adapters.content(int(self._slots[row]))
            slot = self._slot(row, position)
            assert slot >= BLOCK_SIZE, "a step wrote to the null block"
            self._store[slot] = next_word(before, token, content)

    def _sample(self, rows: IntRows, positions: IntRows) -> IntRows:
        return np.array([chosen_token(state) for state in self._states(rows, positions).tolist()], np.int32)

    def _draft(self, rows: IntRows, num_tokens: IntRows, limits: IntRows) -> IntRows:
        """Two of three are what the target will choose."""
        counts = np.minimum(limits, self._num_drafts).astype(np.int32)
        states: Words = self._states(rows, num_tokens - 2)
        for row, n, state, count in zip(
            rows.tolist(), num_tokens.tolist(), states.tolist(), counts.tolist(), strict=True
        ):
            word, content = int(self._store[self._slot(row, n - 2)]), self.adapters.content(int(self._slots[row]))
            for position in range(n - 1, n - 1 + count):
                word = next_word(word, int(self.rows.token_ids[row, position]), content)
                state = (state + word) & _MASK
                wrong = position % 3 == 2
                self.rows.token_ids[row, position + 1] = (chosen_token(state) + wrong) % VOCAB_SIZE
        return counts


class WatchedIndex(PrefixIndex):
    """Passes everything on, and remembers what each published block was said to hold."""

    def __init__(self, inner: PrefixIndex) -> None:
        self.inner = inner
        self.num_hits = 0
        self.num_partial_hits = 0
        self.num_evicted = 0
        self.said: dict[int, tuple[BlockKey, bytes]] = {}
        self.live: set[int] = set()

    def match(self, sequence: int, token_ids: NDArray[np.int32], key: BlockKey) -> PrefixMatch:
        """Each block found was published for exactly this prefix and key."""
        self.live.add(sequence)
        match = self.inner.match(sequence, token_ids, key)
        assert match.num_tokens == match.blocks.size * BLOCK_SIZE, "a match is whole blocks"
        for i, block in enumerate(match.blocks.tolist(), 1):
            assert self.said.get(block) == (key, token_ids[: i * BLOCK_SIZE].tobytes()), (
                f"block {block} was found for a prefix that it does not hold"
            )
        self.num_hits += match.blocks.size > 0
        self.num_partial_hits += 0 < match.blocks.size < len(token_ids) // BLOCK_SIZE
        return match

    def publish(self, sequence: int, token_ids: NDArray[np.int32], blocks: BlockIds, start: int, key: BlockKey) -> None:
        """Remember what the inner index took."""
        self.inner.publish(sequence, token_ids, blocks, start, key)
        self._note(sequence, token_ids, blocks, start, key)

    def publish_rows(self, filled: FilledRows) -> None:
        """The same, the inner index's own way."""
        self.inner.publish_rows(filled)
        for one in filled.each():
            self._note(*one)

    def _note(self, sequence: int, token_ids: NDArray[np.int32], blocks: BlockIds, start: int, key: BlockKey) -> None:
        self.live.add(sequence)
        taken = self.inner.is_published(blocks[start:])
        for i, block in enumerate(blocks[start:].tolist(), start + 1):
            if taken[i - start - 1]:
                self.said[block] = (key, token_ids[: i * BLOCK_SIZE].tobytes())

    def is_published(self, ids: BlockIds) -> NDArray[np.bool_]:
        """As the inner index says."""
        return self.inner.is_published(ids)

    def forget(self, ids: BlockIds) -> None:
        """Evicted."""
        self.num_evicted += ids.size
        self.inner.forget(ids)
        for block in ids.tolist():
            del self.said[block]

    def end(self, sequence: int) -> None:
        """The sequence is gone."""
        self.live.discard(sequence)
        self.inner.end(sequence)

    def reset(self, adapter: str | None = None) -> BlockIds:
        """What the inner index forgot."""
        gone = self.inner.reset(adapter)
        for block in gone.tolist():
            del self.said[block]
        return gone


class CachedLoop(FreeLoop):
    """A `FreeLoop` that checks, after every step, that published blocks hold what was said of them."""

    executor: ChainedExecutor

    def __init__(self, core: EngineCore, executor: ChainedExecutor, deferred: DeferredExecutor | None) -> None:
        super().__init__(core, executor, deferred)
        assert isinstance(core.pool.index, WatchedIndex), "wired by cached_loop"
        self.index = core.pool.index

    @property
    def adapters(self) -> SlotAdapters:
        """What requests may name."""
        return self.executor.adapters

    def step(self) -> None:
        """One step; then the ledger agrees, and so do the pages."""
        super().step()
        self.check()

    def check(self) -> None:
        """Every block that could be found holds its prefix's words."""
        for block, (key, prefix) in self.index.said.items():
            version = None if key.adapter is None else f"{key.adapter}@{key.adapter_version}"
            expected = last_words(prefix, content_of(version))
            assert self.executor.words_of(block) == expected, f"block {block} does not hold what the index says"

    def reload(self, name: str, version: str) -> None:
        """Replace an adapter, as the control message does."""
        self.core.drain()
        self.adapters.load(name, version, replace=True)
        self.core.reset_prefix_cache(name)


def cached_loop(
    make_index: MakeIndex,
    *,
    depth: int = 0,
    num_drafts: int = 0,
    num_blocks: int = 40,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 24,
    adapters: Sequence[str] = ("blue", "red"),
    pool_type: type[BlockPool] = BlockPool,
    core_type: type[EngineCore] = EngineCore,
) -> CachedLoop:
    """The real loop, scheduler, allocator and ledger. num_blocks: usable ones."""
    backend = SlotAdapters(*adapters)
    executor = ChainedExecutor(max_num_seqs, num_drafts=num_drafts, adapters=backend)
    deferred = DeferredExecutor(executor) if depth else None
    runs = deferred or executor
    runs.allocate(KVLayout((KVGroup((0,), None, 8 * BLOCK_SIZE),), BLOCK_SIZE, num_blocks + 1, "float32"))
    index = WatchedIndex(make_index(num_blocks + 1, BLOCK_SIZE))
    pool = pool_type(num_blocks + 1, PagedAllocator(num_blocks + 1), index)
    core = core_type(
        scheduler=FcfsScheduler(),
        pool=pool,
        executor=runs,
        table=RowTable(max_num_seqs, MAX_MODEL_LEN, BLOCK_SIZE),
        admission=Admission(pool, block_size=BLOCK_SIZE, adapters=backend, max_drafts=num_drafts),
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=max_num_batched_tokens,
        max_drafts=num_drafts,
        overlap_depth=depth,
    )
    return CachedLoop(core, executor, deferred)
