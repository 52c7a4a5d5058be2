"""The sampler `torch`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from enginectl.builtin.sampling.sampler import TorchSampler
from enginectl.interfaces.sampler import SampleBatch
from enginectl.testing.sampler import MakeSampler, SamplerConformance, reference
from enginectl.types import SamplingParams

VOCAB = 12_347  # many blocks, the last one not whole


class TestTorchSampler(SamplerConformance):
    @pytest.fixture
    def make_sampler(self) -> MakeSampler:
        return TorchSampler


def _batch(rows: np.ndarray) -> SampleBatch:
    positions = (np.arange(len(rows)) + 5).astype(np.int32)
    return SampleBatch(rows.astype(np.int32), positions, np.zeros((64, 128), np.int32), np.ones(64, np.int32))


def _mixed(num_rows: int) -> TorchSampler:
    rng = np.random.default_rng(1)
    sampler = TorchSampler(num_rows)
    for row in range(num_rows):
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.5, 1.0, 1.3])),
            top_k=int(rng.choice([0, 1, 40, 64, 65, 3000])),
            top_p=float(rng.choice([1.0, 0.999, 0.9, 0.2, 0.0])),
            min_p=float(rng.choice([0.0, 0.0, 0.01])),
        )
        sampler.add_row(row, params, seed=row * 77, choice=row % 3, prompt_len=3)
    return sampler


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_row_is_the_same_in_every_batch_at_every_width(num_threads: int) -> None:
    """Law 4: with long and short lists, several chunks and every number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        sampler, rows = _mixed(60), np.arange(60)
        logits = torch.randn(60, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
        batch = _batch(rows)
        whole = sampler.sample(logits.clone(), batch)
        for size in (1, 2, 7, 31, 60):
            part = np.random.default_rng(size).permutation(60)[:size]
            assert torch.equal(sampler.sample(logits[part].clone(), batch.take(part)), whole[part])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("params", [SamplingParams(top_k=300), SamplingParams(top_p=0.9), SamplingParams(top_p=0.5)])
def test_the_support_is_right_when_the_list_is_too_short(params: SamplingParams) -> None:
    logits = torch.randn(1, 2000, generator=torch.Generator().manual_seed(3))
    support = reference(logits, params) > 0
    assert support.sum() > 64
    sampler = TorchSampler(1)
    sampler.add_row(0, params, 5, 0, 1)
    positions = np.arange(1, 4001, dtype=np.int32)
    batch = SampleBatch(np.zeros(4000, np.int32), positions, np.zeros((1, 1), np.int32), np.ones(1, np.int32))
    drawn = np.zeros(2000, dtype=bool)
    drawn[sampler.sample(logits.expand(4000, -1), batch).numpy()] = True
    assert not (drawn & ~support).any()
    assert drawn.sum() > 0.7 * support.sum()


def test_a_broken_row_gives_the_argmax_of_its_finite_logits() -> None:
    sampler = TorchSampler(3)
    for row, temperature in enumerate([0.0, 1.0, 1.0]):
        sampler.add_row(row, SamplingParams(temperature=temperature, top_p=0.9), 5, 0, 1)
    logits = torch.zeros(3, 700)
    logits[:, 300] = 4.0
    logits[0, [5, 699]] = torch.nan
    logits[1, 7] = torch.nan
    logits[2, 9] = torch.inf
    assert sampler.sample(logits, _batch(np.arange(3))).tolist() == [300, 300, 300]


def test_a_row_without_any_finite_logit_gives_a_token_all_the_same() -> None:
    sampler = _mixed(8)
    logits = torch.full((8, 130), -torch.inf)
    logits[:4] = torch.nan
    assert sampler.sample(logits, _batch(np.arange(8))).tolist() == [0] * 8


def test_sampling_leaves_the_logits_alone() -> None:
    sampler = _mixed(12)
    logits = torch.randn(12, 640, generator=torch.Generator().manual_seed(3))
    before = logits.clone()
    sampler.sample(logits, _batch(np.arange(12)))
    assert torch.equal(logits, before)


def test_an_empty_batch_gives_no_tokens() -> None:
    assert _mixed(4).sample(torch.empty(0, 640), _batch(np.arange(0))).shape == (0,)


def test_a_negative_seed_is_taken() -> None:
    sampler = TorchSampler(1)
    sampler.add_row(0, SamplingParams(), -(2**63), 0, 1)
    assert sampler.sample(torch.zeros(1, 64), _batch(np.arange(1))).shape == (1,)
