"""A sampler that is slow and obvious: one row at a time, in float64, with nothing clever. The kit judges by it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from enginectl.interfaces.sampler import SampleBatch, Sampler
from enginectl.types import SamplingParams

Probabilities = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """What a request brought along."""

    params: SamplingParams
    seed: int
    choice: int


class ReferenceSampler(Sampler):
    """Samples as the contract says. Mutants override one method each."""

    def __init__(self, max_rows: int) -> None:
        self.rows: dict[int, Row] = {}

    def add_row(self, row: int, params: SamplingParams, seed: int, choice: int, prompt_len: int) -> None:
        self.rows[row] = Row(params, seed, choice)

    def remove_row(self, row: int) -> None:
        del self.rows[row]

    def greedy_rows(self, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        return np.array([self.rows[int(row)].params.temperature < 1e-5 for row in rows], dtype=np.bool_)

    def sample(self, logits: Tensor, batch: SampleBatch) -> Tensor:
        token_ids = []
        for values, row, position in zip(logits.double().cpu().numpy(), batch.rows, batch.positions, strict=True):
            values = np.where(np.isfinite(values), values, -np.inf)
            request = self.rows[int(row)]
            if request.params.temperature < 1e-5:
                token_ids.append(self.argmax(values))
            else:
                cumulative = np.cumsum(self.probabilities(values, request.params))
                point = self.noise(int(row), int(position)) * cumulative[-1]
                token_ids.append(int(np.flatnonzero(cumulative > point)[0]))
        return torch.tensor(token_ids, dtype=torch.int64, device=logits.device)

    def argmax(self, logits: NDArray[np.float64]) -> int:
        """The lowest id among the largest."""
        return int(np.flatnonzero(logits == logits.max())[0])

    def noise(self, row: int, position: int) -> float:
        """A number in [0, 1) from (seed, choice, position)."""
        request = self.rows[row]
        digest = hashlib.sha256(f"{request.seed} {request.choice} {position}".encode()).digest()
        return int.from_bytes(digest[:6], "little") / 2**48

    def probabilities(self, logits: NDArray[np.float64], params: SamplingParams) -> Probabilities:
        """Temperature, top-k, top-p of what is left, min-p relative to the best. What ties with the last is kept."""
        probs = np.exp((logits - logits.max()) / params.temperature)
        if 0 < params.top_k < len(logits):
            probs[logits < np.sort(logits)[-params.top_k]] = 0.0
        if params.top_p < 1.0:
            probs[probs < self.nucleus_floor(probs / probs.sum(), params.top_p) * probs.sum()] = 0.0
        probs[probs < params.min_p * probs.max()] = 0.0
        result: Probabilities = probs / probs.sum()
        return result

    def nucleus_floor(self, probs: Probabilities, top_p: float) -> float:
        """The smallest probability among the most likely tokens that together reach top_p."""
        mass = 0.0
        for prob in sorted(probs.tolist(), reverse=True):
            mass += prob
            if mass >= top_p:
                return float(prob) * (1 - 1e-12)  # the product with the sum may round up
        return 0.0


class NoiseByRow(ReferenceSampler):
    """Broken: noise comes from the place in the batch. Must fail `test_a_row_does_not_depend_on_the_batch`."""

    def noise(self, row: int, position: int) -> float:
        return float(np.random.default_rng([row, position]).random())


class TopPOneShort(ReferenceSampler):
    """Broken: the token that completes the nucleus is lost. Must fail `test_top_p_keeps_the_nucleus`."""

    def nucleus_floor(self, probs: Probabilities, top_p: float) -> float:
        floor = super().nucleus_floor(probs, top_p)
        larger = probs[probs > floor * (1 + 1e-9)]
        return float(larger.min(initial=1.0)) if len(larger) else floor


class TiesToHighest(ReferenceSampler):
    """Broken: greedy takes the last of the largest. Must fail `test_greedy_ties_go_to_the_lowest_id`."""

    def argmax(self, logits: NDArray[np.float64]) -> int:
        return int(np.flatnonzero(logits == logits.max())[-1])
