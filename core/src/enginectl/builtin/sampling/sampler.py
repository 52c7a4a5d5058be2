"""The sampler `torch`: greedy, temperature, top-k, top-p and min-p on any device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from enginectl.builtin.sampling import kernels, validation
from enginectl.builtin.sampling.noise import seed_word, uniform
from enginectl.builtin.sampling.processor import on_device
from enginectl.interfaces.sampler import SampleBatch, Sampler
from enginectl.types import SamplingParams

GREEDY_TEMPERATURE = 1e-5
"""Lower temperatures count as greedy."""

_CHUNK_ELEMENTS = 1 << 19
"""Logits worked on at once on a CPU: what stays in its cache."""

_EVERY = np.iinfo(np.int64).max  # top_k off: more than any row is wide


class TorchSampler(Sampler):
    """Greedy rows take the argmax. The others go through temperature, top-k, top-p of what top-k left, min-p relative
    to the most likely token; tokens that tie with the last one kept are kept. Then one uniform is inverted through
    the row's distribution in token-id order. Rows with NaN give the argmax of their finite logits.
    """

    reads_tokens = False

    def __init__(self, max_rows: int) -> None:
        self._greedy = np.ones(max_rows, dtype=np.bool_)
        self._listed = np.zeros(max_rows, dtype=np.bool_)
        self._temperature = np.ones(max_rows, dtype=np.float32)
        self._top_k = np.full(max_rows, _EVERY, dtype=np.int64)
        self._top_p = np.ones(max_rows, dtype=np.float64)
        self._min_p = np.zeros(max_rows, dtype=np.float64)
        self._seed = np.zeros(max_rows, dtype=np.uint64)
        self._choice = np.zeros(max_rows, dtype=np.int64)

    def validate(self, params: SamplingParams, vocab_size: int) -> None:
        validation.check_sampling(params)

    def add_row(self, row: int, params: SamplingParams, seed: int, choice: int, prompt_len: int) -> None:
        self._greedy[row] = params.temperature < GREEDY_TEMPERATURE
        self._listed[row] = params.top_k > 0 or params.top_p < 1.0
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k if params.top_k > 0 else _EVERY
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed[row] = seed_word(seed)
        self._choice[row] = choice

    def remove_row(self, row: int) -> None:
        self._greedy[row] = True

    def greedy_rows(self, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        return self._greedy[rows]

    def sample(self, logits: Tensor, batch: SampleBatch) -> Tensor:
        greedy = self._greedy[batch.rows]
        if greedy.all():
            return kernels.argmax(logits)
        token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        if greedy.any():
            index = on_device(np.flatnonzero(greedy), logits)
            token_ids[index] = kernels.argmax(logits.index_select(0, index))
        for part in self._chunks(np.flatnonzero(~greedy), batch.rows, logits):
            index = on_device(part, logits)
            token_ids[index] = self._sample_rows(kernels.select_rows(logits, index), batch.take(part))
        return token_ids

    def _chunks(self, index: NDArray[np.intp], rows: NDArray[np.int32], logits: Tensor) -> list[NDArray[np.intp]]:
        """The sampled rows in pieces that fit the cache, those with a list (top-k, top-p) apart from those without."""
        size = len(index) if logits.is_cuda else max(1, _CHUNK_ELEMENTS // logits.shape[-1])
        listed = self._listed[rows[index]]
        parts = (index[~listed], index[listed])
        return [part[i : i + size] for part in parts for i in range(0, len(part), size)]

    def _sample_rows(self, x: Tensor, batch: SampleBatch) -> Tensor:
        """Token ids [n] from logits [n, width], which are overwritten. Every row of the batch is sampled."""
        rows = batch.rows
        top_k, top_p, min_p = self._top_k[rows], self._top_p[rows], self._min_p[rows]
        keep = None
        if (top_k < x.shape[-1]).any():
            keep = kernels.at_least(x, kernels.kth_largest(x, top_k))
        temperature = self._temperature[rows]
        weights = kernels.to_weights(x, on_device(temperature, x) if (temperature != 1.0).any() else None)
        if keep is not None:
            weights.mul_(keep)
        if (top_p < 1.0).any():
            weights.mul_(kernels.at_least(weights, kernels.nucleus(weights, on_device(top_p, x))))
        if (min_p > 0.0).any():
            floor = (min_p * 2.0 ** kernels.weight_bits(weights.shape[-1])).astype(np.float32)
            weights.mul_(kernels.at_least(weights, on_device(floor, x)))
        noise = uniform(self._seed[rows], self._choice[rows], batch.positions)
        return kernels.pick(weights, on_device(noise, x))
