"""Observers and hooks at the end of a request."""

from __future__ import annotations

from enginectl.engine.audience import Audience
from enginectl.engine.router import Ticket
from enginectl.interfaces.observer import Observer
from enginectl.plugins import PluginHost
from enginectl.types import EngineStats, FinishedRequest, GenerateRequest, SamplingParams


class Broken(Observer):
    def on_stats(self, stats: EngineStats) -> None:
        raise RuntimeError("broken")

    def on_finished(self, finished: FinishedRequest) -> None:
        raise RuntimeError("broken")


class Listening(Observer):
    def __init__(self) -> None:
        self.heard: list[object] = []

    def on_stats(self, stats: EngineStats) -> None:
        self.heard.append(stats)

    def on_finished(self, finished: FinishedRequest) -> None:
        self.heard.append(finished.request_id)


def test_an_observer_that_raises_does_not_silence_the_ones_behind_it() -> None:
    """The finish of a request reached nobody behind an observer that raised."""
    listening = Listening()
    audience = Audience(PluginHost(only_named=True), [Broken(), listening])
    stats = EngineStats()
    audience.stats(stats)
    request = GenerateRequest(request_id="r", prompt_token_ids=[1], params=SamplingParams())
    audience.finished(Ticket(request, lambda: None), None)
    assert listening.heard == [stats, "r"]
