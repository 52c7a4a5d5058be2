"""Overlap depth 1 on a device that answers later: the next step takes its tokens from the device, not from the host.

`LateReadback` stands for a GPU: nobody sees a token before its handle is waited for, and every launch and wait is noted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from enginectl import Engine, SamplingParams
from enginectl.engine import runner as runner_module
from enginectl.engine.feedback import TokenFeedback
from enginectl.engine.readback import IntRows, PinnedReadback, Readback, TokensAhead
from enginectl.engine.runner import LaunchedStep, LocalRunner
from enginectl.engine.upload import ALIGNMENT, StagedUpload
from enginectl.errors import StepError
from enginectl.interfaces.executor import StepHandle, StepPlan
from enginectl.interfaces.model import Kept
from enginectl.interfaces.sampler import LogitsProcessor, SampleBatch
from enginectl.testing.toys import ConstantSpeculator
from enginectl.types import RequestOutput

Reference = Callable[[str, Sequence[int], int], list[int]]
COMMON: dict[str, Any] = {"block_size": 4, "dtype": "float32", "num_threads": 1, "only_plugins": True}


class _Late(TokensAhead):
    def __init__(self, owner: LateReadback, token_ids: Tensor) -> None:
        self._owner = owner
        self._token_ids = token_ids.clone()
        self._was_read = False

    def wait(self) -> IntRows:
        assert not self._was_read, "read once"
        self._was_read = True
        self._owner.num_ahead -= 1
        self._owner.events.append("wait")
        return self._token_ids.numpy().astype(np.int32)


class LateReadback(Readback):
    """Tokens that are known when they are waited for. events: "launch" and "wait", in order."""

    is_deferred = True

    def __init__(self) -> None:
        self.events: list[str] = []
        self.num_ahead = 0

    def start(self, token_ids: Tensor) -> TokensAhead:
        """As a GPU, two at most."""
        self.num_ahead += 1
        assert self.num_ahead <= 2, "two buffers are all there are"
        self.events.append("launch")
        return _Late(self, token_ids)

    def waits_per_launch(self) -> list[int]:
        """How many waits lie before each launch but the first."""
        found, count = [], 0
        for event in self.events[1:]:
            count += event == "wait"
            if event == "launch":
                found.append(count)
                count = 0
        return found


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateReadback:
    """Every runner built in the test answers late."""
    readback = LateReadback()
    monkeypatch.setattr(runner_module, "readback_for", lambda device, max_tokens: readback)
    monkeypatch.setattr(runner_module, "upload_for", StagedUpload)
    return readback


def some_prompts(num: int = 9) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(3, 250, random.integers(1, 40)).tolist() for _ in range(num)]


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    assert all(output.error is None for output in outputs)
    return [list(one.token_ids) for output in outputs for one in output.outputs]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_greedy_equals_hugging_face(
    name: str, depth: int, late: LateReadback, tiny: Callable[[str], Path], hugging_face: Reference
) -> None:
    """Law 1: chunks, mixed steps, rows that come and go; input tokens come from the device at depth 1."""
    prompts = some_prompts()
    options = {"max_num_seqs": 5, "max_num_batched_tokens": 24, "overlap_depth": depth, **COMMON}
    with Engine(str(tiny(name)), **options) as engine:
        assert isinstance(engine.core.executor, LocalRunner), "not behind a thread"
        params = [SamplingParams(temperature=0.0, max_tokens=n) for n in range(6, 24, 2)]
        outputs = engine.generate(prompts, params)
        engine.core.pool.check()
    assert late.num_ahead == 0
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        assert one.max_tokens is not None
        assert list(output.outputs[0].token_ids) == hugging_face(name, prompt, one.max_tokens)


def test_preemption_changes_no_token(late: LateReadback, tiny: Callable[[str], Path], hugging_face: Reference) -> None:
    """Law 1: a row that is recomputed waits for its tokens first."""
    prompts = some_prompts(8)
    options: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": 72,
        "num_gpu_blocks_override": 40,
    }
    with Engine(str(tiny("llama")), overlap_depth=1, **options, **COMMON) as engine:
        outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24))
        assert engine.stats().num_preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == hugging_face("llama", prompt, 24)


def test_the_host_launches_the_next_step_before_it_knows_a_token(
    late: LateReadback, tiny: Callable[[str], Path]
) -> None:
    """Launch k + 1 comes before wait k: in steady decoding, one wait a launch, of the step before the last."""
    with Engine(str(tiny("llama")), max_num_seqs=4, overlap_depth=1, **COMMON) as engine:
        engine.generate(some_prompts(4), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert late.events[:2] == ["launch", "launch"]
    assert set(late.waits_per_launch()) == {0, 1}
    assert late.waits_per_launch().count(0) == 1, "the host is one step ahead all the time"


def test_the_host_stays_ahead_while_nobody_gets_drafts(late: LateReadback, tiny: Callable[[str], Path]) -> None:
    """Rows that want none, and steps that only read prompts, were waited for as if drafts were on their way."""
    options: dict[str, Any] = {"max_num_seqs": 4, "overlap_depth": 1, "max_num_batched_tokens": 16, **COMMON}
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, speculation="off")
    with Engine(str(tiny("llama")), speculator=ConstantSpeculator(), **options) as engine:
        engine.generate(some_prompts(4), params)
        assert late.waits_per_launch().count(0) == 1
        launched, launch = list[StepPlan](), engine.core._launch

        def noted(plan: StepPlan) -> StepHandle:
            launched.append(plan)
            return launch(plan)

        engine.core._launch = noted
        engine.generate([list(range(3, 67))], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    reads = [plan.has_drafts for plan in launched if not plan.samples.any()]
    assert len(reads) >= 3
    assert not any(reads)
    assert any(plan.has_drafts for plan in launched)


SEEDED = SamplingParams(temperature=1.0, seed=3, top_k=40, top_p=0.9, max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize(
    ("params", "is_ahead"),
    [
        (SEEDED, True),
        (SamplingParams(temperature=0.0, max_tokens=20, min_tokens=4, logit_bias={7: 1.0}), True),
        (SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, repetition_penalty=1.3), False),
        (SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, bad_word_ids=((5, 9),)), False),
        (SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2), False),
    ],
    ids=["seeded", "bias", "penalty", "bad-words", "logprobs"],
)
def test_what_reads_tokens_on_the_host_waits_for_them(
    params: SamplingParams, is_ahead: bool, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is the same; only rows whose sampling reads history, or that want log-probabilities, give up overlap."""
    prompts = some_prompts(4)
    answers = []
    readback = LateReadback()
    for on_late in (False, True):
        if on_late:
            monkeypatch.setattr(runner_module, "readback_for", lambda device, max_tokens: readback)
        with Engine(str(tiny("llama")), max_num_seqs=4, overlap_depth=int(on_late), **COMMON) as engine:
            outputs = engine.generate(prompts, params)
            answers.append((tokens(outputs), [output.outputs[0].logprobs for output in outputs]))
    assert answers[0] == answers[1]
    assert (readback.events[:2] == ["launch", "launch"]) is is_ahead


