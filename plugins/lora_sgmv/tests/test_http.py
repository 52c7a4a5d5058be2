"""What clients and administrators see, with the engine in a process of its own that is killed and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from enginectl.api_side import ApiSide
from enginectl.builtin.openai import OpenAIFrontend
from enginectl.config import EngineConfig, ServerConfig
from enginectl.engine.client import EngineState
from enginectl.engine.supervisor import EngineProcess
from enginectl.machine import detect_machine
from enginectl.plugins import PluginHost
from enginectl.server import build_app
from enginectl.testing.tiny_adapters import save_adapter

ADMIN = {"Authorization": "Bearer root"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@dataclass
class Served:
    """The server without its socket, and the engine behind it."""

    http: httpx.AsyncClient
    engine: EngineProcess
    root: Path

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body, headers=ADMIN)

    async def text(self, model: str) -> str:
        """What a model says."""
        body = {"model": model, "prompt": "hello", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = await self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        found: str = answer.json()["choices"][0]["text"]
        return found

    async def models(self) -> dict[str, dict[str, Any]]:
        return {card["id"]: card for card in (await self.http.get("/v1/models")).json()["data"]}


@pytest.fixture
async def served(tiny: Callable[[str], Path], tmp_path: Path) -> AsyncIterator[Served]:
    root = tmp_path / "root"
    for seed in range(4):
        save_adapter("llama", root / str(seed), seed=seed, std=1.0)
    config = EngineConfig(
        model=str(tiny("llama")),
        dtype="float32",
        max_num_seqs=4,
        max_model_len=128,
        num_threads=1,
        enable_lora=True,
        max_loras=2,
        lora_modules={"support": str(root / "0"), "old": str(root / "3")},
        plugin_options={"sgmv": {"roots": [str(root)]}},
    )
    host, machine = PluginHost(), detect_machine()
    api = ApiSide(config, host, machine)
    engine = EngineProcess(config, host, api.detokenizer)
    await engine.start()
    server = ServerConfig(admin_api_key="root", served_model_name=("tiny",))
    app = build_app(engine, api.load_tokenizer(engine.info), config, server, [OpenAIFrontend()], [])
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as http:
        yield Served(http, engine, root)
    await engine.close()


async def test_adapters_by_http_and_after_a_crash(served: Served) -> None:
    """Law 14a: those loaded, replaced and unloaded at run time are as they were."""
    models = await served.models()
    assert set(models) == {"tiny", "support", "old"}
    assert (models["support"]["parent"], models["support"]["root"]) == ("tiny", str(served.root / "0"))
    assert (await served.http.post(LOAD, json={"lora_name": "x", "lora_path": "y"})).status_code in (401, 403)
    outside = await served.post(LOAD, lora_name="billing", lora_path=str(served.root.parent))
    assert (outside.status_code, outside.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "outside the directories" in outside.json()["error"]["message"]
    assert (await served.post(LOAD, lora_name="billing", lora_path=str(served.root / "1"))).status_code == 200
    taken = await served.post(LOAD, lora_name="billing", lora_path=str(served.root / "2"))
    assert taken.status_code == 400
    assert "load it in place" in taken.json()["error"]["message"]
    first = {name: await served.text(name) for name in ("tiny", "support", "billing", "old")}
    assert len(set(first.values())) == 4
    again = await served.post(LOAD, lora_name="support", lora_path=str(served.root / "2"), load_inplace=True)
    assert again.status_code == 200
    assert (await served.post(UNLOAD, lora_name="old")).status_code == 200
    assert (await served.post(UNLOAD, lora_name="old")).status_code == 404
    assert set(await served.models()) == {"tiny", "support", "billing"}
    second = {name: await served.text(name) for name in ("tiny", "support", "billing")}
    assert second["support"] not in first.values()
    assert all(second[name] == first[name] for name in ("tiny", "billing"))

    assert served.engine.pid is not None
    os.kill(served.engine.pid, signal.SIGKILL)
    while served.engine.state is EngineState.RUNNING:
        await asyncio.sleep(0.01)
    async with asyncio.timeout(120):
        while served.engine.state is not EngineState.RUNNING:
            await asyncio.sleep(0.05)
    assert set(await served.models()) == {"tiny", "support", "billing"}
    assert {name: await served.text(name) for name in second} == second
    gone = await served.http.post("/v1/completions", json={"model": "old", "prompt": "x"})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
