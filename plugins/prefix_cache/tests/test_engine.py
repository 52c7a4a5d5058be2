"""The whole engine with a tiny model: the same tokens with and without the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from enginectl import Engine, SamplingParams
from enginectl.errors import EnginectlError
from enginectl.interfaces.speculator import DraftBatch, Speculator
from enginectl.types import EngineStats

Prompts = list[list[int]]


class Recall(Speculator):
    """Drafts what it has been told comes next, with each third position spoilt."""

    max_drafts = 3

    def __init__(self, known: dict[tuple[int, ...], list[int]]) -> None:
        self._known = known
        self._rows: dict[int, list[int]] = {}

    def add_row(self, row: int, token_ids: NDArray[np.int32], params: SamplingParams) -> None:
        tokens = tuple(token_ids.tolist())
        prompt = next(tokens[:n] for n in range(len(tokens), 0, -1) if tokens[:n] in self._known)
        self._rows[row] = [*prompt, *self._known[prompt], *[5] * self.max_drafts]

    def remove_row(self, row: int) -> None:
        del self._rows[row]

    def propose(self, batch: DraftBatch) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        drafts = np.zeros((batch.rows.size, self.max_drafts), np.int32)
        for i, (row, n) in enumerate(zip(batch.rows.tolist(), batch.num_tokens.tolist(), strict=True)):
            known = self._rows[row][n : n + self.max_drafts]
            drafts[i, : len(known)] = [(t + 1) % 250 if (n + j) % 3 == 2 else t for j, t in enumerate(known)]
        return drafts, batch.limit.astype(np.int32)


def workload(seed: int) -> tuple[Prompts, list[SamplingParams]]:
    """Prompts that begin alike, greedy and seeded."""
    random = np.random.default_rng(seed)
    heads = random.integers(3, 250, (3, 40)).tolist()
    prompts, params = [], []
    for i in range(18):
        head = heads[random.integers(3)][: random.integers(0, 41)]
        prompts.append([*head, *random.integers(3, 250, random.integers(1, 6)).tolist()])
        temperature = 0.0 if i % 2 else 0.8
        params.append(
            SamplingParams(temperature=temperature, seed=i, max_tokens=int(random.integers(8, 44)), ignore_eos=True)
        )
    return prompts, params


def run(model: Path, rounds: int, **options: Any) -> tuple[list[list[tuple[int, ...]]], EngineStats, list[int]]:
    """Each round's workload twice; a reset in between rounds. Returns tokens, statistics, cached tokens by request."""
    small = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "block_size": 4, "max_model_len": 128, "dtype": "float32"}
    tokens, cached = [], []
    with Engine(str(model), **small, num_gpu_blocks_override=38, **options) as engine:
        for round_ in range(rounds):
            prompts, params = workload(round_)
            for _ in range(2):
                outputs = engine.generate(prompts, params)
                tokens.append([output.outputs[0].token_ids for output in outputs])
                cached += [output.usage.cached_tokens for output in outputs]
            engine.core.pool.check()
            assert engine.stats().num_blocks_in_use == 0
            if engine.core.pool.index is not None:
                assert engine.core.reset_prefix_cache() > 0
            assert engine.stats().num_blocks_idle == 0
        return tokens, engine.stats(), cached


