"""POST /v1/chat/completions over a fake engine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from enginectl.builtin.openai.answers import ChatAnswer, ChatChunk
from enginectl.config import EngineConfig
from enginectl.errors import EngineDeadError, OverloadedError, RequestError
from enginectl.testing.fake_client import ByteTokenizer, FakeClient, fake_info, say
from enginectl.types import FinishReason, OutputChunk

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def events(body: str) -> list[dict[str, Any]]:
    """The JSON events of a stream, [DONE] excepted."""
    lines = [line for line in body.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def deltas(body: str, index: int = 0) -> str:
    """The streamed text of one choice."""
    choices = [choice for event in events(body) for choice in event["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices if choice["index"] == index)


async def test_an_answer_has_every_member_and_no_other(http: httpx.AsyncClient, client: FakeClient) -> None:
    response = await http.post(URL, json={"model": "fake/model", "messages": HI})
    assert response.status_code == 200
    answer = msgspec.json.decode(response.content, type=ChatAnswer)
    assert answer.choices[0].message.content == "Hello, world!"
    assert (answer.choices[0].message.role, answer.choices[0].finish_reason) == ("assistant", "stop")
    assert answer.usage.prompt_tokens == len(client.requests[0].prompt_token_ids)
    assert answer.usage.completion_tokens == len("Hello, world!")
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens // 2
    assert answer.id == f"chatcmpl-{response.headers['x-request-id']}" == client.requests[0].request_id


async def test_the_stream_concatenates_to_the_whole_answer(client: FakeClient, connect: Callable[..., Any]) -> None:
    """Law 6."""
    client.script = say("naïve — ünïcödé 🦜!", tokens_a_chunk=2)
    async with connect(client) as http:
        whole = (await http.post(URL, json={"messages": HI, "n": 2})).json()
        stream = await http.post(URL, json={"messages": HI, "n": 2, "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.text.endswith("data: [DONE]\n\n")
    for index in (0, 1):
        assert deltas(stream.text, index) == whole["choices"][index]["message"]["content"] == "naïve — ünïcödé 🦜!"


async def test_chunks_are_well_formed_and_begin_with_the_role(http: httpx.AsyncClient) -> None:
    body = (await http.post(URL, json={"messages": HI, "n": 2, "stream": True})).text
    chunks = [msgspec.convert(event, ChatChunk, strict=True) for event in events(body)]
    for index in (0, 1):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert mine[0].delta.role == "assistant"
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
    assert "usage" not in events(body)[0]


async def test_usage_comes_once_in_a_last_chunk_without_choices(http: httpx.AsyncClient) -> None:
    """Law 9."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3}
    parsed = events((await http.post(URL, json={"messages": HI, **options})).text)
    assert [event["usage"] is None for event in parsed] == [True] * (len(parsed) - 1) + [False]
    assert parsed[-1]["choices"] == []
    assert parsed[-1]["usage"]["completion_tokens"] == 3


async def test_continuous_usage_grows_with_every_chunk(http: httpx.AsyncClient) -> None:
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}, "max_tokens": 3}
    parsed = events((await http.post(URL, json={"messages": HI, **options})).text)
    assert [event["usage"]["completion_tokens"] for event in parsed] == [1, 1, 2, 3]


async def test_consecutive_chunks_of_a_choice_become_one_event(client: FakeClient, connect: Callable[..., Any]) -> None:
    def script(request: Any) -> Any:
        yield [OutputChunk(index=0, text="a", token_ids=(5,)), OutputChunk(index=0, text="b", token_ids=(6,))]
        yield [
            OutputChunk(index=0, text="c", token_ids=(7,)),
            OutputChunk(index=0, text="", token_ids=(8,), finish_reason=FinishReason.LENGTH),
        ]

    client.script = script
    async with connect(client) as http:
        body = (await http.post(URL, json={"messages": HI, "stream": True, "return_token_ids": True})).text
    parsed = [event["choices"][0] for event in events(body)]
    assert [(choice["delta"]["content"], choice.get("token_ids")) for choice in parsed] == [
        ("", None),
        ("ab", [5, 6]),
        ("c", [7, 8]),
    ]
    assert events(body)[0]["prompt_token_ids"] == client.requests[0].prompt_token_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_have_the_chosen_token_and_empty_alternatives(http: httpx.AsyncClient, stream: bool) -> None:
    """Law 10."""
    body = {"messages": HI, "logprobs": True, "max_tokens": 2, "stream": stream}
    response = await http.post(URL, json=body)
    if stream:
        found = [choice["logprobs"] for event in events(response.text) for choice in event["choices"]]
        entries = [entry for logprobs in found if logprobs for entry in logprobs["content"]]
    else:
        entries = response.json()["choices"][0]["logprobs"]["content"]
    assert entries == [
        {"token": "H", "logprob": -0.5, "bytes": [72], "top_logprobs": []},
        {"token": "e", "logprob": -0.5, "bytes": [101], "top_logprobs": []},
    ]


