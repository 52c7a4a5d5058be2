"""Launching a step never waits for the GPU: the whole loop on a device of shapes, whose tokens are made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from enginectl import Engine, SamplingParams
from enginectl.builtin.weights.safetensors import SafetensorsCheckpoint
from enginectl.compose import Composer
from enginectl.context import Gpu, Machine
from enginectl.engine import graphs as graphs_module
from enginectl.engine import runner as runner_module
from enginectl.engine.readback import IntRows, Readback, TokensAhead
from enginectl.engine.runner import LocalRunner
from enginectl.engine.upload import Upload
from enginectl.interfaces.executor import StepHandle, StepPlan
from enginectl.testing.fake_cuda import FakeCuda, WaitsForDeviceError
from enginectl.testing.toys import ConstantSpeculator
from enginectl.transfer import to_device

ON_GPU = Machine(
    num_cores=1,
    memory_bytes=1 << 33,
    cpu_flags=frozenset(),
    gpus=(Gpu("Test GPU", (9, 0), 80 << 30),),
    has_compiler=True,
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)


class MadeUp(TokensAhead):
    """Tokens that nobody computed."""

    def __init__(self, count: int) -> None:
        self._count = count

    def wait(self) -> IntRows:
        return np.arange(self._count, dtype=np.int32) + 5


class MadeUpReadback(Readback):
    """Knows how many tokens there are, and that is all there is to know."""

    is_deferred = True

    def start(self, token_ids: Tensor) -> TokensAhead:
        assert token_ids.is_cuda
        return MadeUp(len(token_ids))


class PinnedUpload(Upload):
    """Array by array."""

    def send(self, arrays: Any) -> list[Tensor]:
        return [to_device(array, "cuda:0") for array in arrays]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Engines of the test run on it, and every launch is watched."""
    fake = FakeCuda()
    monkeypatch.setattr("enginectl.machine.detect_machine", lambda: ON_GPU)
    monkeypatch.setattr(Composer, "_kv_memory", lambda self, device: None)
    monkeypatch.setattr(runner_module, "readback_for", lambda device, max_tokens: MadeUpReadback())
    monkeypatch.setattr(runner_module, "upload_for", lambda device: PinnedUpload())
    monkeypatch.setattr(graphs_module, "recorder_for", lambda device: None)
    monkeypatch.setattr(LocalRunner, "_select_device", lambda self: None)
    plain = LocalRunner.launch

    def launch(self: LocalRunner, plan: StepPlan) -> StepHandle:
        with fake.watched():
            return plain(self, plan)

    monkeypatch.setattr(LocalRunner, "launch", launch)
    return fake


def run(fake: FakeCuda, path: Path, params: SamplingParams, **more: Any) -> list[str | None]:
    """Chunks, mixed steps and decodes. Returns the requests' errors."""
    weights = list(SafetensorsCheckpoint(path).tensors())  # files have numbers
    prompts = [[5, 6, 7], list(range(10, 50)), [8], list(range(60, 70))]
    options: dict[str, Any] = {
        "attention": "torch",
        "op_set": "torch",
        "sampler": "torch",
        "model_family": "native",
        "block_size": 4,
        "dtype": "float32",
        "num_threads": 1,
        "only_plugins": True,
        "kv_cache_memory_bytes": 1 << 20,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 24,
    }
    with pytest.MonkeyPatch.context() as patch, fake.here():
        patch.setattr(SafetensorsCheckpoint, "tensors", lambda self: iter(weights))
        with Engine(str(path), **(options | more)) as engine:
            assert engine.info.device == "cuda:0"
            assert engine.config.overlap_depth == 1
            return [output.error for output in engine.generate(prompts, params)]


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.7, seed=3, min_p=0.1, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=3, top_k=40, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=3, top_k=100, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, repetition_penalty=1.2, presence_penalty=0.1),
        SamplingParams(temperature=0.0, max_tokens=9, min_tokens=4, logit_bias={7: 2.0}),
        SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, allowed_token_ids=(5, 6, 7)),
        SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, bad_word_ids=((5,), (6, 7))),
    ],
    ids=["greedy", "min-p", "top-k", "wide-top-k", "penalties", "bias", "allowed", "bad-words"],
)
def test_no_launch_waits_for_the_device(params: SamplingParams, fake: FakeCuda, tiny: Callable[[str], Path]) -> None:
    """Not for what is sent to it, and not for what it knows."""
    assert run(fake, tiny("llama"), params) == [None] * 4
    assert fake.waits == []
    assert fake.num_copies > 100, "arrays were sent"


@pytest.mark.parametrize("name", ["gemma2", "qwen3"])
def test_other_structures_do_not_wait_either(name: str, fake: FakeCuda, tiny: Callable[[str], Path]) -> None:
    """Windows and soft caps; norms of heads."""
    assert run(fake, tiny(name), GREEDY) == [None] * 4
    assert fake.waits == []


def test_verifying_drafts_does_not_wait(fake: FakeCuda, tiny: Callable[[str], Path]) -> None:
    """Rows with several logits."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=9, ignore_eos=True)
    assert run(fake, tiny("llama"), params, speculator=ConstantSpeculator()) == [None] * 4
    assert fake.waits == []


def test_the_watch_sees_what_waits(fake: FakeCuda) -> None:
    """Or the tests above say nothing."""
    on_host = np.arange(4)
    with fake.here():
        on_gpu, index = torch.zeros(4, device="cuda:0"), to_device(on_host, "cuda:0")

    def put() -> None:
        on_gpu[on_gpu > 0] = 1.0

    waiting: list[Callable[[], object]] = [
        lambda: on_gpu.any().item(),
        lambda: bool(on_gpu.any()),
        lambda: on_gpu.tolist(),
        lambda: on_gpu.cpu(),
        lambda: on_gpu.nonzero(),
        lambda: on_gpu[on_gpu > 0],
        put,
        lambda: torch.masked_select(on_gpu, on_gpu > 0),
        lambda: torch.bincount(index),
        lambda: torch.repeat_interleave(index, index),
        lambda: torch.tensor([1, 2], device="cuda:0"),
        lambda: torch.from_numpy(on_host).to("cuda:0"),
        lambda: torch.from_numpy(on_host).to("cuda:0", non_blocking=True),
        lambda: torch.from_numpy(on_host).pin_memory().to("cuda:0"),
        lambda: on_gpu.copy_(torch.from_numpy(on_host)),
    ]
    with fake.here(), fake.watched():
        for call in waiting:
            with pytest.raises(WaitsForDeviceError):
                call()
        assert len(fake.waits) == len(waiting)
        assert to_device(on_host, "cuda:0").is_cuda
        assert on_gpu[index].shape == on_gpu[None, 1:3, None].flatten().repeat(2).shape
        on_gpu[1:3] = 2.0
        on_gpu[index] = on_gpu
