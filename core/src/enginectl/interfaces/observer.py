"""Observers see what happens and change nothing."""

from __future__ import annotations

from enginectl.types import EngineStats, FinishedRequest


class Observer:
    """Lives on the API side. What it is told it takes quickly; it may not raise."""

    def on_stats(self, stats: EngineStats) -> None:
        """State of the engine. Called: once per step's output message at most."""

    def on_finished(self, finished: FinishedRequest) -> None:
        """A request ended. Called: once per request."""

    def close(self) -> None:
        """The engine is gone: send what is left. May take seconds. Called: once, outside the event loop."""
