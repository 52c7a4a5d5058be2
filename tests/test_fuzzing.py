"""Whatever clients send: no answer is a 5xx, none is late, and the engine serves as before.

The server is whole, its engine a tiny model; only the socket's other end is in this process too.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import APIOperation, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from enginectl.api_side import ApiSide
from enginectl.builtin.openai import OpenAIFrontend
from enginectl.builtin.prometheus import PrometheusFrontend, PrometheusObserver
from enginectl.compose import compose
from enginectl.config import EngineConfig, ServerConfig
from enginectl.engine.inprocess import InProcessClient
from enginectl.machine import detect_machine
from enginectl.plugins import PluginHost
from enginectl.server import OPENAPI_PATH, build_app, run_server
from enginectl.testing.fake_client import FakeClient

LATE_S = 20.0
JSON = {"content-type": "application/json"}
ADMIN = {"authorization": "Bearer root"}
ROUTES = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/load_lora_adapter")
GREEDY = {"prompt": "hello", "max_tokens": 4, "temperature": 0}

bounded = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class Served:
    """A server on a thread of its own. Its limits are low, so that they are met."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._started: asyncio.Future[str] | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.url = ""
        self.failure: BaseException | None = None

    def __enter__(self) -> Served:
        self._thread.start()
        assert self._ready.wait(120)
        assert self.failure is None, self.failure
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            await self._run()
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self._ready.set()

    async def _run(self) -> None:
        config = EngineConfig(
            model=str(self._model), dtype="float32", max_num_seqs=8, max_model_len=96, max_num_queued_requests=64
        )
        host, machine = PluginHost(), detect_machine()
        engine = compose(config, machine=machine, host=host)
        api, observer = ApiSide(engine.config, host, machine), PrometheusObserver()
        tokenizer = api.load_tokenizer(engine.info)
        client = InProcessClient(engine, api.detokenizer(engine.info), [observer])
        server = ServerConfig(port=0, admin_api_key="root", max_request_bytes=1 << 20, log_requests=False)
        frontends = [OpenAIFrontend(), PrometheusFrontend()]
        app = build_app(client, tokenizer, engine.config, server, frontends, [observer])

        def started(address: str) -> None:
            self.url = address
            self._ready.set()

        try:
            await run_server(app, client, server, on_started=started, stop=self._stop)
        finally:
            await client.close()
        engine.core.pool.check()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from enginectl.testing.tiny_models import save_tiny_model

    model = save_tiny_model("llama", tmp_path_factory.mktemp("fuzz") / "tiny", num_hidden_layers=1)
    with Served(model) as server:
        yield server


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=LATE_S) as client:
        yield client


@pytest.fixture(autouse=True)
def it_serves_as_before(http: httpx.Client) -> Iterator[None]:
    """The same greedy answer before and after, and nothing left in the engine."""
    before = http.post("/v1/completions", json=GREEDY).json()["choices"]
    yield
    after = http.post("/v1/completions", json=GREEDY).json()["choices"]
    assert after == before
    stats = http.get("/server_info", headers=ADMIN).json()["stats"]
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)


def check(response: httpx.Response) -> None:
    """No server error but the end of the time that the body gave, and every error has OpenAI's body."""
    assert response.status_code < 500 or response.json()["error"]["code"] == "timeout", response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        assert '"type":"server_error"' not in response.text or '"code":"timeout"' in response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


# -- by the description of the routes -------------------------------------------------------------------------------


def operations() -> list[APIOperation]:
    """Every route of the document that such a server publishes."""
    frontends, server = [OpenAIFrontend(), PrometheusFrontend()], ServerConfig()
    app = build_app(FakeClient(), None, EngineConfig(model="m"), server, frontends, [PrometheusObserver()])

    async def fetch() -> dict[str, Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            document: dict[str, Any] = (await client.get(OPENAPI_PATH)).json()
            return document

    schema = schemathesis.openapi.from_dict(asyncio.run(fetch()))
    return [found.ok() for found in schema.get_all_operations()]


CASES = [
    pytest.param(operation, mode, id=f"{operation.label} {mode.value}")
    for operation in operations()
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    if mode is GenerationMode.POSITIVE or operation.body  # what has no body has nothing to get wrong
]


@pytest.mark.parametrize(("operation", "mode"), CASES)
def test_the_server_is_as_its_openapi_document_says(
    operation: APIOperation, mode: GenerationMode, served: Served
) -> None:
    """Bodies by the schema and against it: no server error, and the document has every answer's type and body."""

    @settings(bounded, max_examples=25)
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            case.body.pop("timeout", None)  # 504 is the right answer to most of them
        response = case.call(base_url=served.url, headers=ADMIN, timeout=LATE_S)
        case.validate_response(
            response, checks=[not_a_server_error, content_type_conformance, response_schema_conformance]
        )

    run()


# -- by mutation of good bodies -------------------------------------------------------------------------------------

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, -(2**63), 10**400, 1e308, -1e308, 1e-320, 0.0, -0.0]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(
        ["", "\x00", "\ud800", "\U0001f600", "a" * 10_000, "{{ 1/0 }}", "{% for x in range(10**9) %}x{% endfor %}"]
    ),
)
junk = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
COMMON: dict[str, Any] = {
    "model": None,
    "n": 2,
    "max_tokens": 3,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"7": 5},
    "seed": 3,
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "min_tokens": 1,
    "stop_token_ids": [9],
    "ignore_eos": True,
    "bad_words": ["y"],
    "allowed_token_ids": [4, 5, 6],
    "prompt_logprobs": 1,
    "truncate_prompt_tokens": 8,
    "echo": False,
    "response_format": {"type": "text"},
    "structured_outputs": {"regex": "a+"},
    "speculation": "off",
    "priority": 0,
    "request_id": "mine",
    "cache_salt": "s",
    "return_token_ids": True,
    "timeout": 10.0,
    "user": "me",
    "metadata": {},
}
CHAT = {
    **COMMON,
    "messages": MESSAGES,
    "logprobs": True,
    "top_logprobs": 2,
    "tools": None,
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"a": 1},
    "add_generation_prompt": True,
    "continue_final_message": False,
    "documents": [{"title": "t", "text": "x"}],
    "max_completion_tokens": 3,
}
TEXT = {**COMMON, "prompt": "hello", "logprobs": 2, "best_of": 2, "suffix": None}