@pytest.fixture(scope="module")
def plain(model: Path) -> list[list[tuple[int, ...]]]:
    """Tokens without the cache."""
    tokens, stats, cached = run(model, 2, enable_prefix_caching=False, overlap_depth=0)
    assert stats.prefix_queries == sum(cached) == 0
    return tokens


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("speculates", [False, True], ids=["plain", "speculating"])
def test_tokens_are_those_without_the_cache(
    model: Path, plain: list[list[tuple[int, ...]]], depth: int, speculates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Laws 1, 2 and 19, greedy and seeded: hits, partial hits, evictions, preemptions and resets happen."""
    from enginectl_prefix_cache.index import HashPrefixIndex

    evicted: list[int] = []
    forget = HashPrefixIndex.forget
    monkeypatch.setattr(HashPrefixIndex, "forget", lambda self, ids: (evicted.append(ids.size), forget(self, ids))[1])
    options: dict[str, Any] = {"overlap_depth": depth, "plugins": ["prefix-cache"]}
    if speculates:
        asked = [prompt for round_ in range(2) for prompt in workload(round_)[0]]
        answers = [list(tokens) for round_ in range(2) for tokens in plain[2 * round_]]
        options["speculator"] = Recall({tuple(p): a for p, a in zip(asked, answers, strict=True)})
    tokens, stats, cached = run(model, 2, **options)
    assert tokens == plain
    assert sum(size > 0 for size in evicted) > 2, "two of them are the resets"
    assert stats.num_preemptions > 0
    assert 0 < stats.prefix_hits < stats.prefix_queries
    prompts = [len(prompt) for round_ in (0, 0, 1, 1) for prompt in workload(round_)[0]]
    assert any(0 < hit < (n - 1) // 4 * 4 for hit, n in zip(cached, prompts, strict=True)), "a partial hit"
    assert any(hit == (n - 1) // 4 * 4 > 0 for hit, n in zip(cached, prompts, strict=True)), "a full hit"
    if speculates:
        assert 0 < stats.num_accepted < stats.num_drafted


def test_a_shared_prefix_of_a_thousand_tokens(model: Path) -> None:
    """62 blocks of 16 are found, 992 tokens; 8 are computed again. Another salt, or none, finds nothing."""
    prompt = np.random.default_rng(0).integers(3, 250, 1000).tolist()
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with Engine(str(model), dtype="float32", block_size=16, max_num_batched_tokens=1024, max_num_seqs=2) as engine:
        assert engine.info.max_model_len == 2048
        first = engine.generate(prompt, greedy, cache_salt="a")[0]
        again = engine.generate(prompt, greedy, cache_salt="a")[0]
        longer = engine.generate([*prompt, 7, 8, 9], greedy, cache_salt="a")[0]
        other = engine.generate(prompt, greedy, cache_salt="b")[0]
        unsalted = engine.generate(prompt, greedy)[0]
        stats = engine.stats()
    found = [output.usage.cached_tokens for output in (first, again, longer, other, unsalted)]
    assert found == [0, 992, 992, 0, 0]
    assert stats.prefix_hits == 2 * 992
    assert {output.outputs[0].token_ids for output in (again, other, unsalted)} == {first.outputs[0].token_ids}


def test_prompt_logprobs_are_computed_whatever_is_cached(model: Path) -> None:
    """Law 10."""
    prompt = np.random.default_rng(1).integers(3, 250, 40).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0)
    with Engine(str(model), dtype="float32", block_size=4, max_num_seqs=2) as engine:
        first, again = (engine.generate(prompt, params)[0] for _ in range(2))
        assert again.prompt_logprobs is not None
        assert len(again.prompt_logprobs) == 40
        assert again.usage.cached_tokens == 0
        assert first.prompt_logprobs == again.prompt_logprobs
        assert engine.generate(prompt, SamplingParams(max_tokens=1))[0].usage.cached_tokens == 36


def test_it_serves_unless_it_is_turned_off(model: Path) -> None:
    with Engine(str(model), max_num_seqs=2) as engine:
        assert ("prefix_index", "prefix-cache", "prefix-cache") in {row[:3] for row in engine.info.table}
    with Engine(str(model), max_num_seqs=2, enable_prefix_caching=False) as engine:
        assert "prefix_index" not in {row[0] for row in engine.info.table}
        assert engine.core.pool.index is None


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "xxhash", "xxhash_cbor"])
def test_the_hash_is_chosen_by_flag(model: Path, algorithm: str) -> None:
    """Law 18."""
    with Engine(str(model), max_num_seqs=2, prefix_caching_hash_algo=algorithm) as engine:
        assert engine.core.pool.index._hasher.name == algorithm
        prompt = list(range(3, 60))
        assert [engine.generate(prompt, SamplingParams(max_tokens=1))[0].usage.cached_tokens for _ in "ab"] == [0, 48]


def test_an_unknown_hash_is_refused(model: Path) -> None:
    with pytest.raises(EnginectlError, match="sha256_cbor"):
        Engine(str(model), prefix_caching_hash_algo="sha25")
