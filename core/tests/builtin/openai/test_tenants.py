"""Whom a request is counted against, and which policies read its priority."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from enginectl.config import EngineConfig, ServerConfig
from enginectl.testing.fake_client import FakeClient, fake_info

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"prompt": "hi"}
ROUTES = pytest.mark.parametrize(
    ("url", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)], ids=["chat", "completions"]
)


@ROUTES
async def test_the_tenant_is_the_key_or_the_user_or_the_adapter(
    client: FakeClient, connect: Callable[..., Any], url: str, body: dict[str, Any]
) -> None:
    client.info = fake_info(adapters=("support",))
    engine = EngineConfig(model="fake/model", enable_lora=True, lora_modules={"support": "x"})
    server = ServerConfig(api_key=("one", "two"))
    async with connect(client, engine=engine) as http:
        for more in ({}, {"model": "support"}, {"model": "support", "user": "me"}):
            assert (await http.post(url, json={**body, **more})).status_code == 200
    async with connect(client, engine=engine, server=server) as http:
        headers = {"authorization": "Bearer two"}
        assert (await http.post(url, json={**body, "user": "me"}, headers=headers)).status_code == 200
    assert [request.tenant for request in client.requests] == ["", "support", "me", "key-1"]


@ROUTES
@pytest.mark.parametrize(("policy", "status"), [("fcfs", 400), ("fair", 400), ("priority", 200), ("theirs", 200)])
async def test_priority_needs_a_policy_that_may_read_it(
    client: FakeClient, connect: Callable[..., Any], url: str, body: dict[str, Any], policy: str, status: int
) -> None:
    client.info = fake_info(table=(("scheduler", policy, policy, "d", "1"),))
    async with connect(client, engine=EngineConfig(model="fake/model")) as http:
        response = await http.post(url, json={**body, "priority": 3})
        assert response.status_code == status
        assert (await http.post(url, json={**body, "priority": 0})).status_code == 200
    if status == 400:
        assert response.json()["error"]["param"] == "priority"
        assert policy in response.json()["error"]["message"]
    else:
        assert client.requests[0].priority == 3
