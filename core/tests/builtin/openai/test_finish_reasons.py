"""How choices end, and what they cost, as the OpenAI API says it: both routes, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from enginectl.testing.fake_client import FakeClient
from enginectl.types import FinishReason, GenerateRequest, OutputChunk

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}
ENDS = [
    (FinishReason.STOP, None),
    (FinishReason.STOP, "END"),
    (FinishReason.STOP, 7),
    (FinishReason.LENGTH, None),
    (FinishReason.ABORT, None),
]


def ending(reason: FinishReason, stop_reason: str | int | None) -> Callable[[GenerateRequest], Any]:
    """Each choice says "ab" in two pieces, the later ones longer, and ends like that."""

    def script(request: GenerateRequest) -> Any:
        for index in range(request.params.n):
            yield [OutputChunk(index=index, text="a", token_ids=(5,) * (index + 1))]
        for index in range(request.params.n):
            last = OutputChunk(index=index, text="b", token_ids=(6,), finish_reason=reason, stop_reason=stop_reason)
            yield [last]

    return script


def events(body: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("url", ROUTES)
@pytest.mark.parametrize(("reason", "stop_reason"), ENDS)
async def test_a_choice_says_why_it_ended_once(
    url: str, reason: FinishReason, stop_reason: Any, client: FakeClient, connect: Callable[..., Any]
) -> None:
    """Law 9: stop, length or abort, the same streamed and not; in a stream on the choice's last event only."""
    client.script = ending(reason, stop_reason)
    async with connect(client) as http:
        whole = (await http.post(url, json={**ROUTES[url], "n": 2})).json()
        parsed = events((await http.post(url, json={**ROUTES[url], "n": 2, "stream": True})).text)
    for choice in whole["choices"]:
        assert (choice["finish_reason"], choice["stop_reason"]) == (reason.value, stop_reason)
        mine = [c for event in parsed for c in event["choices"] if c["index"] == choice["index"]]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [reason.value]
        assert mine[-1]["stop_reason"] == stop_reason
    assert whole["usage"]["completion_tokens"] == 2 + 3
    assert all("usage" not in event for event in parsed), "nobody asked"


@pytest.mark.parametrize("url", ROUTES)
@pytest.mark.parametrize("prompts", [1, 2])
async def test_usage_comes_once_for_all_choices(
    url: str, prompts: int, client: FakeClient, connect: Callable[..., Any]
) -> None:
    """Law 9: behind every choice's end, in a last event that has no choices, and as in the answer that is not streamed."""
    body = {**ROUTES[url], "n": 3, **({"prompt": ["hi", "ho"]} if prompts > 1 and "prompt" in ROUTES[url] else {})}
    client.script = ending(FinishReason.LENGTH, None)
    async with connect(client) as http:
        whole = (await http.post(url, json=body)).json()
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        parsed = events((await http.post(url, json=streamed)).text)
    assert [event["usage"] is None for event in parsed] == [True] * (len(parsed) - 1) + [False]
    assert parsed[-1]["choices"] == []
    assert parsed[-1]["usage"] == whole["usage"]
    assert sum(c["finish_reason"] is not None for event in parsed for c in event["choices"]) == len(whole["choices"])


@pytest.mark.parametrize("url", ROUTES)
async def test_a_choice_that_fails_is_an_error_and_no_finish_reason(
    url: str, client: FakeClient, connect: Callable[..., Any]
) -> None:
    """Laws 9 and 14a: `error` is no finish reason of the API; the body says what happened."""

    def failing(request: GenerateRequest) -> Any:
        yield [OutputChunk(index=0, text="a", token_ids=(5,))]
        yield [OutputChunk(index=0, text="", token_ids=(), finish_reason=FinishReason.ERROR, error="the row broke")]

    client.script = failing
    async with connect(client) as http:
        whole = await http.post(url, json=ROUTES[url])
        stream = (await http.post(url, json={**ROUTES[url], "stream": True})).text
    assert whole.status_code == 500
    assert "the row broke" in whole.json()["error"]["message"]
    assert "the row broke" in stream
    assert '"finish_reason":"' not in stream
