"""From logits to token ids: logits processors in order, then the sampler.

Everything is a function of (row, position): the same request gives the same tokens whatever shares the batch, and a
verified draft is exactly what plain decoding would have produced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from enginectl.types import SamplingParams


@dataclass(slots=True)
class SampleBatch:
    """The logits rows of one step. Row i predicts the token at `positions[i]` of batch row `rows[i]`.

    rows: [n] int32 place in the persistent batch; several logits rows share one when drafts are verified.
    positions: [n] int32 absolute position of the predicted token (its history is tokens[row, :position]).
    token_ids: [max_num_seqs, max_model_len] int32, the whole token matrix on the host; drafts are already written, so
    a draft position's history is right. prompt_lens: [max_num_seqs] int32.
    """

    rows: NDArray[np.int32]
    positions: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    prompt_lens: NDArray[np.int32]

    def take(self, index: NDArray[np.intp]) -> SampleBatch:
        """The same batch, restricted to some logits rows."""
        return SampleBatch(self.rows[index], self.positions[index], self.token_ids, self.prompt_lens)


class RowParts(ABC):
    """What logits processors and samplers have in common: per-row parameters that come and go with requests.

    reads_tokens: it looks at `SampleBatch.token_ids`. Parts that do not are asked before the host knows the last token
    of each row, so that a GPU need not wait for it.
    """

    reads_tokens: bool = True

    def validate(self, params: SamplingParams, vocab_size: int) -> None:
        """Raise RequestError for a value this part cannot honour. Called: once per request, before it is queued."""

    @abstractmethod
    def add_row(self, row: int, params: SamplingParams, seed: int, choice: int, prompt_len: int) -> None:
        """A request took this row. prompt_len in tokens. Called: once per admission (and per resume)."""

    @abstractmethod
    def remove_row(self, row: int) -> None:
        """The row is empty again. Called: once per finish or preemption."""


class LogitsProcessor(RowParts):
    """Changes logits in place: bias, penalties, masks."""

    @abstractmethod
    def is_active(self, rows: NDArray[np.int32]) -> bool:
        """Whether any of these rows needs this processor in this step. Cheap: it is called every step."""

    @abstractmethod
    def needs_logits(self, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        """[n] bool: rows whose logits it changes. The others may take the fused greedy path."""

    @abstractmethod
    def apply(self, logits: Tensor, batch: SampleBatch) -> None:
        """Change logits fp32 [n, vocab_size] in place, row i by batch row i.

        Keeps nothing. Called: once per step when active.
        """


class Sampler(RowParts):
    """Chooses tokens."""

    @abstractmethod
    def greedy_rows(self, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        """[n] bool: rows whose answer is the argmax, so that nothing else is computed for them."""

    @abstractmethod
    def sample(self, logits: Tensor, batch: SampleBatch) -> Tensor:
        """Token ids [n] int64 from logits fp32 [n, vocab_size], which may be changed.

        Noise for row i depends on (seed, choice, positions[i]) only. Ties under greedy go to the lowest id.
        Called: once per step.
        """
