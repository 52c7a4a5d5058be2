"""The KV store: two tensors a layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from enginectl.errors import OutOfMemoryError
from enginectl.interfaces.kv import KVLayout
from enginectl.interfaces.model import LayerSpec
from enginectl.units import format_size


def make_pages(
    layers: Sequence[LayerSpec], layout: KVLayout, device: torch.device, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values, [num_blocks, block_size, num_kv_heads, head_dim] each, zeroed. Raises OutOfMemoryError."""
    pages = []
    for layer in layers:
        shape = (layout.num_blocks, layout.block_size, layer.num_kv_heads)
        keys = _zeros((*shape, layer.head_dim), device, dtype)
        pages.append((keys, _zeros((*shape, layer.v_head_dim), device, dtype)))
    return pages


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    size = int(np.prod(shape)) * dtype.itemsize
    try:
        if device.type == "cpu":  # calloc: pages are committed when first written
            return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise OutOfMemoryError(
            f"no memory for {format_size(size)} of KV cache on {device}; lower --kv-cache-memory-bytes, "
            "--gpu-memory-utilization or --max-model-len"
        ) from error
