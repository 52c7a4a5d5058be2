"""Small arrays on their way to the device in the middle of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device | str) -> Tensor:
    """The same numbers as a tensor there, without waiting for what the device is doing.

    From other than pinned memory a copy to a GPU may wait until everything queued before it is done. torch keeps pinned
    memory for the next caller, and hands it out again only once the copy from it is done.

    On a CPU no copy is made of an array that is contiguous: the caller leaves it as it is.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