async def test_alternatives_and_raw_bytes_of_partial_characters(
    client: FakeClient, connect: Callable[..., Any]
) -> None:
    client.script = say("é")
    async with connect(client) as http:
        response = await http.post(URL, json={"messages": HI, "logprobs": True, "top_logprobs": 2})
    entries = response.json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert [entry["bytes"] for entry in entries] == [[0xC3], [0xA9]]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2, 2]


async def test_every_field_reaches_the_engine(client: FakeClient, connect: Callable[..., Any]) -> None:
    """Law 11: honoured, not dropped."""
    client.info = fake_info(table=(("speculator", "ngram", "ngram", "d", "1"),))
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True, "include_stop_str_in_output": True,
        "skip_special_tokens": False, "spaces_between_special_tokens": False, "speculation": 3, "seed": 5, "n": 2,
    }  # fmt: skip
    more = {
        "max_completion_tokens": 9, "stop": ["x", "yz"], "stop_token_ids": [9], "logit_bias": {"5": 1.5},
        "allowed_token_ids": [5, 6], "bad_words": ["no"], "prompt_logprobs": 1, "priority": 4, "cache_salt": "s",
        "request_id": "mine-1", "timeout": 2.5, "user": "me",
    }  # fmt: skip
    async with connect(client) as http:
        response = await http.post(URL, json={"messages": HI, **fields, **more})
    assert response.status_code == 200, response.text
    request = client.requests[0]
    assert {name: getattr(request.params, name) for name in fields} == fields
    assert request.params.max_tokens == 9
    assert request.params.stop == ("x", "yz")
    assert request.params.stop_token_ids == (9,)
    assert request.params.logit_bias == {5: 1.5}
    assert request.params.allowed_token_ids == (5, 6)
    assert request.params.bad_word_ids == ((113, 114),)
    assert request.params.prompt_logprobs == 1
    assert (request.priority, request.cache_salt, request.timeout_s, request.tenant) == (4, "s", 2.5, "me")
    assert (request.request_id, response.headers["x-request-id"]) == ("chatcmpl-mine-1", "mine-1")
    assert len(response.json()["prompt_logprobs"]) == len(request.prompt_token_ids)


async def test_defaults_come_from_the_model_and_yield_to_the_request(
    client: FakeClient, connect: Callable[..., Any]
) -> None:
    client.info = fake_info(sampling_defaults={"temperature": 0.6, "top_k": 20})
    async with connect(client) as http:
        await http.post(URL, json={"messages": HI})
        await http.post(URL, json={"messages": HI, "temperature": 0, "top_k": None, "max_tokens": 3})
    first, second = (request.params for request in client.requests)
    assert (first.temperature, first.top_k, first.max_tokens) == (0.6, 20, None)
    assert (second.temperature, second.top_k, second.max_tokens) == (0.0, 20, 3)


