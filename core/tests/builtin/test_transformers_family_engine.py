"""Models that cannot run packed, in the engine: small budgets, small pools, neighbours that come, go and fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from enginectl import Engine, RequestOutput, SamplingParams
from enginectl.engine.deferred import DeferredExecutor
from enginectl.engine.runner import LocalRunner
from enginectl.errors import OutOfMemoryError, UnsupportedError
from enginectl.interfaces.sampler import LogitsProcessor, SampleBatch
from enginectl.testing.architectures import ARCHITECTURES, ONE_BY_ONE, SOME_BY_ROUTE, STATES
from enginectl.testing.dict_index import DictPrefixIndex
from enginectl.testing.tiny_models import save_tiny_model, tiny_model
from enginectl.testing.toys import ConstantSpeculator

MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
WHOLE = {name for name, each in ARCHITECTURES.items() if each.whole_prompts}
STATE_POOL, ONE_SEQUENCE = SOME_BY_ROUTE[STATES], SOME_BY_ROUTE[ONE_BY_ONE]
EVERY = sorted((*STATE_POOL, *ONE_SEQUENCE))
SOME = ["qwen3_next", "mamba2", "lfm2", "bloom", "gpt_neo"]
DEPTHS = pytest.mark.parametrize("depth", [0, 1])
Directory = Callable[[str], Path]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Directory:
    """`directory(name)` is that of a tiny model, written once."""
    return cache(lambda name: save_tiny_model(name, tmp_path_factory.mktemp("models") / name))


def prompts(num: int = 7) -> list[list[int]]:
    random = np.random.default_rng(1)
    lengths = [1, 2, *random.integers(3, 38, num - 2)]
    return [random.integers(3, 250, length).tolist() for length in lengths]


@cache
def generated(name: str) -> list[tuple[int, ...]]:
    """What the library's own generation says, one prompt at a time."""
    model = tiny_model(name)
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS, pad_token_id=0
        )
        outputs.append(tuple(out[0, len(prompt) :].tolist()))
    return outputs


