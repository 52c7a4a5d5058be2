"""The adapter backend: adapters by name, their weights in slots on the device, and their part in each linear."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from enginectl.context import BuildContext
from enginectl.errors import ConfigError, NotFoundError, RequestError, UnsupportedError, unknown
from enginectl.interfaces.adapter import AdapterBackend, AdapterInfo
from enginectl.interfaces.model import LinearSite, Model
from enginectl_lora_sgmv.checkpoint import CONFIG, WEIGHTS, Target, read_adapter
from enginectl_lora_sgmv.config import SgmvConfig
from enginectl_lora_sgmv.library import Library, PreparedAdapter
from enginectl_lora_sgmv.slots import make_slots


class Store(Protocol):
    """The weights of one linear by slot, as in `LowRankSlots`."""

    def prepare(self, parts: Parts | None) -> Any:
        """What `write` copies."""

    def write(self, slot: int, prepared: Any) -> None:
        """Replace what a slot holds."""


class AddingStore(Store, Protocol):
    """A store that adds to the linear's output."""

    def add(self, rows: Tensor, out: Tensor, step: Any) -> Tensor:
        """out + what each row's adapter adds."""


class Kernels(NamedTuple):
    """make_store: what holds and adds a linear's adapters. segments: a step's slots and the ranks by slot to what
    `AddingStore.add` reads. graph_capture: neither looks at the slots on the host.
    """

    make_store: Callable[..., AddingStore]
    segments: Callable[[Tensor, Sequence[int]], Any]
    graph_capture: bool = False


Parts = Sequence[tuple[Tensor, Tensor] | None]


