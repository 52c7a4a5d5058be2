"""The HTTP server over a fake engine: middleware in process, and a real uvicorn on a free port."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from enginectl.builtin.openai import OpenAIFrontend
from enginectl.builtin.prometheus import PrometheusFrontend, PrometheusObserver
from enginectl.config import EngineConfig, ServerConfig
from enginectl.errors import ConfigError, UsageError
from enginectl.http.stream import ClientGone, EventStream
from enginectl.interfaces.frontend import Frontend, FrontendContext
from enginectl.server import bind, build_app, run_server
from enginectl.testing.fake_client import ByteTokenizer, FakeClient, fake_info, say
from enginectl.types import FinishReason, OutputChunk

ENGINE = EngineConfig(model="fake/model")
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]

# Of nobody: a self-signed certificate for localhost, and its key.
TLS_KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgYPuzlLLIPjeEJHwJ
6pBZpV2mchnkXg0ljWJiQ4i1lhyhRANCAARe946uW1b9vMdzFtux8CMIQ03kzHyP
m1hIz5uLOeTAR8vYW/wGzs4+g6b0keQyStVQ+5BtnyU/t2HdeygeDaMR
-----END PRIVATE KEY-----
"""
TLS_CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBnDCCAUGgAwIBAgIUSMfnfnUxf2Z5MWIU4BfN4ltM6v8wCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyOTIxMjUwNloYDzIxMjYxMTA1
MjEyNTA2WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAARe946uW1b9vMdzFtux8CMIQ03kzHyPm1hIz5uLOeTAR8vYW/wGzs4+
g6b0keQyStVQ+5BtnyU/t2HdeygeDaMRo28wbTAdBgNVHQ4EFgQUYuE95VZJY5b5
mvvKQ5u0BJwGqKcwHwYDVR0jBBgwFoAUYuE95VZJY5b5mvvKQ5u0BJwGqKcwDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSQAwRgIhAI9wuBtY/0uyeAVS4EQQM2dJwdK12ZH6z+NginkcXVVcAiEA
3Z8j1aQNp8mhMU2jm/u3BV1J7rD9hsQGzixapWK9ZVQ=
-----END CERTIFICATE-----
"""


class PluginFrontend(Frontend):
    """What a plugin might add."""

    def routes(self, ctx: FrontendContext) -> Sequence[BaseRoute]:
        async def fine(request: Request) -> PlainTextResponse:
            return PlainTextResponse("fine")

        async def broken(request: Request) -> PlainTextResponse:
            raise ZeroDivisionError("secret detail")

        async def socket_route(websocket: WebSocket) -> None:
            await websocket.accept()

        return [Route("/plugin", fine), Route("/broken", broken), WebSocketRoute("/socket", socket_route)]

    def openapi(self) -> dict[str, Any]:
        return {"paths": {"/plugin": {"get": {"summary": "fine"}}}}


def make_app(client: FakeClient, server: ServerConfig, *, tokenizer: Any = None) -> Any:
    """An application with every frontend."""
    frontends = [OpenAIFrontend(), PrometheusFrontend(), PluginFrontend()]
    return build_app(client, tokenizer or ByteTokenizer(), ENGINE, server, frontends, [PrometheusObserver()])


@asynccontextmanager
async def in_process(client: FakeClient, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The application without a socket."""
    transport = httpx.ASGITransport(make_app(client, ServerConfig(**options)), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http


@asynccontextmanager
async def serving(client: FakeClient, **options: Any) -> AsyncIterator[str]:
    """The application behind uvicorn on a free port; yields its address."""
    server = ServerConfig(**({"port": 0} | options))
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    app = make_app(client, server, tokenizer=options.get("tokenizer"))
    task = asyncio.create_task(run_server(app, client, server, on_started=address.set_result, stop=stop))
    try:
        waiting: list[asyncio.Future[Any]] = [task, address]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        yield address.result()
    finally:
        stop.set()
        await task


async def until(condition: Any, timeout_s: float = 5.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


# Keys


async def test_every_route_needs_a_key_but_health_and_metrics() -> None:
    """Law 16."""
    async with in_process(FakeClient(), api_key=("one", "two"), admin_api_key="admin") as http:
        paths = [
            "/v1/models",
            CHAT,
            "/plugin",
            "/server_info",
            "/openapi.json",
            "/no/such/route",
            "/health/",
            "//health",
        ]
        for path in paths:
            for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "one"}, {"x-api-key": "one"}):
                response = await http.get(path, headers=headers)
                assert response.status_code == 401, path
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        for key in ("one", "two", "admin"):
            assert (await http.get("/plugin", headers={"authorization": f"bearer {key}"})).text == "fine"
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200