class _Failing:
    """A runner whose launch or finish raises at its `at`-th call, once."""

    def __init__(self, runner: LocalRunner, monkeypatch: pytest.MonkeyPatch, where: str, at: int) -> None:
        self.num_calls = 0
        plain = getattr(runner, where)

        def failing(*arguments: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == at:
                raise RuntimeError("a fault")
            return plain(*arguments)

        monkeypatch.setattr(runner, where, failing)


@pytest.mark.parametrize("where", ["_run_forward", "_place"])
@pytest.mark.parametrize("at", [2, 5, 6])
def test_a_step_that_raises_changes_no_token(
    where: str, at: int, late: LateReadback, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 14a: the step behind it is not believed, rows are run again, nothing leaks."""
    prompts = some_prompts(5)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with Engine(str(tiny("llama")), max_num_seqs=4, overlap_depth=1, **COMMON) as engine:
        expected = tokens(engine.generate(prompts, params))
        executor = engine.core.executor
        assert isinstance(executor, LocalRunner)
        fault = _Failing(executor, monkeypatch, where, at)
        assert tokens(engine.generate(prompts, params)) == expected
        assert fault.num_calls > at
        assert engine.stats().num_blocks_in_use == 0
        engine.core.pool.check()
    assert late.num_ahead == 0


class _Jealous(LogitsProcessor):
    """Raises when it is asked about a row of a request with max_tokens 9."""

    def __init__(self) -> None:
        self.rows: set[int] = set()
        self.num_raised = 0

    def add_row(self, row: int, params: SamplingParams, seed: int, choice: int, prompt_len: int) -> None:
        if params.max_tokens == 9:
            self.rows.add(row)

    def remove_row(self, row: int) -> None:
        self.rows.discard(row)

    def is_active(self, rows: NDArray[np.int32]) -> bool:
        if self.rows.intersection(rows.tolist()):
            self.num_raised += 1
            raise LookupError("is_active is broken")
        return False

    def needs_logits(self, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        return np.zeros(rows.size, np.bool_)

    def apply(self, logits: Tensor, batch: SampleBatch) -> None:
        raise AssertionError("it is never active")


def test_a_processor_that_raises_while_a_step_is_on_its_way_ends_that_row_alone(
    late: LateReadback, tiny: Callable[[str], Path], hugging_face: Reference
) -> None:
    """Law 14a: whether a step reads tokens is asked before it is launched; what that raised came out of `launch`, and
    the engine died of it.
    """
    toy = _Jealous()
    short, long = SamplingParams(temperature=0.0, max_tokens=4), SamplingParams(temperature=0.0, max_tokens=16)
    bad = SamplingParams(temperature=0.0, max_tokens=9)
    prompts = some_prompts(5)
    with Engine(str(tiny("llama")), max_num_seqs=3, overlap_depth=1, logits_processor=toy, **COMMON) as engine:
        params = [short, long, long, bad, long]
        outputs = engine.generate(prompts, params)
        assert "is_active is broken" in str(outputs[3].error)
        assert engine.stats().num_blocks_in_use == 0
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        if one is not bad:
            assert one.max_tokens is not None
            assert list(output.outputs[0].token_ids) == hugging_face("llama", prompt, one.max_tokens)
    assert toy.num_raised > 0
    assert late.num_ahead == 0


def test_steps_are_finished_in_order(
    late: LateReadback, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that cannot wait (log-probabilities) was finished before the one that it stands on: its drafts were made
    from a history without the last token.
    """
    random = np.random.default_rng(1)
    prompts = [random.integers(3, 250, n).tolist() for n in (4, 40)]
    with Engine(str(tiny("llama")), max_num_seqs=2, max_num_batched_tokens=24, overlap_depth=1, **COMMON) as engine:
        executor = engine.core.executor
        assert isinstance(executor, LocalRunner)
        plain, finished = executor._finish, list[int]()

        def noted(step: LaunchedStep) -> None:
            finished.append(step.number)
            plain(step)

        monkeypatch.setattr(executor, "_finish", noted)
        params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=n) for n in (None, 1)]
        engine.generate(prompts, params)
    assert late.events[:2] == ["launch", "launch"], "a step was on its way"
    assert finished == sorted(finished)


