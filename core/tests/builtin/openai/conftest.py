"""An application over a fake engine, reached in process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from enginectl.builtin.openai import OpenAIFrontend
from enginectl.config import EngineConfig, ServerConfig
from enginectl.engine.client import EngineClient
from enginectl.server import build_app
from enginectl.testing.fake_client import ByteTokenizer, FakeClient


@pytest.fixture
def client() -> FakeClient:
    """An engine that says "Hello, world!"."""
    return FakeClient()


@pytest.fixture
def connect() -> Callable[..., Any]:
    """`async with connect(client, server=…, engine=…) as http`."""

    @asynccontextmanager
    async def open_app(client: EngineClient, tokenizer: Any = None, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
        server = options.get("server", ServerConfig())
        engine = options.get("engine", EngineConfig(model="fake/model"))
        app = build_app(client, tokenizer or ByteTokenizer(), engine, server, [OpenAIFrontend()])
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield http

    return open_app


@pytest.fixture
async def http(client: FakeClient, connect: Callable[..., Any]) -> AsyncIterator[httpx.AsyncClient]:
    """The default application."""
    async with connect(client) as opened:
        yield opened