async def test_metrics_need_a_key_when_configured() -> None:
    """Law 16."""
    async with in_process(FakeClient(), api_key=("one",), metrics_need_key=True) as http:
        assert (await http.get("/metrics")).status_code == 401
        assert (await http.get("/metrics", headers={"authorization": "Bearer one"})).status_code == 200


async def test_the_open_paths_are_those_below_the_root_path() -> None:
    """Law 16, behind a proxy."""
    app = make_app(FakeClient(), ServerConfig(api_key=("one",)))
    transport = httpx.ASGITransport(app, root_path="/api")
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.get("/api/health")).status_code == 200
        assert (await http.get("/api/plugin")).status_code == 401


async def test_a_key_that_is_not_ascii_is_wrong_not_an_error() -> None:
    async with in_process(FakeClient(), api_key=("schlüssel",)) as http:
        assert (await http.get("/plugin", headers={b"authorization": b"Bearer \xff\xfe"})).status_code == 401


async def test_websockets_need_a_key() -> None:
    """Law 16."""
    app = make_app(FakeClient(), ServerConfig(api_key=("one",)))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/socket", "headers": [], "query_string": b"", "subprotocols": []}
    await app(dict(scope), receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008, "reason": "an API key is needed"}]
    sent.clear()
    await app(scope | {"headers": [(b"authorization", b"Bearer one")]}, receive, send)
    assert sent[0]["type"] == "websocket.accept"


@pytest.mark.parametrize(
    "options",
    [{"api_key": ("a",), "admin_api_key": "a"}, {"api_key": ("",)}, {"admin_api_key": " "}, {"admin_api_key": ""}],
)
def test_contradictory_keys_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_app(FakeClient(), ServerConfig(**options))


async def test_requests_of_a_key_share_a_tenant() -> None:
    client = FakeClient()
    async with in_process(client, api_key=("one", "two")) as http:
        for key in ("one", "two", "two"):
            body = {"prompt": "a", "user": key}
            await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert [request.tenant for request in client.requests] == ["key-0", "key-1", "key-1"]


# CORS


