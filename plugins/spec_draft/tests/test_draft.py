"""A draft model in an engine: what it proposes, what it costs, and what is refused at start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginectl import Engine, SamplingParams
from enginectl.errors import ConfigError
from enginectl.testing.tiny_models import save_tiny_model

CutModel = Callable[[Path, int], Path]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("target") / "model")


def engine_of(target: Path, draft: Path, *, options: dict[str, Any] | None = None, **config: Any) -> Engine:
    section = {"model": str(draft), **(options or {})}
    common = {"max_num_seqs": 8, "block_size": 4, "dtype": "float32", "num_threads": 1}
    return Engine(str(target), plugins=["draft"], plugin_options={"draft": section}, **{**common, **config})


def prompts(num: int, longest: int = 40) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(3, 250, random.integers(2, longest)).tolist() for _ in range(num)]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"seed": 5}, {"seed": 5, "top_p": 0.9, "temperature": 1.5}])
def test_a_draft_model_equal_to_the_target_is_always_right(target: Path, sampling: dict[str, Any]) -> None:
    """Coupled noise: sampled rows too. What is rejected would be a stale or missing key, a wrong position, other noise."""
    with engine_of(target, target, overlap_depth=0) as engine:
        engine.generate(prompts(8), SamplingParams(max_tokens=40, speculation=4, ignore_eos=True, **sampling))
        stats = engine.stats()
        assert stats.num_drafted > 150
        assert stats.num_accepted == stats.num_drafted
        assert stats.num_steps < 8 * 40 / 8


def test_uncoupled_drafts_are_right_less_often(target: Path) -> None:
    shares = []
    for coupled in (True, False):
        with engine_of(target, target, options={"coupled": coupled}) as engine:
            engine.generate(prompts(8), SamplingParams(max_tokens=24, speculation=4, seed=1, ignore_eos=True))
            stats = engine.stats()
            shares.append(stats.num_accepted / stats.num_drafted)
    assert shares[0] == 1.0
    assert shares[1] < 0.7


def test_it_catches_up_in_chunks(target: Path) -> None:
    """A prompt longer than the budget is read over several steps, and so is what was written while drafts were off."""
    long = prompts(1, 150)[0] * 4
    with engine_of(target, target, max_num_batched_tokens=16, max_num_seqs=2) as engine:
        engine.generate([long[:120]], SamplingParams(max_tokens=40, speculation=3, temperature=0.0, ignore_eos=True))
        stats = engine.stats()
        assert stats.num_drafted == stats.num_accepted > 15


def test_after_preemption_drafts_are_right_again(target: Path) -> None:
    with engine_of(target, target, num_gpu_blocks_override=40, max_model_len=72) as engine:
        engine.generate(prompts(8, 30), SamplingParams(max_tokens=30, speculation=3, temperature=0.0, ignore_eos=True))
        stats = engine.stats()
        assert stats.num_preemptions > 0
        assert stats.num_drafted == stats.num_accepted > 20
        engine.core.pool.check()


def test_its_pages_count_in_the_capacity(target: Path, cut_model: CutModel) -> None:
    memory = 1 << 20
    with Engine(str(target), kv_cache_memory_bytes=memory, block_size=4, dtype="float32") as engine:
        plain = engine.info
    with engine_of(target, cut_model(target, 1), kv_cache_memory_bytes=memory, max_num_seqs=256) as engine:
        assert engine.info.kv_bytes_per_token * 3 == plain.kv_bytes_per_token * 4, "three layers, and one"
        assert engine.info.num_kv_tokens == memory // (engine.info.kv_bytes_per_token * 4) * 4 < plain.num_kv_tokens
        stored = [*engine._assembled.executor.kv, *engine._assembled.parts["speculator"]._store.kv]  # type: ignore[attr-defined]
        assert len(stored) == 4


def test_another_vocabulary_is_refused(target: Path, tmp_path: Path) -> None:
    draft = save_tiny_model("llama", tmp_path / "draft", vocab_size=400)
    with pytest.raises(ConfigError, match="400 tokens, the target's 320"):
        engine_of(target, draft)


def test_another_tokenizer_is_refused(target: Path, tmp_path: Path) -> None:
    draft = save_tiny_model("llama", tmp_path / "draft")
    file = draft / "tokenizer.json"
    file.write_text(file.read_text().replace("<pad>", "<gap>"))
    with pytest.raises(ConfigError, match=r"'<(pad|gap)>'"):
        engine_of(target, draft)


def test_a_shorter_context_is_refused(target: Path, tmp_path: Path) -> None:
    draft = save_tiny_model("llama", tmp_path / "draft", max_position_embeddings=64)
    with pytest.raises(ConfigError, match="made for 64 tokens"):
        engine_of(target, draft)
    with engine_of(target, draft, max_model_len=64) as engine:
        assert engine.config.max_model_len == 64


def test_drafts_longer_than_the_context_are_refused(target: Path) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens is 20, and sequences have at most 16 tokens"):
        engine_of(target, target, options={"num_speculative_tokens": 20}, max_model_len=16)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"method": "draft"}, "model"),
        ({"method": "draft", "model": "x", "num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"method": "draft", "model": "/nowhere"}, "nowhere"),
        ({"method": "drift", "model": "x"}, "drift"),
        ({"method": "draft", "model": "x", "drafts": 3}, "drafts"),
    ],
)
def test_a_bad_configuration_is_refused(target: Path, config: dict[str, Any], word: str) -> None:
    with pytest.raises(Exception, match=word):
        Engine(str(target), speculative_config=config)
