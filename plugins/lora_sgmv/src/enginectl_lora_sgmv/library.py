"""Adapters by name, and the host memory that holds the weights of some of them."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginectl.errors import NotFoundError, RequestError, unknown
from enginectl.interfaces.adapter import AdapterInfo


@dataclass(frozen=True, slots=True)
class PreparedAdapter:
    """What host memory holds of an adapter. sites: what each of the model's linears copies to its slot."""

    version: str
    rank: int
    sites: Sequence[Any]


Read = Callable[[Path], PreparedAdapter]


@dataclass(slots=True)
class Known:
    """An adapter that requests may name, or have named. is_leaving: unloaded, and kept for the users it has."""

    info: AdapterInfo
    is_leaving: bool = False


def _step_aside() -> None:
    """Steps go first where cores are few. On Linux a thread has a niceness of its own."""
    if sys.platform == "linux":
        os.nice(10)


class Library:
    """Not thread safe, but for the reading, which is on a thread of its own.

    max_weights: adapters whose weights are kept, least recently used first to go; pinned names stay, beyond it if need
    be. Weights that were dropped are read again, and must not have changed.
    """

    def __init__(self, read: Read, *, max_weights: int, pinned: tuple[str, ...] = ()) -> None:
        self._read = read
        self._max_weights = max_weights
        self._pinned = frozenset(pinned)
        self._known: dict[str, Known] = {}
        self._users: dict[str, int] = {}
        self._weights: OrderedDict[str, PreparedAdapter] = OrderedDict()
        self._ahead: dict[tuple[str, str], Future[PreparedAdapter]] = {}
        self._again: dict[str, Future[PreparedAdapter]] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="adapters", initializer=_step_aside)
        self.num_reads = 0

    def infos(self) -> tuple[AdapterInfo, ...]:
        """What requests may name."""
        return tuple(known.info for known in self._known.values() if not known.is_leaving)

    @property
    def num_weights(self) -> int:
        """Adapters whose weights are in host memory."""
        return len(self._weights)

    def info(self, name: str) -> AdapterInfo | None:
        """Of an adapter that may be named or still has users."""
        known = self._known.get(name)
        return None if known is None else known.info

    def check_free(self, name: str, *, replace: bool) -> None:
        """Raise RequestError if the name is taken and is not to be replaced. What was read for it is dropped."""
        taken = name in self._known and not self._known[name].is_leaving
        if taken and not replace:
            self._ahead = {key: reading for key, reading in self._ahead.items() if key[0] != name}
            raise RequestError(
                f"adapter {name!r} is loaded, from {self._known[name].info.path!r}; give another name, or load it in "
                "place (load_inplace)",
                param="lora_name",
            )

    def read_ahead(self, name: str, path: Path) -> Future[Any]:
        """Start to read for `load`, once."""
        key = (name, str(path))
        if key not in self._ahead:
            self._ahead[key] = self._reader.submit(self._read, path)
        return self._ahead[key]

    def load(self, name: str, path: Path) -> AdapterInfo:
        """Know an adapter from now on, as it is on the disk. Raises RequestError, and nothing has changed."""
        reading = self._ahead.pop((name, str(path)), None)
        weights = self._read(path) if reading is None else reading.result()
        self.num_reads += 1
        info = AdapterInfo(name, str(path), weights.rank, weights.version)
        self._known[name] = Known(info)
        self._again.pop(name, None)
        self._keep(name, weights)
        return info

    def weights(self, name: str) -> PreparedAdapter | None:
        """Its weights, or None while they are read. Raises RequestError if the files are no longer what they were."""
        info = self._known[name].info
        if (found := self._weights.get(name)) is not None:
            self._weights.move_to_end(name)
            return found
        if name not in self._again:
            self._again[name] = self._reader.submit(self._read, Path(info.path))
        if not self._again[name].done():
            return None
        weights: PreparedAdapter = self._again.pop(name).result()
        self.num_reads += 1
        if weights.version != info.version:
            raise RequestError(
                f"adapter {name!r}: the files in {info.path!r} have changed since it was loaded; load it in place "
                "(load_inplace)"
            )
        self._keep(name, weights)
        return weights

    def _keep(self, name: str, weights: PreparedAdapter) -> None:
        self._weights[name] = weights
        self._weights.move_to_end(name)
        for other in [n for n in self._weights if n not in self._pinned and n != name]:
            if len(self._weights) <= self._max_weights:
                break
            del self._weights[other]

    # -- users ---------------------------------------------------------------------------------------------------

    def add_user(self, name: str) -> None:
        """One choice more names it."""
        self._users[name] = self._users.get(name, 0) + 1

    def remove_user(self, name: str) -> bool:
        """One choice less. Returns whether it was the last."""
        self._users[name] -= 1
        if self._users[name]:
            return False
        del self._users[name]
        self._again.pop(name, None)
        known = self._known.get(name)
        if known is not None and known.is_leaving:
            self._forget(name)
        return True

    def unload(self, name: str) -> None:
        """No new users. Raises NotFoundError for an unknown name."""
        known = self._known.get(name)
        if known is None or known.is_leaving:
            raise NotFoundError(unknown("adapter", name, [info.name for info in self.infos()]), param="lora_name")
        known.is_leaving = True
        if name not in self._users:
            self._forget(name)

    def _forget(self, name: str) -> None:
        del self._known[name]
        self._weights.pop(name, None)
        self._again.pop(name, None)
