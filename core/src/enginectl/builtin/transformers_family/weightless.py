"""A model whose weights take no memory, to be looked at before they are read.

Module code that chooses experts by what is in a tensor cannot run on the meta device. So every parameter here is one
zero, seen as often as its shape says, and only what is small is computed: the rest would come out as zeros after seconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

LARGE = 1 << 16
"""Elements of a tensor from which on nothing is computed with it: a few tokens' activations are smaller, weights larger."""


class OnlySmall(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, what would be computed from a large tensor is zeros of the right shapes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Shapes come from the meta device."""
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        if func._schema.is_mutable and isinstance(args[0], Tensor) and is_one_element(args[0]):
            return args[0]
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not any(tensor.is_floating_point() and tensor.numel() >= LARGE for tensor in tensors):
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        return tree_map_only(Tensor, zeros_like, func(*args, **kwargs))


def zeros_like(tensor: Tensor) -> Tensor:
    """One zero on the CPU, seen in every place of the tensor's shape."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def is_one_element(tensor: Tensor) -> bool:
    """Whether several places of it are one in memory, so that it cannot be written to."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def fill(module: nn.Module) -> None:
    """Give a module that was made on the meta device parameters and buffers on the CPU; shared ones stay shared."""
    made: dict[Tensor, Tensor] = {}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in made:
                made[parameter] = nn.Parameter(zeros_like(parameter), requires_grad=False)
            setattr(part, name, made[parameter])
        for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(part, name, zeros_like(buffer))
