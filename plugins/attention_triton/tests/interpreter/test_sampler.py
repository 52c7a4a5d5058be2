"""The sampling kernel against core's sampler, token for token, in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from enginectl.builtin.sampling.sampler import TorchSampler
from enginectl.interfaces.sampler import SampleBatch, Sampler
from enginectl.testing.sampler import FILTERS, MakeSampler, SamplerConformance
from enginectl.types import SamplingParams
from enginectl_attention_triton.sampler import TritonSampler

MORE = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_k=5000),
    SamplingParams(temperature=3.0, top_k=300, top_p=0.99),
    SamplingParams(temperature=0.05, top_p=0.5),
    SamplingParams(temperature=2.0, min_p=1.0),
]


def batch_of(num_rows: int, first_position: int = 5) -> SampleBatch:
    rows = np.arange(num_rows, dtype=np.int32)
    return SampleBatch(rows, rows + first_position, np.zeros((num_rows, 1), np.int32), np.zeros(num_rows, np.int32))


def both(params: list[SamplingParams], logits: Tensor) -> tuple[list[int], list[int]]:
    """What core's sampler and ours draw for the same rows, noise and logits."""
    found = []
    for sampler in (TorchSampler(len(params)), TritonSampler(len(params))):
        for row, one in enumerate(params):
            sampler.add_row(row, one, 100 + row, row % 3, 4)
        found.append(sampler.sample(logits.clone(), batch_of(len(params))).tolist())
    return found[0], found[1]


@pytest.mark.parametrize("size", [37, 1024, 2500])
def test_tokens_are_those_of_the_torch_sampler(size: int) -> None:
    """Every filter alone and together, over less than a block, one, and several; logits spread wide and narrow."""
    params = [*FILTERS, *MORE] * 2
    logits = torch.randn(len(params), size, generator=torch.Generator().manual_seed(size))
    logits *= torch.linspace(0.2, 6.0, len(params))[:, None]
    expected, found = both(params, logits)
    assert found == expected
    assert len(set(found)) > len(found) // 3, "not all the same token"


def test_rows_that_tie_keep_all_that_tie() -> None:
    """Rounded logits: the k-th largest, and the last of the nucleus, stand many times; zeros of both signs are one."""
    params = [
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=0.7, top_p=0.6),
        SamplingParams(temperature=1.0, top_k=40, top_p=0.7, min_p=0.01),
    ] * 4
    logits = torch.randn(len(params), 700, generator=torch.Generator().manual_seed(1)).mul_(2).round_()
    logits[:, ::7] *= -0.0
    expected, found = both(params, logits)
    assert found == expected


def test_broken_rows_give_the_argmax_of_what_is_finite() -> None:
    """NaN, +inf, nothing finite; -inf alone is a mask, and masked tokens are never drawn."""
    params = [SamplingParams(temperature=1.5)] * 5
    logits = torch.randn(5, 90, generator=torch.Generator().manual_seed(2))
    logits[0, 3], logits[1, 80], logits[2, :], logits[3, 5:] = float("nan"), float("inf"), -float("inf"), -float("inf")
    expected, found = both(params, logits)
    assert found == expected
    assert found[2] == 0
    assert found[3] < 5


def test_logits_may_be_rows_of_a_wider_matrix() -> None:
    """The row stride counts."""
    params = [SamplingParams(temperature=1.0, top_k=4)] * 3
    wide = torch.randn(3, 200, generator=torch.Generator().manual_seed(3))
    sampler = TritonSampler(3)
    for row, one in enumerate(params):
        sampler.add_row(row, one, row, 0, 4)
    assert (
        sampler.sample(wide[:, :77], batch_of(3)).tolist()
        == sampler.sample(wide[:, :77].contiguous(), batch_of(3)).tolist()
    )


@pytest.mark.slow
class TestConformance(SamplerConformance):
    """The kit. Draws are few: each is a program, and the tests above compare token for token."""

    num_draws = 60

    @pytest.fixture
    def make_sampler(self) -> MakeSampler:
        """What the plugin registers."""

        def make(max_rows: int) -> Sampler:
            return TritonSampler(max_rows)

        return make
