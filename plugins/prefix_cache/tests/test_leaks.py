"""Nothing grows with the number of requests served."""

from __future__ import annotations

import gc
from collections import Counter

import numpy as np
import pytest

from enginectl.testing.free_executor import free_core, free_request
from enginectl_prefix_cache.hashing import make_hasher
from enginectl_prefix_cache.index import HashPrefixIndex

NUM_BLOCKS = 128


def live_objects() -> Counter[str]:
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
def test_live_objects_are_flat_over_100_000_requests(depth: int) -> None:
    """Law 14: after the first 10,000, which fill the pool and the caches of the interpreter."""
    index = HashPrefixIndex(NUM_BLOCKS + 1, 4, make_hasher("sha256"))
    loop = free_core(
        index=index, num_blocks=NUM_BLOCKS, max_num_seqs=64, max_num_batched_tokens=512, overlap_depth=depth
    )
    random = np.random.default_rng(0)
    heads = random.integers(0, 64, (50, 12))
    before: Counter[str] = Counter()
    for batch in range(1000):
        for key in range(100 * batch, 100 * batch + 100):
            prompt = [*heads[random.integers(50)].tolist(), *random.integers(0, 64, 3).tolist()]
            salt = str(key) if key % 10 == 0 else None
            loop.core.add(free_request(key, prompt, 3, cache_salt=salt))
        loop.run()
        loop.answers.tokens.clear()
        loop.answers.finished.clear()
        assert index.num_sequences == 0
        assert max(map(len, (index._by_digest, index._extras))) <= NUM_BLOCKS
        if batch == 99:
            before = live_objects()
    grown = live_objects() - before
    assert all(count < 100 for count in grown.values()), grown
    stats = loop.core.stats()
    assert stats.num_blocks_in_use == 0
    assert stats.num_blocks_idle == index.num_published > 0
    assert 0 < stats.prefix_hits < stats.prefix_queries
    loop.core.reset_prefix_cache()
    assert not any((index._by_digest, index._extras, index._adapters, any(index._known)))
    assert loop.core.stats().num_blocks_idle == 0
    loop.close()
