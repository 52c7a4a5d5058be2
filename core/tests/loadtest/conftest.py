"""A real server over a fake engine, on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from enginectl.builtin.openai import OpenAIFrontend
from enginectl.config import EngineConfig, ServerConfig
from enginectl.server import build_app, run_server
from enginectl.testing.fake_client import ByteTokenizer, FakeClient

Serve = Callable[..., str]


@contextmanager
def serving(client: FakeClient, **options: object) -> Iterator[str]:
    """The address of a server of this client."""
    server = ServerConfig(port=0, **options)  # type: ignore[arg-type]
    app = build_app(client, ByteTokenizer(), EngineConfig(model="fake/model"), server, [OpenAIFrontend()])
    address: list[str] = []
    started = threading.Event()
    stop = asyncio.Event()
    loop = asyncio.new_event_loop()

    def on_started(where: str) -> None:
        address.append(where)
        started.set()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(run_server(app, client, server, on_started=on_started, stop=stop))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(10), "the server did not start"
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers that end with the test."""
    with ExitStack() as stack:
        yield lambda client, **options: stack.enter_context(serving(client, **options))
