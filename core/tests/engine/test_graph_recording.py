"""Recording decode graphs on CUDA: the order of calls, and what is left when it fails, over a torch.cuda that notes calls."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from enginectl.engine.graphs import CudaRecorder, DecodeGraphs, record_graphs
from enginectl.errors import EngineDeadError
from enginectl.interfaces.model import Kept


class Failing(DecodeGraphs):
    """Cannot be recorded. lost: what asking the device then raises."""

    def __init__(self, error: Exception, lost: Exception | None = None) -> None:
        self.error = error
        self.lost = lost
        self.num_cleared = 0

    def record(self, *, largest_only: bool = False) -> None:
        raise self.error

    def clear(self) -> None:
        self.num_cleared += 1
        if self.lost is not None:
            raise self.lost


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("operation not permitted when stream is capturing\nand a stack"), "when stream is capturing"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried …"), "lower --gpu-memory-utilization"),
    ],
)
def test_a_model_that_cannot_be_recorded_runs_eagerly_and_says_so(
    error: Exception, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as one that waits for the device inside its forward. What was recorded until then is given back."""
    graphs = Failing(error)
    with caplog.at_level(logging.WARNING):
        assert record_graphs(graphs) is None
    assert graphs.num_cleared == 1
    assert "without CUDA graphs" in caplog.text
    assert words in caplog.text


def test_a_device_that_recording_killed_is_an_error_at_the_start() -> None:
    """The engine used to go on, and died of its first step, again and again."""
    illegal = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(EngineDeadError, match=r"lost while decode steps were recorded \(CUDA error.*--enforce-eager"):
        record_graphs(Failing(illegal, illegal))


class FakeGraphs:
    """torch.cuda as far as recording needs it: every call is noted, on the stream it was made on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.current = "main"
        self.mode = "default"
        self.num_streams = self.num_graphs = 0
        self.broken = False
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "Stream", self.make_stream)
        monkeypatch.setattr(cuda, "current_stream", lambda device: SimpleNamespace(wait_stream=self.note_wait("main")))
        monkeypatch.setattr(cuda, "stream", self.on_stream)
        monkeypatch.setattr(cuda, "CUDAGraph", self.make_graph)
        monkeypatch.setattr(cuda, "graph", self.capture)
        monkeypatch.setattr(cuda, "get_sync_debug_mode", lambda: self.mode)
        monkeypatch.setattr(cuda, "set_sync_debug_mode", lambda mode: setattr(self, "mode", mode))

    def note_wait(self, waiter: str) -> Callable[[Any], None]:
        return lambda other: self.events.append(f"{waiter} waits")

    def make_stream(self, device: torch.device) -> Any:
        self.num_streams += 1
        return SimpleNamespace(name="side", wait_stream=self.note_wait("side"))

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def make_graph(self) -> Any:
        self.num_graphs += 1
        return SimpleNamespace(pool=lambda: "the pool", replay=lambda: None)

    @contextmanager
    def capture(self, graph: Any, pool: Any, stream: Any, *, capture_error_mode: str) -> Iterator[None]:
        """As torch's: it leaves its stream only if the capture ends well."""
        self.events.append(f"capture {pool} {capture_error_mode}")
        self.current = stream.name
        yield
        self.events.append("captured")

    def run(self) -> Kept:
        """What is recorded. It waits for the device if it is broken."""
        self.events.append(f"run on {self.current}")
        if self.broken and self.mode != "default":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        return Kept()


def test_recording_runs_twice_before_on_the_stream_of_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream for all graphs: a library's workspace for each would fill the device. One pool from the second on."""
    fake = FakeGraphs(monkeypatch)
    recorder = CudaRecorder(torch.device("cuda:0"))
    for pool in ("None", "the pool"):
        fake.events.clear()
        recorder.record(fake.run)
        assert fake.events == [
            "side waits",
            "run on side",
            "run on side",
            f"capture {pool} thread_local",
            "run on side",
            "captured",
            "main waits",
        ]
    assert (fake.num_streams, fake.num_graphs, fake.current, fake.mode) == (1, 2, "main", "default")


def test_what_waits_for_the_device_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that fails leaves torch's allocator in a state in which it gives no memory back."""
    fake = FakeGraphs(monkeypatch)
    fake.broken = True
    with pytest.raises(RuntimeError, match=r"the forward waits for the GPU \(.*test_graph_recording\.py:\d+\)"):
        CudaRecorder(torch.device("cuda:0")).record(fake.run)
    assert fake.num_graphs == 0
    assert (fake.current, fake.mode) == ("main", "default")


def test_a_capture_that_fails_leaves_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.graph stays on its own in that case."""
    fake = FakeGraphs(monkeypatch)
    recorder, runs = CudaRecorder(torch.device("cuda:0")), iter([Kept(), Kept()])

    def run() -> Kept:
        found = next(runs, None)
        if found is None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return found

    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.record(run)
    assert fake.current == "main"
