"""Random numbers as a function of (seed, choice, position): no state, no order, no neighbours."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Odd constants that spread consecutive inputs over 64 bits; the finaliser is splitmix64's (Steele et al. 2014).
_SEED_STEP = np.uint64(0x9E3779B97F4A7C15)
_CHOICE_STEP = np.uint64(0xD1B54A32D192ED03)
_POSITION_STEP = np.uint64(0x8CB92BA72F3D8DD7)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def uniform(seed: ArrayLike, choice: ArrayLike, position: ArrayLike) -> NDArray[np.float64]:
    """One number in (0, 1), both ends excluded, for each (seed, choice, position).

    seed: [n] uint64. choice, position: [n] integers. Returns [n] float64 with 52 random bits.
    """
    bits = _mix(_words(seed) + _SEED_STEP)
    bits = _mix(bits + _words(choice) * _CHOICE_STEP)
    bits = _mix(bits + _words(position) * _POSITION_STEP)
    # The middles of 2**52 equal intervals: exact in float64, and never 0 or 1.
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def seed_word(seed: int) -> int:
    """A seed of any sign as the unsigned 64-bit word that `uniform` takes."""
    return seed & 0xFFFFFFFFFFFFFFFF


def _words(values: ArrayLike) -> NDArray[np.uint64]:
    # At least one dimension: numpy warns when unsigned scalars wrap around, arrays wrap in silence.
    return np.atleast_1d(np.asarray(values)).astype(np.uint64)


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * _MULTIPLIER_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MULTIPLIER_2
    return bits ^ (bits >> np.uint64(31))
