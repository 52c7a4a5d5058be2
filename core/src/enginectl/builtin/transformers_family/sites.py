"""Where adapters may add to a transformers model: forward hooks on its linears, there only while a step needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from enginectl.interfaces.model import LinearSite

Add = Callable[[Tensor, Tensor], Tensor]


class Sites:
    """The linears of one module. Steps with and without adapters follow each other in long runs, so hooks are put on and
    taken off when the kind of step changes, and a step without adapters has none.
    """

    def __init__(self, module: nn.Module, head: nn.Module) -> None:
        self.found: list[LinearSite] = []
        self.num_tokens = 0
        """Of the forward that runs."""
        self._module = module
        self._connected: list[tuple[nn.Module, Callable[[nn.Module, Any, Tensor], Tensor]]] = []
        self._handles: list[RemovableHandle] = []
        self._is_on = False
        for name, part in module.named_modules():
            if part is head or ".experts." in name or not isinstance(part, nn.Linear | Conv1D):
                continue
            out_size, in_size = part.weight.shape if isinstance(part, nn.Linear) else reversed(part.weight.shape)
            self.found.append(LinearSite((name,), in_size, (out_size,), self._connector(part)))

    def _connector(self, part: nn.Module) -> Callable[[Add], None]:
        def connect(add: Add) -> None:
            def hook(_: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
                return add(inputs[0].flatten(0, -2), out.flatten(0, -2)).view(out.shape)

            self._connected.append((part, hook))

        return connect

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take back what is offered of a linear that, in a forward until the end, does not see one row for each token.

        Some compute from keys and values of all tokens so far; what adapters add is laid out by the tokens of the step.
        """
        strange: set[str] = set()

        def look(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                if inputs[0].shape[:-1].numel() != self.num_tokens:
                    strange.add(name)

            return hook

        parts = dict(self._module.named_modules())
        handles = [parts[name].register_forward_pre_hook(look(name)) for site in self.found for name in site.modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self.found = [site for site in self.found if site.modules[0] not in strange]

    def switch(self, on: bool) -> None:
        """Whether the next forward passes through what is connected."""
        if on == self._is_on:
            return
        self._is_on = on
        if on:
            self._handles = [part.register_forward_hook(hook) for part, hook in self._connected]
        else:
            for handle in self._handles:
                handle.remove()
            self._handles = []
