"""Conformance of samplers: `class TestMine(SamplerConformance)` with its own `make_sampler` fixture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from enginectl.interfaces.sampler import SampleBatch, Sampler
from enginectl.testing.sampler_reference import ReferenceSampler
from enginectl.types import SamplingParams

MakeSampler = Callable[[int], Sampler]
Ids = NDArray[np.int64]

FILTERS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7, top_k=7),
    SamplingParams(temperature=0.9, top_p=0.8),
    SamplingParams(temperature=1.2, min_p=0.1),
    SamplingParams(temperature=0.8, top_k=12, top_p=0.9, min_p=0.02),
]


class SamplerConformance:
    """What every sampler must do. Laws 1, 2 and 4 rest on it.

    make_sampler: the fixture to override, `make_sampler(max_rows) -> Sampler`. device: where the logits lie.
    """

    device = "cpu"
    num_draws = 4000

    @pytest.fixture
    def make_sampler(self) -> MakeSampler:
        raise NotImplementedError("override make_sampler in the subclass")

    def test_greedy_is_the_argmax(self, make_sampler: MakeSampler) -> None:
        sampler = filled(make_sampler, [SamplingParams(temperature=0.0), SamplingParams(temperature=1e-6, top_k=5)] * 8)
        logits = self.random_logits(16, 1003)
        rows = np.arange(16, dtype=np.int32)
        assert sampler.greedy_rows(rows).all()
        assert self.draw(sampler, logits, rows).tolist() == logits.argmax(-1).tolist()

    def test_greedy_ties_go_to_the_lowest_id(self, make_sampler: MakeSampler) -> None:
        sampler = filled(make_sampler, [SamplingParams(temperature=0.0)] * 4)
        logits = self.random_logits(4, 1003)
        for i, tied in enumerate([(0, 1002), (63, 64), (500, 501, 999), (1000, 1001, 1002)]):
            logits[i, list(tied)] = 50.0
        assert self.draw(sampler, logits, np.arange(4, dtype=np.int32)).tolist() == [0, 63, 500, 1000]

    def test_greedy_rows_are_told_from_sampled_ones(self, make_sampler: MakeSampler) -> None:
        sampler = filled(make_sampler, [SamplingParams(temperature=t) for t in (0.0, 1.0, 1e-6, 0.01)])
        assert sampler.greedy_rows(np.array([3, 2, 1, 0], dtype=np.int32)).tolist() == [False, True, False, True]

    def test_a_row_does_not_depend_on_the_batch(self, make_sampler: MakeSampler) -> None:
        """Law 4: not on its neighbours, their number, its place among them, or its row in the persistent batch."""
        rng = np.random.default_rng(5)
        params = [SamplingParams(temperature=0.0), *FILTERS] * 4
        logits = self.random_logits(len(params), 1003)
        rows = np.arange(len(params), dtype=np.int32)
        whole = self.draw(filled(make_sampler, params), logits, rows)
        for size in (len(params), 1, 2, 3, 9, 17):
            part = rng.permutation(len(params))[:size]
            moved = filled(make_sampler, [params[i] for i in part], seeds=part)
            alone = self.draw(moved, logits[part], rows[:size], positions=part + 1)
            assert alone.tolist() == whole[part].tolist(), f"rows {part.tolist()} differ in a batch of {size}"

    def test_a_seed_gives_the_same_tokens_again(self, make_sampler: MakeSampler) -> None:
        """Law 4: and another seed gives others."""
        logits = self.random_logits(1, 503).expand(64, -1)
        rows = np.zeros(64, dtype=np.int32)
        draws = [self.draw(filled(make_sampler, [FILTERS[0]], seeds=[seed]), logits, rows) for seed in (3, 3, 4)]
        assert draws[0].tolist() == draws[1].tolist()
        assert draws[0].tolist() != draws[2].tolist()

    def test_every_bit_of_a_seed_counts(self, make_sampler: MakeSampler) -> None:
        logits = self.random_logits(1, 503).expand(64, -1)
        rows = np.zeros(64, dtype=np.int32)
        seeds = [0, 1, 1 << 31, 1 << 32, 1 << 63, -1]
        draws = {tuple(self.draw(filled(make_sampler, [FILTERS[0]], seeds=[s]), logits, rows).tolist()) for s in seeds}
        assert len(draws) == len(seeds)

    def test_noise_is_keyed_by_position_and_choice(self, make_sampler: MakeSampler) -> None:
        """Law 4: the choices of one request differ, and so do its positions, whatever order they come in."""
        logits = self.random_logits(1, 503).expand(64, -1)
        sampler = filled(make_sampler, [FILTERS[0]] * 2, seeds=[9, 9], choices=[0, 1])
        row = np.zeros(64, dtype=np.int32)
        first, second = self.draw(sampler, logits, row), self.draw(sampler, logits, row + 1)
        assert first.tolist() != second.tolist()
        assert len(set(first.tolist())) > 4
        backwards = self.draw(sampler, logits, row, positions=np.arange(64, 0, -1))
        assert backwards[::-1].tolist() == first.tolist()

    @pytest.mark.parametrize("top_k", [1, 2, 5, 16])
    def test_top_k_keeps_the_k_largest(self, make_sampler: MakeSampler, top_k: int) -> None:
        self.check_support(make_sampler, SamplingParams(temperature=2.0, top_k=top_k))

    @pytest.mark.parametrize("top_p", [0.1, 0.5, 0.8, 0.95])
    def test_top_p_keeps_the_nucleus(self, make_sampler: MakeSampler, top_p: float) -> None:
        self.check_support(make_sampler, SamplingParams(temperature=1.5, top_p=top_p))

    @pytest.mark.parametrize("min_p", [0.05, 0.3, 0.9])
    def test_min_p_keeps_what_is_near_the_best(self, make_sampler: MakeSampler, min_p: float) -> None:
        self.check_support(make_sampler, SamplingParams(temperature=2.0, min_p=min_p))

    def test_top_p_counts_what_top_k_left(self, make_sampler: MakeSampler) -> None:
        self.check_support(make_sampler, SamplingParams(temperature=2.0, top_k=8, top_p=0.7))

    def test_tokens_that_tie_with_the_last_kept_are_kept(self, make_sampler: MakeSampler) -> None:
        logits = torch.tensor([0.0, 2.0, 1.0, 1.0, 1.0, -1.0], device=self.device)
        for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.6)):
            assert set(self.draw_often(make_sampler, logits, params).tolist()) == {1, 2, 3, 4}

    @pytest.mark.parametrize("params", FILTERS, ids=range(len(FILTERS)))
    def test_tokens_come_as_often_as_the_distribution_says(
        self, make_sampler: MakeSampler, params: SamplingParams
    ) -> None:
        logits = self.random_logits(1, 40)
        expected = reference(logits, params) * self.num_draws
        token_ids = self.draw_often(make_sampler, logits, params)
        observed = np.bincount(token_ids, minlength=40).astype(np.float64)
        assert observed[expected == 0].sum() == 0
        assert chi_square(observed, expected) < chi_square_limit(int((expected > 0).sum()) - 1)

    def test_a_row_with_one_token_left_gives_that_token(self, make_sampler: MakeSampler) -> None:
        sampler = filled(make_sampler, [SamplingParams(temperature=0.0), *FILTERS])
        logits = torch.full((len(FILTERS) + 1, 503), -torch.inf, device=self.device)
        logits[:, 417] = -3.0
        rows = np.arange(len(logits), dtype=np.int32)
        assert set(self.draw(sampler, logits, rows).tolist()) == {417}

    def test_a_broken_row_touches_no_other(self, make_sampler: MakeSampler) -> None:
        """Law 14a: a row with NaN still gives a token of the vocabulary, and its neighbours give theirs."""
        params = [SamplingParams(temperature=0.0), FILTERS[0], FILTERS[5]] * 2
        logits = self.random_logits(6, 503)
        rows = np.arange(6, dtype=np.int32)
        sampler = filled(make_sampler, params)
        before = self.draw(sampler, logits, rows)
        logits[:3, 100:] = torch.nan
        after = self.draw(sampler, logits, rows)
        assert after[3:].tolist() == before[3:].tolist()
        assert ((after >= 0) & (after < 503)).all()

    def test_a_row_taken_again_forgets_the_last_request(self, make_sampler: MakeSampler) -> None:
        logits = self.random_logits(1, 503).expand(64, -1)
        row = np.zeros(64, dtype=np.int32)
        fresh = filled(make_sampler, [FILTERS[1]], seeds=[3])
        used = filled(make_sampler, [SamplingParams(temperature=0.3, top_k=2, top_p=0.5, min_p=0.5)], seeds=[8])
        used.remove_row(0)
        used.add_row(0, FILTERS[1], 3, 0, 1)
        assert self.draw(used, logits, row).tolist() == self.draw(fresh, logits, row).tolist()

    def check_support(self, make_sampler: MakeSampler, params: SamplingParams) -> None:
        """Exactly the tokens that the reference gives a probability are drawn."""
        for seed in range(3):
            logits = separated_logits(24, seed).to(self.device)
            expected = reference(logits, params)
            drawn = set(self.draw_often(make_sampler, logits, params).tolist())
            assert drawn <= set(np.flatnonzero(expected).tolist()), "a token outside the support was drawn"
            often = np.flatnonzero(expected * self.num_draws > 20).tolist()
            assert set(often) <= drawn, "a token of the support is never drawn"

    def draw_often(self, make_sampler: MakeSampler, logits: torch.Tensor, params: SamplingParams) -> Ids:
        """num_draws tokens of one distribution, at consecutive positions."""
        sampler = filled(make_sampler, [params], seeds=[1234])
        return self.draw(sampler, logits.expand(self.num_draws, -1), np.zeros(self.num_draws, dtype=np.int32))

    def draw(
        self, sampler: Sampler, logits: torch.Tensor, rows: NDArray[np.int32], positions: Ids | None = None
    ) -> Ids:
        """One call of sample, on a copy of the logits. Positions are 1, 2, 3 … unless given."""
        if positions is None:
            positions = np.arange(1, len(rows) + 1)
        lengths = np.ones(int(rows.max()) + 1, dtype=np.int32)
        history = np.zeros((len(lengths), int(positions.max()) + 1), dtype=np.int32)
        batch = SampleBatch(rows, positions.astype(np.int32), history, lengths)
        token_ids = sampler.sample(logits.clone(), batch)
        assert token_ids.shape == (len(rows),)
        assert token_ids.dtype == torch.int64
        return token_ids.cpu().numpy()

    def random_logits(self, num_rows: int, vocab_size: int) -> torch.Tensor:
        """The same ones each time, fp32, of the width that models give."""
        generator = torch.Generator().manual_seed(vocab_size)
        return (torch.randn(num_rows, vocab_size, generator=generator) * 2.5).to(self.device)


def filled(
    make_sampler: MakeSampler,
    params: Sequence[SamplingParams],
    seeds: Sequence[int] | Ids | None = None,
    choices: Sequence[int] | None = None,
) -> Sampler:
    """A sampler with these requests in rows 0, 1, 2 …; seeds default to the row's number."""
    sampler = make_sampler(len(params))
    for row, row_params in enumerate(params):
        seed = row if seeds is None else int(seeds[row])
        sampler.add_row(row, row_params, seed, 0 if choices is None else choices[row], 1)
    return sampler


def reference(logits: torch.Tensor, params: SamplingParams) -> NDArray[np.float64]:
    """The distribution [vocab_size] that one row of logits should be sampled from."""
    return ReferenceSampler(1).probabilities(logits.double().cpu().numpy().reshape(-1), params)


def separated_logits(vocab_size: int, seed: int) -> torch.Tensor:
    """[1, vocab_size] in random order, no two so close that rounding could change which are kept."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.permutation(np.linspace(-4.0, 2.0, vocab_size)).astype(np.float32))[None]


def chi_square(observed: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """Pearson's statistic; tokens expected less than five times are counted together."""
    common = expected >= 5
    pairs = [*zip(observed[common], expected[common], strict=True), (observed[~common].sum(), expected[~common].sum())]
    return float(sum((seen - wanted) ** 2 / wanted for seen, wanted in pairs if wanted > 0))


def chi_square_limit(degrees: int) -> float:
    """What a right sampler exceeds about once in 30,000 runs (Wilson and Hilferty's approximation)."""
    spread = 2.0 / (9.0 * degrees)
    return degrees * (1.0 - spread + 4.0 * math.sqrt(spread)) ** 3
