"""Adapters: weights added to the base per token, by slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor

    from enginectl.interfaces.model import Model


class AdapterInfo(msgspec.Struct, frozen=True):
    """A known adapter. version changes with its contents; it is part of the prefix-cache key."""

    name: str
    path: str
    rank: int
    version: str


class AdapterBackend(ABC):
    """Loads adapters, keeps some of them in device slots, and adds their part inside the model.

    Slot -1 means no adapter. A slot is referenced by each row that uses it and may be reused at zero references. A user is
    a choice that names the adapter, from the moment it is queued to its end, whether it has a row or waits.

    graph_capture: `begin_step` and what it prepares read the slots on the device only, so that both are recorded in a CUDA
    graph with the forward and replayed for other slots in the same tensor. Otherwise steps with adapters run eagerly.
    """

    graph_capture: bool = False

    @abstractmethod
    def attach(self, model: Model) -> None:
        """Hook into the model's linears. Called: once, after loading."""

    def read_ahead(self, name: str, path: str) -> Future[Any] | None:
        """Start to read, off the loop, what `load` of the same name and path needs. None, or a future that is done: load.

        Called: before `load` at run time, again when the future is done.
        """
        return None

    @abstractmethod
    def load(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        """Read and check an adapter into the host cache. Raises RequestError with the reason and changes nothing."""

    @abstractmethod
    def unload(self, name: str) -> None:
        """Take it from the list at once, and forget it when its last user is gone. Raises NotFoundError for an unknown
        name.
        """

    @abstractmethod
    def list(self) -> tuple[AdapterInfo, ...]:
        """Every adapter that requests may name."""

    def version(self, name: str) -> str | None:
        """The content version of an adapter, None if it is unknown. Called: once per admission attempt."""
        return next((info.version for info in self.list() if info.name == name), None)

    def add_user(self, name: str) -> None:
        """A choice that names it was queued. Called: once per choice."""

    def remove_user(self, name: str) -> None:
        """That choice is over, and so are its steps in flight. Called: once per choice."""

    @abstractmethod
    def acquire(self, name: str) -> int | None:
        """A slot holding the adapter, with one more reference; None if it must wait: every slot is in use by others, or
        its weights are being read. Never blocks.

        Called: once per admission attempt.
        """

    @abstractmethod
    def release(self, slot: int) -> None:
        """One reference less. Called: once per finish or preemption."""

    @abstractmethod
    def begin_step(self, slots: Tensor | None) -> None:
        """The slot of each token of the coming forward, [num_tokens] int32, -1 for none; None: nobody uses one.

        Called: once per step, before the forward; where steps are replayed, once when one is recorded, with -1 throughout;
        again before each part of a step, with its tokens, where the model takes it apart.
        """
