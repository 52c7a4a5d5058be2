"""Sampled tokens on their way from the device to the host.

On a GPU they are copied into pinned memory behind the step's kernels; an event says when they are there, and waiting
for it is the only time a step holds up the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntRows = NDArray[np.int32]


class TokensAhead(ABC):
    """Token ids that the device has been asked for."""

    @abstractmethod
    def wait(self) -> IntRows:
        """[n] int32, as soon as they are on the host. Called: at most once."""


class Readback(ABC):
    """Starts copies. is_deferred: `start` returns before the tokens are known."""

    is_deferred: bool

    @abstractmethod
    def start(self, token_ids: Tensor) -> TokensAhead:
        """Ask for token ids [n] int64. At most two are on their way at a time. Called: last in a launch."""


class _Known(TokensAhead):
    def __init__(self, token_ids: IntRows) -> None:
        self._token_ids = token_ids

    def wait(self) -> IntRows:
        return self._token_ids


class DirectReadback(Readback):
    """For a CPU: the tokens are there."""

    is_deferred = False

    def start(self, token_ids: Tensor) -> TokensAhead:
        """Read them."""
        return _Known(token_ids.cpu().numpy().astype(np.int32))


class PinnedReadback(Readback):
    """Two pinned buffers of `max_tokens`, each with its event."""

    is_deferred = True

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self._free = [_Slot(self, max_tokens, device) for _ in range(2)]

    def start(self, token_ids: Tensor) -> TokensAhead:
        """Queue the copy behind what computes the tokens."""
        assert self._free, "at most two copies are on their way"
        self._free[-1].begin(token_ids)
        return self._free.pop()

    def release(self, slot: _Slot) -> None:
        """Its tokens have been read."""
        self._free.append(slot)


class _Slot(TokensAhead):
    def __init__(self, owner: PinnedReadback, max_tokens: int, device: torch.device) -> None:
        self._owner = owner
        self._device = device
        self._buffer = torch.empty(max_tokens, dtype=torch.int64, pin_memory=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._count = 0

    def begin(self, token_ids: Tensor) -> None:
        self._count = len(token_ids)
        self._buffer[: self._count].copy_(token_ids, non_blocking=True)
        self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> IntRows:
        try:
            self._event.synchronize()
            return self._buffer[: self._count].numpy().astype(np.int32)
        finally:
            self._owner.release(self)


def readback_for(device: torch.device, max_tokens: int) -> Readback:
    """What suits the device. max_tokens: most that a step samples."""
    return PinnedReadback(max_tokens, device) if device.type == "cuda" else DirectReadback()
