"""Speculators propose drafts; core verifies them, so a wrong draft costs time and never a token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from enginectl.interfaces.model import LayerSpec
    from enginectl.interfaces.sampler import LogitsProcessor, Sampler
    from enginectl.types import SamplingParams


@dataclass(slots=True)
class DraftBatch:
    """Rows that just got verified tokens and may be given drafts.

    rows: [n] int32. num_tokens: [n] int32 verified tokens of each row. limit: [n] int32 most drafts wanted (0 for
    none). token_ids: [max_num_seqs, max_model_len + 1 + max_drafts] int32 on the host; what is written behind a row's
    tokens is scratch. hidden: [n, hidden_size], the hidden row that predicted the last verified token, for speculators
    with the hidden_states capability, else None.
    """

    rows: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    limit: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    hidden: Tensor | None = None


@dataclass(slots=True)
class DraftStore:
    """What a speculator with layers of its own works on: the runner's arrays, to be read only, and its pages.

    kv: (keys, values) for each of its `kv_layers`, laid out as the target's and addressed by the same block ids.
    block_table: [groups, max_num_seqs, max_blocks] int32; num_blocks: [max_num_seqs] int32 entries of a row that hold.
    prompt_lens: [max_num_seqs] int32. processors, sampler: the target's, so that a draft can be chosen as it will be.
    """

    kv: list[tuple[Tensor, Tensor]]
    block_table: NDArray[np.int32]
    num_blocks: NDArray[np.int32]
    block_size: int
    prompt_lens: NDArray[np.int32]
    processors: Sequence[LogitsProcessor]
    sampler: Sampler


class Speculator(ABC):
    """Proposes what comes next. max_drafts: most tokens it ever proposes for a row. reads_hidden: it wants
    `DraftBatch.hidden` (needs a model that keeps hidden rows). is_adaptive: how many drafts a row gets is chosen by what
    they cost and how often they are right; False: always as many as the request allows.
    """

    max_drafts: int
    reads_hidden: bool = False
    is_adaptive: bool = True

    def kv_layers(self) -> Sequence[LayerSpec]:
        """Layers of its own whose keys and values live in the pool, under the target's block ids. They count in its
        capacity, and rows are given slots for max_drafts tokens behind their own. Called: once, before it is sized.
        """
        return ()

    def bind(self, store: DraftStore) -> None:
        """Keep what it needs of the store. Called: once, before the first row."""

    @abstractmethod
    def add_row(self, row: int, token_ids: NDArray[np.int32], params: SamplingParams) -> None:
        """A request took this row with these tokens. Called: once per admission (and per resume)."""

    @abstractmethod
    def remove_row(self, row: int) -> None:
        """The row is empty again."""

    @abstractmethod
    def propose(self, batch: DraftBatch) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Drafts [n, max_drafts] int32 and how many of each row count, [n] int32, at most limit.

        Called: once per step, after verification; not in steps in which no row may have drafts.
        """
