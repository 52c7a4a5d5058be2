"""A step's block tables in FlashInfer's form: CSR over pages, once for all layers that share it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from enginectl.transfer import to_device


@dataclass(frozen=True, slots=True)
class Pages:
    """Row i reads pages indices[indptr[i]:indptr[i + 1]], the last one up to last_page_len[i] tokens (1 … page size).

    indptr: [num_rows + 1], last_page_len: [num_rows], int32 on the host, where `plan` wants them. indices: int32 on the
    device.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


def on_host(array: NDArray[np.integer], device: torch.device) -> Tensor:
    """A tensor on the host, pinned where it is copied to a GPU: a copy from other memory may wait for the GPU."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def page_counts(
    seq_lens: NDArray[np.int32], num_queries: NDArray[np.int32], block_size: int, window: int | None
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(first page, pages) of each row that some query of it sees.

    Positions count from the end in everything FlashInfer computes (causal, bottom-right aligned; window_left), so pages
    that lie behind the window may be left out; they may be null and must not be read.
    """
    first = np.zeros_like(seq_lens)
    if window is not None:
        first = np.maximum(0, seq_lens - num_queries - window + 1) // block_size
    last = -(-seq_lens // block_size)
    return first.astype(np.int32), (last - first).astype(np.int32)


def make_pages(
    block_table: Tensor,
    seq_lens: NDArray[np.int32],
    num_queries: NDArray[np.int32],
    *,
    block_size: int,
    window: int | None,
) -> Pages:
    """CSR of these rows. block_table: [num_rows, max_blocks] int32 on the device, any strides.

    The gather runs on the device; its size is known here, so that nothing waits for it.
    """
    first, counts = page_counts(seq_lens, num_queries, block_size, window)
    indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    device = block_table.device
    numbers = np.stack([counts, first, indptr[:-1]]).astype(np.int64)
    packed = to_device(numbers, device)
    total = int(indptr[-1])
    row = torch.repeat_interleave(torch.arange(len(counts), device=device), packed[0], output_size=total)
    column = torch.arange(total, device=device) - packed[2][row] + packed[1][row]
    last_page_len = ((seq_lens - 1) % block_size + 1).astype(np.int32)
    return Pages(on_host(indptr, device), block_table[row, column], on_host(last_page_len, device))
