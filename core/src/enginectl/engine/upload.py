"""A step's arrays on their way to the device: all in one copy, from pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 256
"""Bytes at which an array starts: kernels are compiled for aligned pointers."""


class Upload:
    """Arrays to tensors on a CPU: no copy is made, and the arrays stay as they are."""

    def send(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """The same numbers as tensors on the device, in order. Called: once a step, with everything it needs."""
        return [torch.from_numpy(array) for array in arrays]


class StagedUpload(Upload):
    """Through two staging buffers in turn, pinned on CUDA, so that the copy does not hold up the host.

    A buffer is written again only once its copy is done. At overlap depth 1 that is always so: the step that it served
    has been retired.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots = [_Staging(device), _Staging(device)]

    def send(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """One buffer on the device, cut into views that start at multiples of ALIGNMENT."""
        ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
        starts = [0, *ends[:-1]]
        slot = self._slots.pop(0)
        self._slots.append(slot)
        host = slot.reserve(ends[-1])
        for start, array in zip(starts, arrays, strict=True):
            np.copyto(host[start : start + array.nbytes].view(array.dtype).reshape(array.shape), array)
        sent = torch.empty(ends[-1], dtype=torch.uint8, device=self._device)
        slot.copy_to(sent)
        return [
            sent[start : start + array.nbytes].view(_DTYPES[array.dtype.str]).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]


_DTYPES = {np.dtype(np.int32).str: torch.int32, np.dtype(np.int64).str: torch.int64}


class _Staging:
    """A buffer on the host that grows, and the event of its last copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._event = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> NDArray[np.uint8]:
        """The buffer, free to be written."""
        if self._event is not None:
            self._event.synchronize()
        if len(self._buffer) < num_bytes:
            size = 1 << max(16, (num_bytes - 1).bit_length())
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._is_cuda)
        return self._buffer.numpy()

    def copy_to(self, target: Tensor) -> None:
        """Queue the copy of as much as the target holds."""
        target.copy_(self._buffer[: len(target)], non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))


def upload_for(device: torch.device) -> Upload:
    """What suits the device."""
    return Upload() if device.type == "cpu" else StagedUpload(device)
