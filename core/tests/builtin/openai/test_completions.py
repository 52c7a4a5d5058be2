"""POST /v1/completions over a fake engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from enginectl.builtin.openai.answers import TextAnswer, TextChunk
from enginectl.config import EngineConfig
from enginectl.testing.fake_client import BOS, ByteTokenizer, FakeClient, fake_info, say

URL = "/v1/completions"


def events(body: str) -> list[dict[str, Any]]:
    """The JSON events of a stream, [DONE] excepted."""
    return [json.loads(line[6:]) for line in body.split("\n\n") if line and line != "data: [DONE]"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[BOS, 100, 101]]),
        (["ab", "c"], [[BOS, 100, 101], [BOS, 102]]),
        ([7, 8], [[7, 8]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
        ([[7], "a"], [[7], [BOS, 100]]),
    ],
)
async def test_every_form_of_prompt(
    http: httpx.AsyncClient, client: FakeClient, prompt: Any, expected: list[list[int]]
) -> None:
    response = await http.post(URL, json={"prompt": prompt, "n": 2})
    answer = msgspec.json.decode(response.content, type=TextAnswer)
    assert [request.prompt_token_ids for request in client.requests] == expected
    assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
    assert {choice.text for choice in answer.choices} == {"Hello, world!"}
    assert answer.usage.prompt_tokens == sum(map(len, expected))
    assert answer.usage.completion_tokens == 13 * 2 * len(expected)


async def test_prompts_of_one_call_draw_different_noise(http: httpx.AsyncClient, client: FakeClient) -> None:
    """Law 4."""
    await http.post(URL, json={"prompt": ["a", "a"], "n": 3, "seed": 1})
    assert [request.choice_offset for request in client.requests] == [0, 3]


@pytest.mark.parametrize(
    "prompt", [[], "x" * 300, [[]], [1, "a"], [1, [2]], [-1], [259], [1.5], 5, None, {"a": 1}, ["a"] * 40]
)
async def test_a_wrong_prompt_is_a_400(client: FakeClient, connect: Callable[..., Any], prompt: Any) -> None:
    """Law 11."""
    async with connect(client, engine=EngineConfig(model="m", max_num_queued_requests=32)) as http:
        response = await http.post(URL, json={"prompt": prompt})
    assert response.status_code == 400, response.text
    assert (response.json()["error"]["param"] or "").startswith("prompt")
    assert client.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"truncate_prompt_tokens": 300}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(http: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    """Law 11."""
    response = await http.post(URL, json={"prompt": "a", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", ["añ🦜", ["añ🦜", "b"]])
@pytest.mark.parametrize("echo", [False, True])
async def test_the_stream_adds_up_to_the_whole_answer(
    client: FakeClient, connect: Callable[..., Any], prompt: Any, n: int, echo: bool
) -> None:
    """Laws 6 and 10: text, token ids, log-probabilities and usage."""
    client.script = say("é, «ok» 🦜", tokens_a_chunk=3)
    body = {"prompt": prompt, "n": n, "echo": echo, "logprobs": 2, "return_token_ids": True, "prompt_logprobs": 1}
    async with connect(client) as http:
        whole = (await http.post(URL, json=body)).json()
        text = (await http.post(URL, json={**body, "stream": True, "stream_options": {"include_usage": True}})).text
    parsed = events(text)
    for event in parsed:
        msgspec.convert(event, TextChunk, strict=True)
    assert parsed[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [part for event in parsed for part in event["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [token for part in mine for token in part.get("token_ids", [])] == choice["token_ids"]
        assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert mine[0]["prompt_logprobs"] == choice["prompt_logprobs"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        for member, values in choice["logprobs"].items():
            assert [v for part in mine if part["logprobs"] for v in part["logprobs"][member]] == values


async def test_text_offsets_index_the_text(client: FakeClient, connect: Callable[..., Any]) -> None:
    """Law 10: also across characters of several tokens, and after an echoed prompt with its BOS."""
    client.script = say("é🦜z", tokens_a_chunk=2)
    async with connect(client) as http:
        response = await http.post(URL, json={"prompt": "aé", "echo": True, "logprobs": 0})
    choice = response.json()["choices"][0]
    assert choice["text"] == "aéé🦜z"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 4]
    assert choice["logprobs"]["token_logprobs"][:2] == [None, -0.5]
    assert choice["logprobs"]["top_logprobs"][1] == {"a": -0.5}


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_without_output_scores_the_prompt(http: httpx.AsyncClient, stream: bool) -> None:
    """max_tokens 0 bills nothing and shows nothing but the prompt."""
    body = {"prompt": [100, 101], "echo": True, "max_tokens": 0, "logprobs": 1, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    response = await http.post(URL, json=body)
    if stream:
        parsed = events(response.text)
        text = "".join(choice["text"] for event in parsed for choice in event["choices"])
        usage, reason = parsed[-1]["usage"], parsed[-2]["choices"][0]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        text, usage, reason = choice["text"], response.json()["usage"], choice["finish_reason"]
        assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert (text, usage["completion_tokens"], reason) == ("ab", 0, "length")


async def test_prompt_logprobs_name_the_chosen_and_the_best(http: httpx.AsyncClient) -> None:
    response = await http.post(URL, json={"prompt": "ab", "prompt_logprobs": 2, "max_tokens": 1})
    first, second, _ = response.json()["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second == {
        "100": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        "101": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
    }


async def test_the_answer_of_one_failing_prompt_is_an_error_and_ends_the_others(
    client: FakeClient, connect: Callable[..., Any]
) -> None:
    plain = say("Hello")
    client.script = lambda request: [ZeroDivisionError()] if 200 in request.prompt_token_ids else plain(request)
    async with connect(client) as http:
        response = await http.post(URL, json={"prompt": [[100], [200], [101]]})
    assert response.status_code == 500
    assert client.num_open == 0


async def test_special_tokens_are_left_out_on_request(http: httpx.AsyncClient, client: FakeClient) -> None:
    await http.post(URL, json={"prompt": "a", "add_special_tokens": False})
    assert client.requests[0].prompt_token_ids == [100]


async def test_a_model_without_a_tokenizer_takes_token_ids_only(connect: Callable[..., Any]) -> None:
    from enginectl.builtin.openai.prompts import Prompts, with_text
    from enginectl.errors import RequestError

    with pytest.raises(RequestError, match="token ids"):
        await Prompts(None).from_texts(["a"], add_special_tokens=True)
    assert isinstance(with_text(ByteTokenizer()), ByteTokenizer)


async def test_prompts_are_concurrent_and_closed_early_when_one_is_wrong(
    client: FakeClient, connect: Callable[..., Any]
) -> None:
    client.info = fake_info(max_model_len=8)
    async with connect(client) as http:
        response = await http.post(URL, json={"prompt": ["abc", "abcdefgh"], "max_tokens": 2})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert client.requests == []