async def test_preflights_need_no_key_and_errors_carry_cors_headers() -> None:
    """Law 16."""
    async with in_process(FakeClient(), api_key=("one",), allowed_origins=("https://app",)) as http:
        ask = {"origin": "https://app", "access-control-request-method": "POST", "access-control-request-headers": "x"}
        preflight = await http.options(CHAT, headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://app"
        refused = await http.post(CHAT, headers={"origin": "https://app"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app"
        other = await http.get("/health", headers={"origin": "https://evil"})
        assert "access-control-allow-origin" not in other.headers


# Routes and errors


async def test_unknown_routes_and_methods_have_the_error_body() -> None:
    async with in_process(FakeClient()) as http:
        missing = await http.get("/v1/chat/completion")
        assert missing.status_code == 404
        assert "did you mean '/v1/chat/completions'" in missing.json()["error"]["message"]
        wrong = await http.get(CHAT)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert wrong.json()["error"]["code"] == "method_not_allowed"
        assert (await http.post(CHAT + "/", json={})).status_code == 404
        assert (await http.get("/%00%0a%ff")).status_code == 404


async def test_an_unexpected_error_is_a_500_that_keeps_its_details(caplog: pytest.LogCaptureFixture) -> None:
    async with in_process(FakeClient()) as http:
        response = await http.get("/broken")
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text
    assert "secret detail" in caplog.text


def test_two_frontends_may_not_claim_one_route() -> None:
    """Law 23: a clash is an error at start."""
    with pytest.raises(ConfigError, match="both serve GET /plugin"):
        build_app(
            FakeClient(), None, ENGINE, ServerConfig(), [PluginFrontend(), type("Other", (PluginFrontend,), {})()]
        )


async def test_openapi_covers_every_frontend() -> None:
    async with in_process(FakeClient()) as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
    assert {"/plugin", "/metrics", CHAT} <= set(paths)


# Bodies


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_413_and_the_client_sees_it(chunked: bool) -> None:
    client = FakeClient()

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * 65536

    async with serving(client, max_request_bytes=100_000) as url, httpx.AsyncClient() as http:
        content: Any = pieces() if chunked else b"x" * 4_000_000
        response = await http.post(f"{url}{CHAT}", content=content, headers={"content-type": "application/json"})
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        assert (await http.post(f"{url}{CHAT}", json={"messages": HI})).status_code == 200


# Request ids and the access log


async def test_request_ids_come_in_and_go_out() -> None:
    client = FakeClient()
    async with in_process(client) as http:
        named = await http.post(CHAT, json={"messages": HI}, headers={"x-request-id": "trace-7"})
        again = await http.post(CHAT, json={"messages": HI}, headers={"x-request-id": "trace-7"})
        unfit = await http.get("/health", headers={"x-request-id": "a b"})
    assert named.headers["x-request-id"] == again.headers["x-request-id"] == "trace-7"
    assert named.json()["id"] == "chatcmpl-trace-7"
    assert len({request.request_id for request in client.requests}) == 2
    assert unfit.headers["x-request-id"] != "a b"


async def test_one_line_a_request_without_contents(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "enginectl.access")
    async with in_process(FakeClient(), api_key=("hidden-key",)) as http:
        headers = {"authorization": "Bearer hidden-key", "x-request-id": "r1"}
        secret = [{"role": "user", "content": "private words"}]
        await http.post(f"{CHAT}?q=hidden", json={"messages": secret, "stream": True}, headers=headers)
        await http.get("/plugin%0Aforged", headers=headers)
    lines = [record.getMessage() for record in caplog.records if record.name == "enginectl.access"]
    assert len(lines) == 2
    fields = dict(part.split("=", 1) for part in lines[0].split())
    assert (fields["request_id"], fields["method"], fields["path"]) == ("r1", "POST", CHAT)
    assert (fields["status"], fields["completion_tokens"]) == ("200", "13")
    assert {"prompt_tokens", "ttft_ms", "total_ms"} <= set(fields)
    assert "path=/plugin%0Aforged" in lines[1]
    assert not any(word in caplog.text for word in ("private", "hidden", "Hello"))


async def test_the_access_log_can_be_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "enginectl.access")
    async with in_process(FakeClient(), log_requests=False) as http:
        await http.get("/health")
    assert "request_id" not in caplog.text


# The official client


async def test_the_official_client_works() -> None:
    client = FakeClient(info=fake_info(max_model_len=64))
    async with serving(client, api_key=("k",)) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as sdk:
            chat: Any = {"model": "fake/model", "messages": HI}
            answer = await sdk.chat.completions.create(**chat)
            assert answer.choices[0].message.content == "Hello, world!"
            text, usage = "", None
            stream = await sdk.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})
            async for chunk in stream:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                usage = chunk.usage or usage
            assert text == "Hello, world!"
            assert usage is not None
            assert usage.completion_tokens == 13
            completion = await sdk.completions.create(model="fake/model", prompt=["a", "b"], logprobs=1, echo=True)
            assert [choice.text for choice in completion.choices] == ["aHello, world!", "bHello, world!"]
            assert completion.choices[0].logprobs is not None
            pieces = await sdk.completions.create(model="fake/model", prompt="a", stream=True)
            assert "".join([piece.choices[0].text async for piece in pieces]) == "Hello, world!"
            logprobs = await sdk.chat.completions.create(**chat, logprobs=True, top_logprobs=2, max_tokens=1)
            assert logprobs.choices[0].logprobs is not None
            assert logprobs.choices[0].logprobs.content is not None
            assert len(logprobs.choices[0].logprobs.content[0].top_logprobs) == 2
            assert [model.id async for model in sdk.models.list()] == ["fake/model"]
            with pytest.raises(openai.BadRequestError, match="max_model_len"):
                await sdk.completions.create(model="fake/model", prompt="x" * 100)
            with pytest.raises(openai.NotFoundError) as missing:
                await sdk.completions.create(model="other", prompt="x")
            assert missing.value.code == "model_not_found"
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as sdk:
            with pytest.raises(openai.AuthenticationError):
                await sdk.models.list()