async def test_omitted_max_tokens_means_what_fits(http: httpx.AsyncClient, client: FakeClient) -> None:
    """Law 14b."""
    await http.post(URL, json={"messages": HI})
    assert client.requests[0].params.max_tokens is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a+", "choice": ["a"]}}, "structured_outputs"),
        ({"speculation": 4}, "speculation"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"functions": []}, "functions"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"logit_bias": {"259": 1}}, "logit_bias"),
        ({"allowed_token_ids": [999]}, "allowed_token_ids"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"n": 0}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": 10**30}, "seed"),
        ({"timeout": 0}, "timeout"),
        ({"request_id": "two\nlines"}, "request_id"),
        ({"request_id": "newline\n"}, "request_id"),
        ({"max_token": 4}, "max_token"),
        ({"stream_options": {"x": 1}, "stream": True}, "stream_options.x"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"echo": True}, "echo"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": "raise"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
        ({"max_tokens": 250}, "messages"),
    ],
)
async def test_what_cannot_be_honoured_is_a_400_that_names_it(
    http: httpx.AsyncClient, client: FakeClient, fields: dict[str, Any], param: str
) -> None:
    """Law 11."""
    response = await http.post(URL, json={"messages": HI, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert client.requests == []


async def test_an_unknown_parameter_is_answered_with_the_nearest_name(http: httpx.AsyncClient) -> None:
    error = (await http.post(URL, json={"messages": HI, "temprature": 1})).json()["error"]
    assert "did you mean 'temperature'?" in error["message"]


async def test_a_prompt_that_is_too_long_is_told_the_numbers(http: httpx.AsyncClient) -> None:
    long = [{"role": "user", "content": "x" * 300}]
    error = (await http.post(URL, json={"messages": long})).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "319 tokens" in error["message"]
    assert "256" in error["message"]


async def test_truncation_keeps_the_last_tokens_and_room_for_the_output(
    http: httpx.AsyncClient, client: FakeClient
) -> None:
    long = [{"role": "user", "content": "x" * 300}]
    assert (await http.post(URL, json={"messages": long, "truncate_prompt_tokens": 4})).status_code == 200
    body = {"messages": long, "truncate_prompt_tokens": -1, "max_tokens": 10}
    assert (await http.post(URL, json=body)).status_code == 200
    assert client.requests[0].prompt_token_ids == client.requests[1].prompt_token_ids[-4:]
    assert len(client.requests[1].prompt_token_ids) == 246


async def test_harmless_parameters_of_the_official_client_change_nothing(
    http: httpx.AsyncClient, client: FakeClient
) -> None:
    harmless = {
        "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": False,
        "prompt_cache_key": "k", "safety_identifier": "s", "tools": [], "tool_choice": "none", "modalities": ["text"],
        "response_format": {"type": "text"}, "speculation": "auto",
    }  # fmt: skip
    plain = await http.post(URL, json={"messages": HI})
    response = await http.post(URL, json={"messages": HI, **harmless})
    assert response.json()["choices"] == plain.json()["choices"]
    assert client.requests[0].params == client.requests[1].params


async def test_template_fields_reach_the_template(http: httpx.AsyncClient, client: FakeClient) -> None:
    messages = [{"role": "developer", "content": "be kind"}, {"role": "assistant", "content": "Well"}]
    body = {
        "messages": messages, "chat_template": "T", "chat_template_kwargs": {"thinking": False},
        "documents": [{"text": "d"}], "continue_final_message": True, "echo": True, "add_special_tokens": False,
    }  # fmt: skip
    response = await http.post(URL, json=body)
    prompt = bytes(token - 3 for token in client.requests[0].prompt_token_ids).decode()
    assert prompt == "T[thinking=False][documents=1]system: be kind\nassistant: Well"
    assert response.json()["choices"][0]["message"]["content"] == "WellHello, world!"
    stream = await http.post(URL, json={**body, "stream": True})
    assert deltas(stream.text) == "WellHello, world!"


async def test_an_unknown_model_is_404(http: httpx.AsyncClient) -> None:
    response = await http.post(URL, json={"model": "fake/modle", "messages": HI})
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "did you mean 'fake/model'" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("too long", param="messages", code="x"), 400, "x"),
        (OverloadedError("full", retry_after_s=7), 503, "overloaded"),
        (EngineDeadError("restarting"), 503, "engine_unavailable"),
        (ZeroDivisionError("secret detail"), 500, "internal_error"),
    ],
)
async def test_an_error_before_the_first_chunk_has_its_status(
    client: FakeClient, connect: Callable[..., Any], error: Exception, status: int, code: str, stream: bool
) -> None:
    """Law 12 for the 503s."""
    client.script = lambda request: [error]
    async with connect(client) as http:
        response = await http.post(URL, json={"messages": HI, "stream": stream})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert "secret" not in response.text
    assert ("retry-after" in response.headers) == (status == 503)


