"""Attention over paged keys and values.

The store is two tensors a layer, `[num_blocks, block_size, num_kv_heads, head_dim]` ("NHD"); every backend reads and
writes that layout, so backends can be exchanged and combined.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class AttentionBatch:
    """One step's rows, packed: sequence i owns tokens query_start[i]:query_start[i + 1].

    Rows with a single query come first: num_decodes of them. seq_lens count the tokens a row attends over, this step's
    included. block_tables: [groups, num_seqs, max_blocks] int32, null entries 0. slot_mapping: [groups, num_tokens]
    int64, slot = block * block_size + offset. Tensors are on the device; *_host are the same as numpy arrays.
    """

    num_seqs: int
    num_tokens: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    query_start_host: NDArray[np.int32]
    seq_lens_host: NDArray[np.int32]

    def part(self, start: int, end: int) -> AttentionBatch:
        """Sequences [start, end) as a batch of their own."""
        host = self.query_start_host
        first, last = int(host[start]), int(host[end])
        lens = self.seq_lens_host[start:end]
        starts = host[start : end + 1] - first
        return AttentionBatch(
            num_seqs=end - start,
            num_tokens=last - first,
            num_decodes=min(max(self.num_decodes - start, 0), end - start),
            max_query_len=int((starts[1:] - starts[:-1]).max()),
            max_seq_len=int(lens.max()),
            query_start=self.query_start[start : end + 1] - first,
            seq_lens=self.seq_lens[start:end],
            block_tables=self.block_tables[:, start:end],
            slot_mapping=self.slot_mapping[:, first:last],
            query_start_host=starts,
            seq_lens_host=lens,
        )


class AttentionBackend(ABC):
    """Writes this step's keys and values into pages and attends over them. Built once the model's layers are known."""

    @abstractmethod
    def bind(self, kv: list[tuple[Tensor, Tensor]]) -> None:
        """Keep the store: per layer (keys, values), each [num_blocks, block_size, num_kv_heads, head_dim].

        Called: after the pool is allocated; on a GPU, once before with a store of one block, to measure a step.
        """

    @abstractmethod
    def prepare(self, batch: AttentionBatch) -> Any:
        """Turn a batch into whatever `write_kv` and `attend` need for all layers. Returns the plan.

        Called: once per step, before the first layer; never under graph capture.
        """

    def capture(self, batch: AttentionBatch) -> Any:
        """Like `prepare`, for a bucket whose buffers stay in place; the plan is replayed after `update`.

        Only for backends with the graph_capture capability. Called: once per bucket at start-up.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support graph capture")

    def update(self, plan: Any, batch: AttentionBatch) -> None:
        """Bring a captured plan up to this step's lengths before a replay.

        batch: as many queries a row as the captured one, and at most as many rows and columns of the block table; the
        rows it lacks are padding, whose output nobody reads. Called: once per replayed step.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support graph capture")

    @abstractmethod
    def write_kv(self, layer: int, k: Tensor, v: Tensor, plan: Any) -> None:
        """Store keys [num_tokens, num_kv_heads, head_dim] and values [num_tokens, num_kv_heads, v_head_dim].

        Any strides; after RoPE. Keeps nothing. Called: once per layer per step, before `attend`.
        """

    @abstractmethod
    def attend(self, layer: int, q: Tensor, plan: Any, *, sinks: Tensor | None = None) -> Tensor:
        """Attend over the paged context, causal and bottom-right aligned, within the layer's window.

        Keeps: nothing; the caller owns every tensor.
        q: [num_tokens, num_heads, head_dim], any strides but the last. sinks: [num_heads] extra logits, or None.
        Returns [num_tokens, num_heads, v_head_dim], same dtype, contiguous.
        Called: once per layer per step; may run under graph capture.
        Source: Kwon et al. 2023, section 4.
        """