async def test_the_official_client_sees_an_error_in_the_middle() -> None:
    def script(request: Any) -> Any:
        yield [OutputChunk(index=0, text="a", token_ids=(5,))]
        yield [OutputChunk(index=0, text="", token_ids=(), finish_reason=FinishReason.ERROR, error="step failed")]

    async with serving(FakeClient(script)) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-") as sdk:
        chat: Any = {"model": "fake/model", "messages": HI, "stream": True}
        stream = await sdk.chat.completions.create(**chat)
        with pytest.raises(openai.APIError, match="step failed"):
            async for _ in stream:
                pass


# Clients that go away, or read slowly


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]])
async def test_a_client_that_goes_away_ends_its_requests(
    stream: bool, prompt: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Law 13, for every prompt and choice, streamed or not."""
    caplog.set_level(logging.INFO, "enginectl.access")
    client = FakeClient()
    client.gate = asyncio.Event()
    num_prompts = len(prompt) if isinstance(prompt, list) else 1
    async with serving(client) as url:
        async with httpx.AsyncClient() as http:
            body = {"prompt": prompt, "n": 2, "stream": stream}
            call = asyncio.create_task(http.post(f"{url}/v1/completions", json=body))
            await until(lambda: client.num_open == num_prompts)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await until(lambda: client.num_open == 0)
        assert len(client.closed) == num_prompts
        await until(lambda: "client=gone" in caplog.text)


async def test_a_client_that_leaves_in_the_middle_of_a_stream() -> None:
    """Law 13."""

    def endless(request: Any) -> Any:
        while True:
            yield [OutputChunk(index=0, text="word ", token_ids=(5,))]

    client = FakeClient(endless)
    async with serving(client) as url, httpx.AsyncClient() as http:
        async with http.stream("POST", f"{url}{CHAT}", json={"messages": HI, "stream": True}) as response:
            async for _ in response.aiter_lines():
                break
        await until(lambda: client.num_open == 0)
    assert len(client.closed) == 1


async def test_a_client_that_does_not_read_stops_the_stream_from_being_made() -> None:
    num_made = 0

    def endless(request: Any) -> Any:
        nonlocal num_made
        while True:
            num_made += 1
            yield [OutputChunk(index=0, text="x" * 4096, token_ids=(5,))]

    client = FakeClient(endless)
    async with serving(client) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]), limit=4096)
        body = json.dumps({"prompt": "a", "stream": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await until(lambda: num_made > 0)
        before = -1
        async with asyncio.timeout(20):
            while num_made != before:
                before = num_made
                await asyncio.sleep(0.3)
        assert num_made < 10_000
        writer.close()
        await until(lambda: client.num_open == 0)
        del reader


async def test_tokenising_a_long_prompt_does_not_stall_the_loop() -> None:
    import time

    class Slow(ByteTokenizer):
        def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
            time.sleep(0.5)
            return super().encode_batch([text[:8] for text in texts], add_special_tokens)

    client = FakeClient()
    app = make_app(client, ServerConfig(), tokenizer=Slow())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        call = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x" * 30_000}))
        longest, before = 0.0, time.monotonic()
        while not call.done():
            await asyncio.sleep(0.01)
            now = time.monotonic()
            longest, before = max(longest, now - before), now
        assert (await call).status_code == 200
    assert longest < 0.3


# Starting and stopping


async def test_running_requests_finish_while_the_server_drains(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "enginectl.server")
    client = FakeClient(say("slow answer"))
    client.gate = asyncio.Event()
    server = ServerConfig(port=0, drain_timeout_s=5)
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(
        run_server(make_app(client, server), client, server, on_started=address.set_result, stop=stop)
    )
    url = await address
    async with httpx.AsyncClient() as http:
        call = asyncio.create_task(http.post(f"{url}/v1/completions", json={"prompt": "a"}))
        await until(lambda: client.num_open == 1)
        stop.set()
        await until(lambda: client.state == "draining")
        assert (await http.get(f"{url}/health")).status_code == 503
        refused = await http.post(f"{url}/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        await until(lambda: "draining: running requests may take 5 s more" in caplog.text)
        client.gate.set()
        assert (await call).json()["choices"][0]["text"] == "slow answer"
    await task


async def test_a_signal_drains_and_returns(caplog: pytest.LogCaptureFixture) -> None:
    """Without a word of running requests when there are none."""
    import os
    import signal

    caplog.set_level("INFO", "enginectl.server")
    client = FakeClient()
    server = ServerConfig(port=0)
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    before = signal.getsignal(signal.SIGTERM)
    task = asyncio.create_task(run_server(make_app(client, server), client, server, on_started=address.set_result))
    await address
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(10):
        await task
    assert client.state == "draining"
    assert "draining" not in caplog.text
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"127\.0\.0\.1 port {port}: another process listens there.*--port"):
            bind(ServerConfig(port=port))


@pytest.mark.parametrize("options", [{"host": "no.such.host.invalid"}, {"port": 99_999}])
def test_an_address_that_cannot_be_used_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="cannot listen on"):
        bind(ServerConfig(**options))


async def test_unix_sockets(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    bind(ServerConfig(uds=path)).close()  # a stale socket is taken over
    async with serving(FakeClient(), uds=path) as address:
        assert address == f"unix:{path}"
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path)) as http:
            assert (await http.get("http://test/health")).status_code == 200
        with pytest.raises(UsageError, match="another process listens"):
            bind(ServerConfig(uds=path))
    assert not Path(path).exists()
    Path(path).write_text("a file")
    with pytest.raises(UsageError, match="not a socket"):
        bind(ServerConfig(uds=path))


async def test_unusable_tls_files_are_one_clear_error(tmp_path: Path) -> None:
    client = FakeClient()
    server = ServerConfig(port=0, ssl_certfile=str(tmp_path / "none.pem"), ssl_keyfile=str(tmp_path / "none.key"))
    with pytest.raises(UsageError, match="--ssl-certfile"):
        await run_server(make_app(client, server), client, server)


async def test_tls_and_clients_that_need_a_certificate(tmp_path: Path) -> None:
    """The options reach uvicorn: an address without TLS is refused, and so is a client without a certificate."""
    (tmp_path / "key.pem").write_text(TLS_KEY)
    (tmp_path / "cert.pem").write_text(TLS_CERTIFICATE)
    files = {"ssl_keyfile": str(tmp_path / "key.pem"), "ssl_certfile": str(tmp_path / "cert.pem")}
    stranger = ssl.create_default_context(cadata=TLS_CERTIFICATE)
    known = ssl.create_default_context(cadata=TLS_CERTIFICATE)
    known.load_cert_chain(files["ssl_certfile"], files["ssl_keyfile"])
    async with serving(FakeClient(), **files) as url, httpx.AsyncClient(verify=stranger) as http:
        assert url.startswith("https://")
        assert (await http.get(f"{url}/health")).status_code == 200
    files |= {"ssl_ca_certs": files["ssl_certfile"], "ssl_cert_reqs": "required"}
    async with serving(FakeClient(), **files) as url:
        async with httpx.AsyncClient(verify=known) as http:
            assert (await http.get(f"{url}/health")).status_code == 200
        async with httpx.AsyncClient(verify=stranger) as http:
            with pytest.raises(httpx.TransportError):
                await http.get(f"{url}/health")


async def test_root_path() -> None:
    async with serving(FakeClient(), root_path="/api", api_key=("k",)) as url, httpx.AsyncClient() as http:
        assert (await http.get(f"{url}/health")).status_code == 200
        assert (await http.get(f"{url}/plugin")).status_code == 401


async def test_a_client_that_stops_reading_is_cut_off() -> None:
    """Its request ends as if it had left; one that reads slowly is served."""
    closed: list[str] = []

    async def frames(name: str) -> AsyncIterator[bytes]:
        try:
            for _ in range(5):
                yield b"data: {}\n\n"
        finally:
            closed.append(name)

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def never(message: Any) -> None:
        await asyncio.sleep(60)

    async def slowly(message: Any) -> None:
        await asyncio.sleep(0.05)

    scope: dict[str, Any] = {"type": "http"}
    with pytest.raises(ClientGone):
        await asyncio.wait_for(EventStream(frames("stalled"), stall_s=0.1)(scope, receive, never), 5)  # type: ignore[arg-type]
    await asyncio.wait_for(EventStream(frames("slow"), stall_s=0.2)(scope, receive, slowly), 5)  # type: ignore[arg-type]
    assert closed == ["stalled", "slow"]