class SgmvAdapters(AdapterBackend):
    """LoRA on every linear that the model offers.

    max_loras: slots. max_cpu_loras: adapters whose weights stay in host memory. trusted: name to path of adapters that
    may lie outside the roots.
    """

    def __init__(
        self,
        *,
        max_loras: int,
        max_lora_rank: int,
        max_cpu_loras: int | None,
        dtype: torch.dtype,
        device: str = "cpu",
        config: SgmvConfig | None = None,
        trusted: dict[str, str] | None = None,
        kernels: Kernels,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config or SgmvConfig()
        self._roots = [Path(root).expanduser().resolve() for root in self._config.roots]
        self._trusted = trusted or {}
        self._max_rank = max_lora_rank
        self._max_weights = max_cpu_loras or max_loras
        self._dtype = dtype
        self._device = device
        self._kernels = kernels
        self.graph_capture = kernels.graph_capture
        self._clock = clock
        self.table = make_slots(max_loras)
        self._ranks = [0] * max_loras
        self.sites: Sequence[LinearSite] = ()
        self._stores: list[Store] = []
        self._needs_segments = False
        self._library: Library | None = None
        self._step: Any | None = None

    @property
    def library(self) -> Library:
        """Adapters by name."""
        assert self._library is not None, "attach() comes first"
        return self._library

    def attach(self, model: Model) -> None:
        """Make room in the slots for each linear. Raises UnsupportedError if the model offers none."""
        sites = self.sites = model.linear_sites()
        if not sites:
            raise UnsupportedError(
                f"adapter 'sgmv' cannot add to model {model.spec.architecture} ({type(model).__name__}), which offers "
                "no linears; choose another --model-family, or serve without --enable-lora"
            )
        is_pinned = torch.device(self._device).type == "cuda"
        target = Target(sites, self._dtype, self._max_rank, is_pinned)
        self._stores = [self._store(site) for site in sites]
        self._library = Library(
            functools.partial(self._read, target=target), max_weights=self._max_weights, pinned=self._config.pinned
        )

    def _store(self, site: LinearSite) -> Store:
        """The model's own where it adds low-rank products itself."""
        num_slots = len(self.table.slots)
        if site.low_rank is not None:
            return site.low_rank(num_slots, self._max_rank)
        self._needs_segments = True
        store = self._kernels.make_store(
            num_slots, self._max_rank, site.in_size, site.out_sizes, dtype=self._dtype, device=self._device
        )
        site.connect(functools.partial(self._add, store.add))
        return store

    def _read(self, path: Path, target: Target) -> PreparedAdapter:
        """Read, checked and laid out for the slots, so that a step that takes a slot only copies. Thread safe."""
        weights = read_adapter(path, target)
        parts = [store.prepare(weights.sites.get(index)) for index, store in enumerate(self._stores)]
        return PreparedAdapter(weights.version, weights.rank, parts)

    def _add(self, add: Callable[[Tensor, Tensor, Any], Tensor], rows: Tensor, out: Tensor) -> Tensor:
        step = self._step
        assert step is not None, "begin_step() was told that nobody uses an adapter"
        return add(rows, out, step)

    # -- adapters by name ----------------------------------------------------------------------------------------

    def read_ahead(self, name: str, path: str) -> Future[Any] | None:
        """Start to read. What `load` would refuse unread is left to it."""
        try:
            return self.library.read_ahead(name, self._checked(name, path))
        except RequestError:
            return None

    def load(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        """See `AdapterBackend`. Rows that run with a replaced adapter end with the weights they began with."""
        self.library.check_free(name, replace=replace)
        info = self.library.load(name, self._checked(name, path))
        self.table.clear(name)
        return info

    def _checked(self, name: str, path: str) -> Path:
        """The real path, if adapters may be loaded from there."""
        if not name:
            raise RequestError("the name of an adapter may not be empty", param="lora_name")
        real = Path(path).expanduser().resolve()
        if self._trusted.get(name) == path:
            return real
        if not self._roots:
            raise RequestError(
                f"adapter {name!r} cannot be loaded at run time: no directory is open for that; start with "
                "--sgmv.roots DIR",
                param="lora_path",
            )
        for part in (real, (real / CONFIG).resolve(), (real / WEIGHTS).resolve()):
            if not any(part.is_relative_to(root) for root in self._roots):
                raise RequestError(
                    f"adapter {name!r}: {path!r} is outside the directories that adapters are loaded from "
                    "(--sgmv.roots)",
                    param="lora_path",
                )
        return real

    def unload(self, name: str) -> None:
        """Off the list now; its weights go with its last user."""
        self.library.unload(name)
        if self.library.info(name) is None:
            self.table.clear(name)

    def list(self) -> tuple[AdapterInfo, ...]:
        """What requests may name."""
        return self.library.infos()

    def version(self, name: str) -> str | None:
        """Also of one that is unloaded and has users."""
        info = self.library.info(name)
        return None if info is None else info.version

    def add_user(self, name: str) -> None:
        """One more."""
        self.library.add_user(name)

    def remove_user(self, name: str) -> None:
        """The last one takes a place in the queue for slots with it, and an unloaded adapter's weights."""
        if self.library.remove_user(name):
            self.table.stop_waiting(name)
            if self.library.info(name) is None:
                self.table.clear(name)

    # -- slots ---------------------------------------------------------------------------------------------------

    def acquire(self, name: str) -> int | None:
        """The slot that holds it, or one that nobody uses, filled now."""
        info = self.library.info(name)
        if info is None:
            raise NotFoundError(unknown("adapter", name, [known.name for known in self.list()]), param="model")
        content, table = (name, info.version), self.table
        slot = table.find(content)
        if slot is None:
            if table.is_resident(content):
                return None  # the slot is promised to one that has waited for long
            slot = table.free_slot(name)
            if slot is None:
                table.wait(name, self._clock(), self._config.max_wait_s)
                return None
            weights = self.library.weights(name)
            if weights is None:
                return None
            self._fill(slot, weights)
            table.fill(slot, content)
        table.take(slot)
        return slot

    def _fill(self, slot: int, adapter: PreparedAdapter) -> None:
        for store, prepared in zip(self._stores, adapter.sites, strict=True):
            store.write(slot, prepared)
        self._ranks[slot] = adapter.rank

    def release(self, slot: int) -> None:
        """One reference less; an adapter that has no other name for its weights any more loses them."""
        self.table.release(slot)
        content = self.table.slots[slot].content
        if content is not None and self.version(content[0]) != content[1]:
            self.table.drop(slot)

    def begin_step(self, slots: Tensor | None) -> None:
        """Order the tokens by slot, once for all linears."""
        if self._needs_segments:
            self._step = None if slots is None else self._kernels.segments(slots, self._ranks)


def build(ctx: BuildContext) -> SgmvAdapters:
    """The factory: needs ctx.engine, ctx.dtype and ctx.device."""
    config = ctx.options or SgmvConfig()
    engine = ctx.engine
    return SgmvAdapters(
        max_loras=engine.max_loras,
        max_lora_rank=engine.max_lora_rank,
        max_cpu_loras=engine.max_cpu_loras,
        dtype=getattr(torch, ctx.dtype),
        device=ctx.device,
        config=config,
        trusted=engine.lora_modules,
        kernels=choose_kernels(config.kernels, ctx.device),
    )


def choose_kernels(name: str, device: str) -> Kernels:
    """By the option and the device."""
    if name == "triton" or (name == "auto" and torch.device(device).type == "cuda"):
        if torch.device(device).type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError(f"--sgmv.kernels triton needs a GPU, and this engine computes on {device!r}; use auto")
        from enginectl_lora_sgmv.triton_store import TritonStore, device_segments

        return Kernels(TritonStore, device_segments, graph_capture=True)
    return torch_kernels()


def torch_kernels() -> Kernels:
    """Plain torch, which serves everywhere."""
    from enginectl_lora_sgmv.segments import segments_of
    from enginectl_lora_sgmv.torch_store import TorchStore

    return Kernels(TorchStore, segments_of)
