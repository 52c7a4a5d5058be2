"""A GPU of shapes: tensors on `cuda:0` without CUDA, and an error for everything that would make the host wait for it.

Such waits are what keeps a GPU idle, and on a CPU nothing shows them. Tensors there have no numbers, so that code which
needs one is found; and copies between host and device are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


class WaitsForDeviceError(AssertionError):
    """The host would wait for the GPU here."""


class FakeCuda:
    """`with fake.here():` the device is there; `with fake.watched():` inside it, waiting raises, and `waits` notes why."""

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.num_copies = 0
        self._is_watching = False
        self._pinned: set[int] = set()

    @contextmanager
    def here(self) -> Iterator[FakeCuda]:
        """Tensors may be put on `cuda:0`, and what is computed with them has shapes only."""
        with FakeTensorMode(allow_non_fake_inputs=True), _Watch(self), _Indexing(self):
            yield self

    @contextmanager
    def watched(self) -> Iterator[None]:
        """From here on nothing may wait."""
        before, self._is_watching = self._is_watching, True
        try:
            yield
        finally:
            self._is_watching = before

    def refuse(self, what: str) -> None:
        """The host waits, which is an error while somebody watches."""
        if self._is_watching:
            self.waits.append(what)
            raise WaitsForDeviceError(f"{what} makes the host wait for the GPU")

    def copy(self, source: Tensor, target: str, *, non_blocking: bool, to_pinned: bool = False) -> None:
        """A copy from one device to another is queued if the host's side of it is pinned and nobody wants to wait."""
        if source.device.type == target:
            return
        self.num_copies += 1
        is_pinned = to_pinned if target == "cpu" else source.untyped_storage()._cdata in self._pinned
        if not non_blocking or not is_pinned:
            how = "blocking" if not non_blocking else "pageable"
            self.refuse(f"a {how} copy of {tuple(source.shape)} to the {'host' if target == 'cpu' else 'GPU'}")

    def pin(self, tensor: Tensor) -> Tensor:
        """The same in pinned memory."""
        pinned = tensor.clone()
        self._pinned.add(pinned.untyped_storage()._cdata)
        return pinned


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation below autograd."""

    def __init__(self, fake: FakeCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func.namespace != "aten":
            return func(*args, **options)
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:  # inference mode does not take operations apart that consist of others
                return func.decompose(*args, **options)
        operation = func.overloadpacket
        if operation is _aten._pin_memory:
            return self._fake.pin(args[0])
        if operation is _aten._to_copy:
            device = options.get("device") or args[0].device
            self._fake.copy(args[0], torch.device(device).type, non_blocking=options.get("non_blocking", False))
        elif operation is _aten.copy_:
            non_blocking = options.get("non_blocking", len(args) > 2 and args[2])
            self._fake.copy(args[1], args[0].device.type, non_blocking=non_blocking)
        try:
            return func(*args, **options)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if not any(isinstance(x, Tensor) and x.is_cuda for x in (*args, *options.values())):
                raise
            self._fake.refuse(str(func))
            raise WaitsForDeviceError(f"{func} needs numbers, and there are only shapes") from error


class _Indexing(TorchFunctionMode):
    """Some functions of torch, indexing above all, ask CUDA for the device first: the same from operations."""

    def __init__(self, fake: FakeCuda) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].is_cuda:
            if func is Tensor.__getitem__:
                view, indices = self._view(*args)
                return _aten.index.Tensor(view, indices) if indices else view
            if func is Tensor.__setitem__:
                view, indices = self._view(*args[:2])
                value = args[2] if isinstance(args[2], Tensor) else view.new_full((), args[2])
                if indices:
                    _aten.index_put_(view, indices, value)
                else:
                    _aten.copy_(view, value)
                return None
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if "not linked with support for cuda" not in str(error):
                raise
            name = {"__invert__": "bitwise_not"}.get(func.__name__, func.__name__)
            return getattr(_aten, name)(*args, **(kwargs or {}))

    def _view(self, x: Tensor, key: Any) -> tuple[Tensor, list[Tensor | None]]:
        """What slices, numbers and None make of x, and what is left to index."""
        keys = list(key) if isinstance(key, tuple) else [key]
        if any(one is Ellipsis for one in keys):
            at = next(i for i, one in enumerate(keys) if one is Ellipsis)
            named = sum(one is not None and one is not Ellipsis for one in keys)
            keys[at : at + 1] = [slice(None)] * (x.dim() - named)
        dim, indices = 0, list[Tensor | None]()
        for one in keys:
            if isinstance(one, Tensor):
                if one.dtype in (torch.bool, torch.uint8):
                    self._fake.refuse("an index of booleans")
                indices += [None] * (dim - len(indices))
                indices.append(one)
                dim += 1
            elif one is None:
                x, dim = _aten.unsqueeze(x, dim), dim + 1
            elif isinstance(one, slice):
                x, dim = _aten.slice.Tensor(x, dim, one.start, one.stop, one.step or 1), dim + 1
            else:
                x = _aten.select.int(x, dim, one)
        return x, indices
