"""Who sees what happens on the API side: observers, and the hook for finished requests. Their faults stay their own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from enginectl.engine.router import Ticket
from enginectl.interfaces.observer import Observer
from enginectl.plugins import PluginHost
from enginectl.types import EngineStats

log = logging.getLogger("enginectl.client")


class Audience:
    """Tells observers and plugins; one that raises is logged, and the others are told all the same."""

    def __init__(self, host: PluginHost, observers: Sequence[Observer]) -> None:
        self._host = host
        self._observers = tuple(observers)

    def stats(self, stats: EngineStats) -> None:
        """A step's statistics. Called: once per output message."""
        for observer in self._observers:
            _tell(observer, observer.on_stats, stats)

    def finished(self, ticket: Ticket, error: str | None) -> None:
        """A request ended. Called: once per request."""
        finished = ticket.finished(error)
        for observer in self._observers:
            _tell(observer, observer.on_finished, finished)
        try:
            self._host.hook.enginectl_request_finished(request=ticket.request, finished=finished)
        except Exception:  # the tokens of other requests follow in the same message
            log.exception("request %s: a plugin's hook failed", finished.request_id)

    def close(self) -> None:
        """The engine is gone. May take seconds."""
        for observer in self._observers:
            _tell(observer, observer.close)


def _tell(observer: Observer, tell: Callable[..., None], *what: object) -> None:
    try:
        tell(*what)
    except Exception:  # an observer's fault is not the engine's
        log.exception("the observer %s failed", type(observer).__name__)
