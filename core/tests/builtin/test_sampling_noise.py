"""Noise by (seed, choice, position)."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from enginectl.builtin.sampling.noise import seed_word, uniform
from enginectl.testing.sampler import chi_square, chi_square_limit

N = 100_000
GOLDEN = [0.7459294553430235, 0.8165042204291487, 0.2675757383085763]

SERIES = {
    "positions": lambda i: uniform(np.full(N, 7, np.uint64), np.zeros(N, np.int64), i),
    "seeds": lambda i: uniform(i.astype(np.uint64), np.zeros(N, np.int64), np.full(N, 3)),
    "choices": lambda i: uniform(np.full(N, 7, np.uint64), i, np.full(N, 3)),
    "high seeds": lambda i: uniform(i.astype(np.uint64) << np.uint64(40), np.zeros(N, np.int64), np.full(N, 3)),
    "diagonal": lambda i: uniform(i.astype(np.uint64), i, i),
}


@pytest.fixture(params=SERIES)
def series(request: pytest.FixtureRequest) -> NDArray[np.float64]:
    return SERIES[request.param](np.arange(N))


def test_noise_is_uniform_along_each_input(series: NDArray[np.float64]) -> None:
    assert (series > 0).all()
    assert (series < 1).all()
    observed = np.bincount((series * 256).astype(int), minlength=256).astype(float)
    assert chi_square(observed, np.full(256, N / 256)) < chi_square_limit(255)


@pytest.mark.parametrize("lag", [1, 2, 16])
def test_neighbours_are_independent(series: NDArray[np.float64], lag: int) -> None:
    pairs = (series[:-lag] * 16).astype(int) * 16 + (series[lag:] * 16).astype(int)
    observed = np.bincount(pairs, minlength=256).astype(float)
    assert chi_square(observed, np.full(256, len(pairs) / 256)) < chi_square_limit(255)


def test_two_seeds_share_no_stream() -> None:
    """A stream must not be another one shifted: nothing repeats over many seeds and positions."""
    seed, position = np.divmod(np.arange(N), 100)
    assert len(np.unique(uniform(seed.astype(np.uint64), np.zeros(N), position))) == N


def test_a_rows_noise_depends_on_nothing_else() -> None:
    seed, choice, position = np.arange(9, dtype=np.uint64), np.arange(9) % 2, np.arange(9) * 5
    whole = uniform(seed, choice, position)
    for i in range(9):
        assert uniform(seed[i : i + 1], choice[i : i + 1], position[i : i + 1])[0] == whole[i]


def test_noise_stays_what_it_was() -> None:
    """Seeds are kept in users' notebooks: a change of these numbers is a change of their results."""
    found = uniform(np.array([0, 1, 2**64 - 1], np.uint64), [0, 1, 2], [1, 2, 3])
    np.testing.assert_array_equal(found, GOLDEN)


def test_seeds_of_any_sign_become_words() -> None:
    assert seed_word(-1) == 2**64 - 1
    assert seed_word(5) == 5
