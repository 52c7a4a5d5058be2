"""The other routes: models, tokenize, health, server_info, administration, OpenAPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from starlette.routing import Route

from enginectl.builtin.openai import OpenAIFrontend, build_frontend
from enginectl.builtin.openai.answers import ModelList
from enginectl.config import EngineConfig, ServerConfig
from enginectl.engine.client import EngineState
from enginectl.errors import ConfigError, NotFoundError
from enginectl.interfaces.frontend import FrontendContext
from enginectl.testing.fake_client import ByteTokenizer, FakeClient, fake_info

ADMIN = ServerConfig(admin_api_key="admin")
AS_ADMIN = {"authorization": "Bearer admin"}
WITH_ADAPTERS = {"table": (("adapter", "sgmv", "lora", "d", "1"),), "adapters": ("billing",)}


def adapter_control(client: FakeClient) -> dict[str, dict[str, Any]]:
    """Let the fake engine keep adapters; returns them."""
    known = {"billing": {"name": "billing", "path": "/a/billing", "rank": 8, "version": "1"}}

    def load(arguments: dict[str, Any]) -> None:
        known[arguments["name"]] = {"name": arguments["name"], "path": arguments["path"], "rank": 8, "version": "1"}

    client.answers = {
        "list_adapters": lambda _: list(known.values()),
        "load_adapter": load,
        "unload_adapter": lambda arguments: known.pop(arguments["name"]) and None,
    }
    return known


async def test_models_lists_the_base_and_every_adapter(connect: Callable[..., Any]) -> None:
    client = FakeClient(info=fake_info(**WITH_ADAPTERS))
    adapter_control(client)
    server = ServerConfig(served_model_name=("shown", "other/name"))
    async with connect(client, server=server) as http:
        cards = msgspec.json.decode((await http.get("/v1/models")).content, type=ModelList).data
        assert [(card.id, card.parent, card.root) for card in cards] == [
            ("shown", None, "fake/model"),
            ("other/name", None, "fake/model"),
            ("billing", "shown", "/a/billing"),
        ]
        assert {card.max_model_len for card in cards} == {256}
        assert (await http.get("/v1/models/other/name")).json()["id"] == "other/name"
        assert (await http.get("/v1/models/nope")).json()["error"]["code"] == "model_not_found"
        body = {"prompt": "a", "model": "billing"}
        assert (await http.post("/v1/completions", json=body)).json()["model"] == "billing"
        assert client.requests[0].adapter == "billing"
        assert (await http.post("/v1/completions", json={"prompt": "a"})).json()["model"] == "shown"
        assert client.requests[1].adapter is None


async def test_adapters_load_and_unload_at_run_time(connect: Callable[..., Any]) -> None:
    client = FakeClient(info=fake_info(**WITH_ADAPTERS))
    known = adapter_control(client)
    async with connect(client, server=ADMIN) as http:
        body = {"prompt": "a", "model": "support"}
        assert (await http.post("/v1/completions", json=body)).status_code == 404
        load = {"lora_name": "support", "lora_path": "/a/support"}
        assert (await http.post("/v1/load_lora_adapter", json=load, headers=AS_ADMIN)).status_code == 200
        assert ("load_adapter", {"name": "support", "path": "/a/support", "replace": False}) in client.controls
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        known["else"] = {**known["support"], "name": "else"}
        assert (await http.post("/v1/completions", json={**body, "model": "else"})).status_code == 200
        unload = {"lora_name": "support"}
        assert (await http.post("/v1/unload_lora_adapter", json=unload, headers=AS_ADMIN)).status_code == 200
        assert (await http.post("/v1/completions", json=body)).status_code == 404
        assert (await http.post("/v1/unload_lora_adapter", json=unload, headers=AS_ADMIN)).status_code == 404
        base = {"lora_name": "fake/model", "lora_path": "/a"}
        assert (await http.post("/v1/load_lora_adapter", json=base, headers=AS_ADMIN)).status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}),
        ("/v1/unload_lora_adapter", {"lora_name": "a"}),
        ("/reset_prefix_cache", {}),
    ],
)
async def test_administrative_routes_need_their_own_key(
    client: FakeClient, connect: Callable[..., Any], path: str, body: dict[str, Any]
) -> None:
    """Law 16."""
    async with connect(client) as http:
        off = await http.post(path, json=body, headers=AS_ADMIN)
        assert off.status_code == 403
        assert "--admin-api-key" in off.json()["error"]["message"]
    server = ServerConfig(admin_api_key="admin", api_key=("user",))
    async with connect(client, server=server) as http:
        assert (await http.post(path, json=body)).status_code == 401
        assert (await http.post(path, json=body, headers={"authorization": "Bearer user"})).status_code == 403
        allowed = await http.post(path, json=body, headers=AS_ADMIN)
        assert allowed.status_code == 400
        assert "install" in allowed.json()["error"]["message"]
    assert client.controls == []


async def test_the_prefix_cache_is_reset(client: FakeClient, connect: Callable[..., Any]) -> None:
    client.info = fake_info(table=(("prefix_index", "hash", "prefix-cache", "d", "1"),))
    client.answers["reset_prefix_cache"] = 12
    async with connect(client, server=ADMIN) as http:
        response = await http.post("/reset_prefix_cache", headers=AS_ADMIN)
        assert response.json() == {"status": "reset", "detail": "12"}
        assert (await http.post("/reset_prefix_cache?hard=1", headers=AS_ADMIN)).status_code == 400
        client.answers["reset_prefix_cache"] = NotFoundError("no control message named that")
        assert (await http.post("/reset_prefix_cache", headers=AS_ADMIN)).status_code == 404


async def test_tokenize_and_detokenize_are_inverse(http: httpx.AsyncClient) -> None:
    tokens = (await http.post("/tokenize", json={"prompt": "aé", "return_token_strs": True})).json()
    assert tokens == {
        "count": 4, "max_model_len": 256, "tokens": [1, 100, 198, 172],
        "token_strs": ["<s>", "<0x61>", "<0xC3>", "<0xA9>"],
    }  # fmt: skip
    text = (await http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert text == {"prompt": "<s>aé"}


async def test_tokenize_renders_messages_as_a_chat_would(http: httpx.AsyncClient, client: FakeClient) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    tokens = (await http.post("/tokenize", json=chat)).json()["tokens"]
    await http.post("/v1/chat/completions", json=chat)
    assert client.requests[0].prompt_token_ids == tokens


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}),
        ("/detokenize", {"tokens": [259]}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {}),
    ],
)
async def test_what_cannot_be_tokenised_is_a_400(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    """Law 11."""
    assert (await http.post(path, json=body)).status_code == 400


async def test_health_says_why_not(http: httpx.AsyncClient, client: FakeClient) -> None:
    assert (await http.get("/health")).json() == {"status": "running", "reason": ""}
    for state in (EngineState.STARTING, EngineState.RESTARTING, EngineState.DRAINING, EngineState.DEAD):
        client.set_state(state, "because")
        response = await http.get("/health")
        assert (response.status_code, response.json()["reason"]) == (503, "because")


async def test_version_and_server_info(http: httpx.AsyncClient) -> None:
    """Law 23: provenance."""
    from enginectl import __version__

    assert (await http.get("/version")).json() == {"version": __version__}
    info = (await http.get("/server_info")).json()
    assert info["state"] == "running"
    assert info["engine"]["architecture"] == "FakeForCausalLM"
    assert info["stats"]["num_running"] == 0


def _paths(frontend: OpenAIFrontend) -> set[tuple[str, str]]:
    context = FrontendContext(FakeClient(), ByteTokenizer(), EngineConfig(model="m"), ServerConfig(), (), {})
    return {
        (route.path.replace(":path", ""), method.lower())
        for route in frontend.routes(context)
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }


async def test_openapi_describes_exactly_the_routes(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert described - {("/openapi.json", "get")} == _paths(build_frontend(None))  # type: ignore[arg-type]
    schema = document["components"]["schemas"]["ChatRequest"]
    assert schema["properties"]["functions"]["description"].startswith("Refused")
    assert schema["properties"]["user"]["description"].startswith("Accepted without effect")
    assert schema["additionalProperties"] is False
    references = msgspec.json.encode(document).decode().split('"$ref":"#/components/schemas/')[1:]
    assert {reference.split('"')[0] for reference in references} <= set(document["components"]["schemas"])


@pytest.mark.parametrize(
    "options", [{"tool_call_parser": "x"}, {"reasoning_parser": "x"}, {"enable_auto_tool_choice": True}]
)
async def test_parsers_that_no_route_would_use_are_an_error_at_start(
    client: FakeClient, connect: Callable[..., Any], options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="the frontend 'openai' does not turn"):
        async with connect(client, server=ServerConfig(**options)):
            pass