def test_a_step_behind_one_that_raised_is_skipped(
    late: LateReadback, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executor's contract: its handle raises, and what comes after it starts afresh."""
    handles: list[StepHandle] = []
    with Engine(str(tiny("llama")), max_num_seqs=2, overlap_depth=1, **COMMON) as engine:
        executor = engine.core.executor
        assert isinstance(executor, LocalRunner)
        plain = executor.launch
        plans: list[StepPlan] = []

        def noted(plan: StepPlan) -> StepHandle:
            plans.append(plan)
            return plain(plan)

        monkeypatch.setattr(engine.core, "_launch", noted)
        engine.generate([[5, 6]], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
        _Failing(executor, monkeypatch, "_run_forward", 1)
        again = plans[0].select(np.arange(1))
        handles = [executor.launch(again), executor.launch(again), executor.launch(again)]
        with pytest.raises(RuntimeError, match="a fault"):
            handles[0].wait()
        for handle in handles[1:]:
            with pytest.raises(StepError, match="skipped"):
                handle.wait()
        assert executor.launch(again).wait().rows.tolist() == [again.rows[0]]


def test_a_step_that_raised_keeps_no_tensor(
    late: LateReadback, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 14a: the error of a forward that ran out of memory held its activations while the halves were run."""
    with Engine(str(tiny("llama")), max_num_seqs=2, overlap_depth=1, **COMMON) as engine:
        executor = engine.core.executor
        assert isinstance(executor, LocalRunner)
        alive: list[weakref.ref[Tensor]] = []

        def forward(*_: Any) -> Kept:
            hidden = torch.zeros(8)
            alive.append(weakref.ref(hidden))
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            except torch.OutOfMemoryError as error:
                raise RuntimeError("in the forward") from error

        plans: list[StepPlan] = []
        plain = executor.launch

        def noted(plan: StepPlan) -> StepHandle:
            plans.append(plan)
            return plain(plan)

        monkeypatch.setattr(engine.core, "_launch", noted)
        engine.generate([[5, 6]], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
        monkeypatch.setattr(executor, "_run_forward", forward)
        handle = executor.launch(plans[0].select(np.arange(1)))
        with pytest.raises(RuntimeError, match="in the forward") as caught:
            handle.wait()
        assert caught.value.__cause__ is not None, "it is whole but for what its frames held"
        assert [reference() for reference in alive] == [None]


def test_a_copy_that_raises_gives_its_buffer_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """After two such, the engine died of "at most two copies are on their way"."""
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **options: empty(*shape, **options))
    readback = PinnedReadback(4, torch.device("cuda:0"))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="size"):
            readback.start(torch.arange(5))
    for _ in range(3):
        first, second = readback.start(torch.arange(4)), readback.start(torch.arange(2) + 7)
        assert (first.wait().tolist(), second.wait().tolist()) == ([0, 1, 2, 3], [7, 8])


class _Event:
    """Of a device that does everything at once."""

    def record(self, stream: Any) -> None:
        """It has happened."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def test_feedback_fills_only_what_is_awaited() -> None:
    """A later token of a row stays awaited when an earlier one becomes known; an emptied row awaits nothing."""
    feedback = TokenFeedback(4, torch.device("cpu"))
    rows = np.array([2, 0], np.int32)
    feedback.put(rows, np.array([7, 3], np.int32), torch.tensor([50, 60]), torch.tensor([2, 0]))
    token_rows, positions = np.array([0, 1, 2, 2], np.int32), np.array([3, 3, 6, 7], np.int32)
    assert feedback.awaits(token_rows, positions).tolist() == [True, False, False, True]
    filled = feedback.fill(torch.tensor([-1, 11, 12, -1]), torch.tensor([0, 1, 2, 2]))
    assert filled.tolist() == [60, 11, 12, 50]
    feedback.settle(rows, np.array([6, 3], np.int32))
    assert feedback.awaits(token_rows, positions).tolist() == [False, False, False, True]
    feedback.forget(2)
    assert not feedback.awaits(token_rows, positions).any()


def test_an_upload_is_one_buffer_of_aligned_views() -> None:
    """Arrays of any shape and stride arrive as they are; the buffer grows; views start where kernels want them."""
    upload = StagedUpload(torch.device("cpu"))
    random = np.random.default_rng(0)
    for size in (3, 40_000, 5):
        wide = random.integers(0, 99, (2, size, 6)).astype(np.int32)
        arrays: list[NDArray[Any]] = [
            np.arange(size),
            wide[:, :, :3],
            np.zeros((1, 0), np.int64),
            random.integers(0, 9, 1).astype(np.int32),
        ]
        sent = upload.send(arrays)
        assert all(np.array_equal(x.numpy(), array) for x, array in zip(sent, arrays, strict=True))
        assert len({x.untyped_storage().data_ptr() for x in sent}) == 1
        assert all(x.storage_offset() * x.element_size() % ALIGNMENT == 0 for x in sent)


def test_an_upload_is_not_overwritten_by_the_next_ones() -> None:
    """What the device was sent belongs to its step."""
    upload = StagedUpload(torch.device("cpu"))
    first = upload.send([np.arange(5)])[0]
    for _ in range(3):
        upload.send([np.zeros(5, np.int64)])
    assert first.tolist() == [0, 1, 2, 3, 4]


def test_auto_overlap_is_one_on_a_gpu() -> None:
    """And nothing on a CPU, whose cores the host would take; what is asked for is kept."""
    from enginectl.config import EngineConfig
    from enginectl.resolve import resolve_overlap

    auto = EngineConfig(model="none")
    assert resolve_overlap(auto, "cuda:0").overlap_depth == 1
    assert resolve_overlap(auto, "cpu").overlap_depth == 0
    for depth in (0, 1):
        config = EngineConfig(model="none", overlap_depth=depth)
        assert {resolve_overlap(config, device).overlap_depth for device in ("cpu", "cuda:0")} == {depth}