def body_of(fields: dict[str, Any], needed: str) -> st.SearchStrategy[dict[str, Any]]:
    """Some good fields, some of them replaced, and now and then one that does not exist."""
    names = sorted(set(fields) - {needed})

    @st.composite
    def build(draw: st.DrawFn) -> dict[str, Any]:
        kept = draw(st.lists(st.sampled_from(names), max_size=6, unique=True))
        body = {needed: fields[needed], **{name: fields[name] for name in kept}}
        for name in draw(st.lists(st.sampled_from(sorted(body)), max_size=3, unique=True)):
            body[name] = draw(junk)
        if draw(st.booleans()):
            body.setdefault("max_tokens", 3)
        return body | draw(st.dictionaries(st.text(max_size=6), junk, max_size=1))

    return build()


@bounded
@given(body=body_of(CHAT, "messages"))
def test_chat_bodies(http: httpx.Client, body: dict[str, Any]) -> None:
    check(http.post("/v1/chat/completions", content=encoded(body), headers=JSON))


@bounded
@given(body=body_of(TEXT, "prompt"))
def test_completion_bodies(http: httpx.Client, body: dict[str, Any]) -> None:
    check(http.post("/v1/completions", content=encoded(body), headers=JSON))


message = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool"]) | junk,
        "content": st.text(max_size=20)
        | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": junk}))
        | junk,
    },
    optional={"name": junk, "tool_calls": junk, "tool_call_id": junk, "reasoning_content": junk, "x": junk},
)


@bounded
@given(messages=st.lists(message, max_size=3))
def test_messages(http: httpx.Client, messages: Any) -> None:
    check(http.post("/v1/chat/completions", content=encoded({"messages": messages, "max_tokens": 2}), headers=JSON))


@bounded
@given(path=st.sampled_from(ROUTES), body=junk)
def test_any_json(http: httpx.Client, path: str, body: Any) -> None:
    check(http.post(path, content=encoded(body), headers=JSON | ADMIN))


@bounded
@given(path=st.sampled_from(ROUTES), place=st.integers(0, 200), byte=st.binary(max_size=3), cut=st.booleans())
def test_bytes_that_are_no_json(http: httpx.Client, path: str, place: int, byte: bytes, cut: bool) -> None:
    """Good JSON with bytes put into it (invalid UTF-8 among them), or the end cut off."""
    good = encoded({"messages": MESSAGES, "prompt": "hello ü", "max_tokens": 2})
    body = good[:place] if cut else good[:place] + byte + good[place:]
    check(http.post(path, content=body, headers=JSON | ADMIN))


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"max_tokens":' + b"9" * 100_000 + b"}",
        b"\xff\xfe",
        b"\x00",
        b"",
        b" " * 1000,
    ],
    ids=["lists", "objects", "digits", "utf-16", "null", "empty", "blank"],
)
def test_bodies_that_break_parsers(http: httpx.Client, path: str, body: bytes) -> None:
    check(http.post(path, content=body, headers=JSON | ADMIN))


def encoded(body: Any) -> bytes:
    """JSON with lone surrogates, which Python writes as escapes."""
    return json.dumps(body).encode()


# -- by odd headers --------------------------------------------------------------------------------------------------

header_values = st.binary(max_size=30).map(lambda raw: raw.translate(None, b"\r\n\x00"))
HEADERS = (
    "content-type",
    "content-encoding",
    "authorization",
    "x-request-id",
    "traceparent",
    "tracestate",
    "accept",
    "accept-encoding",
    "origin",
    "expect",
    "te",
    "cookie",
)


@bounded
@given(
    path=st.sampled_from((*ROUTES, "/metrics", "/health", "/v1/models", "/v1/models/%2e%2e%2f", "/openapi.json")),
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "BREW"]),
    headers=st.dictionaries(st.sampled_from(HEADERS), header_values, max_size=3),
)
def test_odd_headers_and_methods(served: Served, path: str, method: str, headers: dict[str, bytes]) -> None:
    """Sent as they are, since clients would not."""
    body = encoded(GREEDY | {"messages": MESSAGES})
    lines = [f"{method} {path} HTTP/1.1".encode(), b"host: test", b"connection: close"]
    lines += [
        name.encode() + b": " + value for name, value in ({"content-type": b"application/json"} | headers).items()
    ]
    lines += [b"content-length: %d" % len(body), b"", body]
    status = raw_status(served.url, b"\r\n".join(lines))
    assert status is None or status < 500


@pytest.mark.parametrize("length", [b"-1", b"1e3", b"9" * 40, b"0x10", b"5, 5", b""])
def test_odd_lengths(served: Served, length: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\nconnection: close\r\n"
    status = raw_status(served.url, head + b"content-length: " + length + b"\r\n\r\n{}", half_close=True)
    assert status is None or status < 500


def raw_status(url: str, message: bytes, *, half_close: bool = False) -> int | None:
    """The status of the answer; None if the connection was closed without one."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=LATE_S) as connection:
        connection.sendall(message)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while b"\r\n" not in answer:
            part = connection.recv(4096)
            if not part:
                return None
            answer += part
    return int(answer.split()[1])
