"""The sampler `triton`: greedy, temperature, top-k, top-p and min-p in one launch, never waiting for the GPU."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from enginectl.builtin.sampling import validation
from enginectl.builtin.sampling.kernels import BLOCK, weight_bits
from enginectl.builtin.sampling.noise import seed_word, uniform
from enginectl.builtin.sampling.sampler import GREEDY_TEMPERATURE
from enginectl.context import BuildContext
from enginectl.interfaces.sampler import SampleBatch, Sampler
from enginectl.transfer import to_device
from enginectl.types import SamplingParams
from enginectl_attention_triton.op_launch import argmax, sample

_OFF = (0.0, 0.0, 1.0, 0.0)
"""Greedy; no top-k, top-p, min-p."""


class TritonSampler(Sampler):
    """What core's sampler `torch` does, with the same noise: a function of (seed, choice, position)."""

    reads_tokens = False

    def __init__(self, max_rows: int) -> None:
        # Temperature (0 is greedy), top_k, top_p, min_p: all exact in fp64, so that one copy takes them to the device.
        self._params = np.tile(np.array(_OFF)[:, None], (1, max_rows))
        self._seed = np.zeros(max_rows, dtype=np.uint64)
        self._choice = np.zeros(max_rows, dtype=np.int64)

    def validate(self, params: SamplingParams, vocab_size: int) -> None:
        validation.check_sampling(params)

    def add_row(self, row: int, params: SamplingParams, seed: int, choice: int, prompt_len: int) -> None:
        is_greedy = params.temperature < GREEDY_TEMPERATURE
        temperature = 0.0 if is_greedy else params.temperature
        self._params[:, row] = temperature, max(params.top_k, 0), params.top_p, params.min_p
        self._seed[row] = seed_word(seed)
        self._choice[row] = choice

    def remove_row(self, row: int) -> None:
        self._params[:, row] = _OFF

    def greedy_rows(self, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        is_greedy: NDArray[np.bool_] = self._params[0, rows] == 0.0
        return is_greedy

    def sample(self, logits: Tensor, batch: SampleBatch) -> Tensor:
        rows = batch.rows
        if self.greedy_rows(rows).all():
            return argmax(logits)
        params = np.empty((5, rows.size))
        params[:4] = self._params[:, rows]
        bits = weight_bits(-(-logits.shape[1] // BLOCK) * BLOCK)
        params[3] *= 2.0**bits
        params[4] = uniform(self._seed[rows], self._choice[rows], batch.positions)
        return sample(logits, to_device(params, logits.device), bits)


def build(ctx: BuildContext) -> TritonSampler:
    """Provider factory."""
    return TritonSampler(ctx.engine.max_num_seqs)
