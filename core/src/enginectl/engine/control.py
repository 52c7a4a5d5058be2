"""Control messages inside the engine: the built-in ones, and those that parts bring."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from enginectl.compose import Assembled
from enginectl.errors import NotFoundError, RequestError, unknown
from enginectl.interfaces.adapter import AdapterBackend
from enginectl.interfaces.control import HasControls

Handler = Callable[[dict[str, Any]], Any]


class NotYet(Exception):
    """The answer needs work that goes on beside the loop: ask again when `future` is done."""

    def __init__(self, future: Future[Any]) -> None:
        super().__init__("the answer is not known yet")
        self.future = future


class ControlDesk:
    """Answers control messages between steps."""

    def __init__(self, engine: Assembled) -> None:
        self._engine = engine
        self._handlers: dict[str, Handler] = {
            "reset_prefix_cache": self._reset_prefix_cache,
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
            "list_adapters": self._list_adapters,
            "ping": lambda arguments: None,
        }
        for part in engine.parts.values():
            if isinstance(part, HasControls):
                for name, handler in part.controls().items():
                    if name in self._handlers:
                        raise RequestError(f"two parts answer the control message {name!r}")
                    self._handlers[name] = handler

    def handle(self, name: str, arguments: dict[str, Any]) -> Any:
        """The answer. Raises RequestError for an unknown name or bad arguments, NotYet if it has to be asked again."""
        if name not in self._handlers:
            raise NotFoundError(unknown("control message", name, self._handlers))
        try:
            return self._handlers[name](arguments)
        except (RequestError, NotYet):
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(f"control message {name!r}: bad arguments: {error}") from error

    def _reset_prefix_cache(self, arguments: dict[str, Any]) -> int:
        return self._engine.core.reset_prefix_cache(arguments.get("adapter"))

    def _adapters(self) -> AdapterBackend:
        backend: AdapterBackend | None = self._engine.parts.get("adapter")
        if backend is None:
            raise RequestError("no adapter backend serves; start with --enable-lora and an adapter plugin")
        return backend

    def _load_adapter(self, arguments: dict[str, Any]) -> Any:
        name, path, replace = arguments["name"], arguments["path"], bool(arguments.get("replace", False))
        adapters = self._adapters()
        reading = adapters.read_ahead(name, path)
        if reading is not None and not reading.done():
            raise NotYet(reading)
        if replace:
            self._engine.core.drain()
        info = adapters.load(name, path, replace=replace)
        if replace:
            self._engine.core.reset_prefix_cache(info.name)
        return msgspec.to_builtins(info)

    def _unload_adapter(self, arguments: dict[str, Any]) -> None:
        self._adapters().unload(arguments["name"])

    def _list_adapters(self, arguments: dict[str, Any]) -> Any:
        return msgspec.to_builtins(self._adapters().list())
