"""What clients and administrators see: cached tokens in `usage`, metrics, and the reset."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from enginectl.api_side import ApiSide
from enginectl.builtin.openai import OpenAIFrontend
from enginectl.builtin.prometheus import PrometheusFrontend, PrometheusObserver
from enginectl.compose import compose
from enginectl.config import EngineConfig, ServerConfig
from enginectl.engine.inprocess import InProcessClient
from enginectl.machine import detect_machine
from enginectl.plugins import PluginHost
from enginectl.server import build_app

ADMIN = {"Authorization": "Bearer root"}


@pytest.fixture
async def http(model: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The whole server but its socket, around the tiny model."""
    config = EngineConfig(model=str(model), dtype="float32", max_num_seqs=4, max_model_len=512, block_size=16)
    host, machine = PluginHost(), detect_machine()
    engine = compose(config, machine=machine, host=host)
    api, observer = ApiSide(engine.config, host, machine), PrometheusObserver()
    client = InProcessClient(engine, api.detokenizer(engine.info), [observer])
    server = ServerConfig(admin_api_key="root", served_model_name=("tiny",))
    frontends = [OpenAIFrontend(), PrometheusFrontend()]
    app = build_app(client, api.load_tokenizer(engine.info), engine.config, server, frontends, [observer])
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as opened:
        yield opened
    await client.close()


async def cached_tokens(http: httpx.AsyncClient, **fields: Any) -> int:
    body = {"model": "tiny", "prompt": "x" * 100, "max_tokens": 2, "temperature": 0, **fields}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


async def metric(http: httpx.AsyncClient, name: str) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"enginectl:{name}_total"))


async def test_usage_metrics_salt_and_reset(http: httpx.AsyncClient) -> None:
    assert [await cached_tokens(http) for _ in range(2)] == [0, 96]
    assert [await cached_tokens(http, cache_salt="mine") for _ in range(2)] == [0, 96]
    assert await metric(http, "prefix_cache_hits") == 192
    assert await metric(http, "prefix_cache_queries") == 400
    assert (await http.post("/reset_prefix_cache")).status_code in (401, 403)
    reset = await http.post("/reset_prefix_cache", headers=ADMIN)
    assert (reset.status_code, reset.json()["detail"]) == (200, "12")
    assert await cached_tokens(http) == 0


async def test_choices_of_one_request_share_its_prompt(http: httpx.AsyncClient) -> None:
    body = {"model": "tiny", "prompt": "y" * 100, "max_tokens": 2, "n": 3, "seed": 1}
    usage = (await http.post("/v1/completions", json=body)).json()["usage"]
    assert usage["prompt_tokens"] == 100
    assert usage["prompt_tokens_details"]["cached_tokens"] in (0, 96)
    assert await cached_tokens(http, prompt="y" * 100) == 96