@pytest.mark.parametrize("raised", [True, False])
async def test_an_error_in_the_middle_ends_the_stream_with_an_error_event(
    client: FakeClient, connect: Callable[..., Any], raised: bool
) -> None:
    def script(request: Any) -> Any:
        yield [OutputChunk(index=0, text="a", token_ids=(5,))]
        if raised:
            yield EngineDeadError("the engine died")
        yield [OutputChunk(index=0, text="", token_ids=(), finish_reason=FinishReason.ERROR, error="the engine died")]

    client.script = script
    async with connect(client) as http:
        stream = await http.post(URL, json={"messages": HI, "stream": True})
        whole = await http.post(URL, json={"messages": HI})
    assert stream.status_code == 200
    assert events(stream.text)[-1]["error"]["message"] == "the engine died"
    assert "[DONE]" not in stream.text
    assert whole.status_code == (503 if raised else 500)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_own_time_is_over_is_a_504_that_is_not_sent_again(
    client: FakeClient, connect: Callable[..., Any], stream: bool
) -> None:
    """It was a 500, which clients send again: its caller's time is over."""

    def script(request: Any) -> Any:
        time.sleep(request.timeout_s)
        yield [OutputChunk(index=0, text="", token_ids=(), finish_reason=FinishReason.ERROR, error="timeout of 0.05 s")]

    client.script = script
    async with connect(client) as http:
        response = await http.post(URL, json={"messages": HI, "stream": stream, "timeout": 0.05})
    assert response.status_code == 504
    assert response.json()["error"] == {
        "message": "timeout of 0.05 s",
        "type": "server_error",
        "param": "timeout",
        "code": "timeout",
    }
    assert response.headers["x-should-retry"] == "false"


async def test_an_error_before_the_time_is_over_is_the_steps(client: FakeClient, connect: Callable[..., Any]) -> None:
    error = OutputChunk(index=0, text="", token_ids=(), finish_reason=FinishReason.ERROR, error="a step raised")
    client.script = lambda request: [[error]]
    async with connect(client) as http:
        response = await http.post(URL, json={"messages": HI, "timeout": 60})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")


async def test_structured_outputs_pass_once_a_grammar_serves(client: FakeClient, connect: Callable[..., Any]) -> None:
    client.info = fake_info(table=(("grammar", "llguidance", "llguidance", "d", "1"),))
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}}
    async with connect(client) as http:
        assert (await http.post(URL, json={"messages": HI, "response_format": schema})).status_code == 200
        wanted = {"choice": ["a", "b"], "backend": "llguidance"}
        assert (await http.post(URL, json={"messages": HI, "structured_outputs": wanted})).status_code == 200
        refused = await http.post(URL, json={"messages": HI, "structured_outputs": {**wanted, "backend": "other"}})
    first, second = (request.params.structured_outputs for request in client.requests)
    assert first is not None
    assert first.json == '{"type":"object"}'
    assert second is not None
    assert (second.choice, second.backend) == (("a", "b"), "llguidance")
    assert refused.status_code == 400


async def test_priority_is_refused_where_the_scheduler_ignores_it(
    client: FakeClient, connect: Callable[..., Any]
) -> None:
    client.info = fake_info(table=(("scheduler", "fcfs", "fcfs", "d", "1"),))
    async with connect(client, engine=EngineConfig(model="fake/model")) as http:
        response = await http.post(URL, json={"messages": HI, "priority": 1})
        assert response.json()["error"]["param"] == "priority"
        assert (await http.post(URL, json={"messages": HI, "priority": 0})).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [{}, {"documents": [{"text": "a"}]}, {"chat_template_kwargs": {"x": 1}}, {"chat_template": "{{ messages }}"}],
)
async def test_what_is_not_in_the_messages_is_rendered_off_the_loop(
    fields: dict[str, Any], http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents of any length were rendered on the event loop: only messages counted."""
    threads: list[str] = []
    render = ByteTokenizer.apply_chat_template

    def watched(*args: Any, **kwargs: Any) -> str:
        threads.append(threading.current_thread().name)
        return render(*args, **kwargs)

    monkeypatch.setattr(ByteTokenizer, "apply_chat_template", watched)
    await http.post(URL, json={"messages": HI, **fields})
    assert [name == threading.main_thread().name for name in threads] == [not fields]