def engine_of(model: Path, depth: int = 0, **options: Any) -> Engine:
    fixed = {"max_num_seqs": 4, "block_size": 4, "dtype": "float32", "max_model_len": 64}
    return Engine(str(model), overlap_depth=depth, num_threads=1, **{"only_plugins": True, **fixed, **options})


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def ids(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    assert all(output.error is None for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


def at_rest(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_blocks_in_use, stats.num_running, stats.num_waiting) == (0, 0, 0)
    engine.core.pool.check()


def runner(engine: Engine) -> LocalRunner:
    executor = engine.core.executor
    inner = executor.inner if isinstance(executor, DeferredExecutor) else executor
    assert isinstance(inner, LocalRunner)
    return inner


@DEPTHS
@pytest.mark.parametrize("name", EVERY)
def test_greedy_equals_generate(name: str, depth: int, directory: Directory) -> None:
    """Law 1: more requests than rows, prompts in chunks of at most 16 tokens beside rows that decode."""
    budget = {} if name in WHOLE else {"max_num_batched_tokens": 16}
    with engine_of(directory(name), depth, **budget) as engine:
        widths = seen_widths(runner(engine))
        assert ids(engine.generate(prompts(), GREEDY)) == generated(name)
        at_rest(engine)
    assert any(1 in step and max(step) > 1 for step in widths), "prompts and single tokens share steps"
    assert any(step.count(1) > 1 for step in widths), "several rows decode together"


def seen_widths(local: Any) -> list[list[int]]:
    """Tokens of each row of each step that is run from now on."""
    seen: list[list[int]] = []
    forward = local._forward

    def watch(step: Any) -> Any:
        seen.append(np.diff(step.batch.query_start_host).tolist())
        return forward(step)

    local._forward = watch
    return seen


@DEPTHS
@pytest.mark.parametrize("name", [*SOME, "jamba"])
def test_preemption_changes_no_token(name: str, depth: int, directory: Directory) -> None:
    """Laws 1 and 14: rows that give way are computed again from their first token."""
    budget = {} if name in WHOLE else {"max_num_batched_tokens": 16}
    with engine_of(directory(name), depth, num_gpu_blocks_override=18, **budget) as engine:
        assert ids(engine.generate(prompts(), GREEDY)) == generated(name)
        assert engine.stats().num_preemptions > 0
        at_rest(engine)


@DEPTHS
@pytest.mark.parametrize("name", SOME)
def test_an_abort_in_between_changes_no_token(name: str, depth: int, directory: Directory) -> None:
    """Law 13: the rows of those who left are held by others, who go on from nothing."""
    with engine_of(directory(name), depth, max_num_batched_tokens=16) as engine:
        leaving = engine._submit(engine._requests([list(range(5, 25)), [7, 8]], GREEDY, {}))
        for _ in range(3):
            engine._step()
        engine._abort(leaving)
        assert ids(engine.generate(prompts(), GREEDY)) == generated(name)
        at_rest(engine)


@DEPTHS
@pytest.mark.parametrize("name", SOME)
def test_a_seed_gives_the_same_tokens_whatever_the_neighbours(name: str, depth: int, directory: Directory) -> None:
    """Law 4: and choices of one request differ, each with its own state."""
    two = SamplingParams(seed=5, n=2, temperature=1.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with engine_of(directory(name), depth, max_num_batched_tokens=16) as engine:
        alone = engine.generate([prompts()[2]], two)[0]
        outputs = engine.generate(prompts(), [GREEDY, GREEDY, two, *[GREEDY] * 4])
        at_rest(engine)
    assert alone.outputs[0].token_ids != alone.outputs[1].token_ids
    assert [c.token_ids for c in outputs[2].outputs] == [c.token_ids for c in alone.outputs]
    assert ids([*outputs[:2], *outputs[3:]]) == [*generated(name)[:2], *generated(name)[3:]]


class Sometimes(LogitsProcessor):
    """Raises after the forward, in every third step: that step's rows are all run again, in halves."""

    def __init__(self) -> None:
        self.num_raised = self.num_steps = 0
        self.rows: set[int] = set()

    def add_row(self, row: int, params: SamplingParams, seed: int, choice: int, prompt_len: int) -> None:
        self.rows.add(row)

    def remove_row(self, row: int) -> None:
        self.rows.discard(row)

    def is_active(self, rows: NDArray[np.int32]) -> bool:
        return True

    def needs_logits(self, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        return np.ones(rows.size, np.bool_)

    def apply(self, logits: Tensor, batch: SampleBatch) -> None:
        self.num_steps += 1
        if self.num_steps % 3 == 0 and batch.rows.size > 2:
            self.num_raised += 1
            raise LookupError("not this time")


@DEPTHS
@pytest.mark.parametrize("name", SOME)
def test_steps_that_are_run_again_change_no_token(name: str, depth: int, directory: Directory) -> None:
    """Law 14a: a state is not advanced twice by a step that raised behind its forward."""
    toy = Sometimes()
    with engine_of(directory(name), depth, max_num_batched_tokens=16, logits_processor=toy) as engine:
        assert ids(engine.generate(prompts(), GREEDY)) == generated(name)
        at_rest(engine)
    assert toy.num_raised > 2


def test_speculation_over_a_state_is_refused(directory: Directory) -> None:
    """A rejected draft cannot be taken back out of it. Pages have no such trouble."""
    with pytest.raises(UnsupportedError, match=r"Lfm2ForCausalLM carries a recurrent state.*rejected draft"):
        engine_of(directory("lfm2"), speculator=ConstantSpeculator())
    with engine_of(directory("bloom"), speculator=ConstantSpeculator(), max_num_batched_tokens=16) as engine:
        assert ids(engine.generate(prompts(), GREEDY)) == generated("bloom")
        at_rest(engine)


def test_a_prefix_cache_over_a_state_is_refused(directory: Directory) -> None:
    """Blocks are not all that a prefix leaves behind. Where they are, hits change no token."""
    with pytest.raises(UnsupportedError, match=r"recurrent state.*--no-enable-prefix-caching"):
        engine_of(directory("mamba2"), prefix_index=DictPrefixIndex(4))
    with engine_of(directory("gpt_neo"), prefix_index=DictPrefixIndex(4)) as engine:
        for _ in range(2):
            assert ids(engine.generate(prompts(), GREEDY)) == generated("gpt_neo")
        assert engine.stats().prefix_hits > 0
        at_rest(engine)


def test_the_prefix_cache_is_off_unless_asked_for(directory: Directory, caplog: pytest.LogCaptureFixture) -> None:
    """Installed, it serves other models without a word."""
    caplog.set_level("INFO", logger="enginectl.compose")
    with engine_of(directory("lfm2"), only_plugins=False) as engine:
        assert ids(engine.generate(prompts(), GREEDY)) == generated("lfm2")
    assert "the prefix cache is off: Lfm2ForCausalLM" in caplog.text


def test_chunked_prefill_is_off_where_prompts_must_be_whole(
    directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so."""
    with engine_of(directory("mamba")) as engine:
        assert not engine.config.enable_chunked_prefill
    assert "chunked prefill is off: MambaForCausalLM" in caplog.text


def test_memory_holds_the_state_of_every_row(directory: Directory) -> None:
    """Capacity is what the states leave; where they do not fit, the way out is named."""
    state = 4 * spec_bytes(directory("qwen3_next"))
    memory = state + 100_000
    with engine_of(directory("qwen3_next"), kv_cache_memory_bytes=memory) as engine:
        layout = engine.core.pool
        block = 4 * 4 * 2 * 2 * 16  # bytes x tokens x keys and values x heads x width, of one layer
        assert layout.num_blocks - 1 <= 100_000 // block
    with pytest.raises(OutOfMemoryError, match=r"recurrent state of --max-num-seqs 4 \("):
        engine_of(directory("qwen3_next"), kv_cache_memory_bytes=state - 1)


def spec_bytes(model: Path) -> int:
    with engine_of(model) as engine:
        return runner(engine).model.spec.state_bytes_per_row
