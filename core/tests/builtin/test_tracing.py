"""Traces: a span of each request, under the caller's, by the conventions for generative AI, without contents."""

from __future__ import annotations

import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs enginectl[otel]")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from enginectl.builtin.openai import OpenAIFrontend
from enginectl.builtin.tracing import TracingObserver, build
from enginectl.builtin.tracing_options import TracingOptions
from enginectl.config import EngineConfig, ServerConfig
from enginectl.context import BuildContext, Machine
from enginectl.engine.audience import Audience
from enginectl.engine.router import Ticket
from enginectl.errors import ConfigError, UnsupportedError
from enginectl.plugins import PluginHost
from enginectl.provider import Role
from enginectl.server import build_app
from enginectl.testing.fake_client import ByteTokenizer, FakeClient
from enginectl.types import Call, FinishedRequest, FinishReason, GenerateRequest, SamplingParams, Timings, Usage

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
MACHINE = Machine(num_cores=1, memory_bytes=1 << 30, cpu_flags=frozenset())
SECRET = "private words"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def observer(exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> Iterator[TracingObserver]:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    made = TracingObserver(SimpleSpanProcessor(exporter))
    yield made
    made.close()


def finished(call: Call | None, **changes: Any) -> FinishedRequest:
    """11 tokens: queued 0.25 s, the first after 0.5 s, the last after 1.5 s, five seconds ago."""
    start = time.monotonic() - 5.0
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=20, max_tokens=64, seed=3, n=2, stop=(SECRET,))
    request = GenerateRequest(request_id="r", prompt_token_ids=[1] * 100, params=params, timeout_s=60.0, call=call)
    values: dict[str, Any] = {
        "request_id": "r",
        "reasons": (FinishReason.STOP,),
        "usage": Usage(100, 11, 48),
        "timings": (Timings(start, start + 0.25, start + 0.5, start + 1.5, 0),),
        "request": request,
    }
    return FinishedRequest(**(values | changes))


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


def test_a_span_has_the_names_of_the_conventions(observer: TracingObserver, exporter: InMemorySpanExporter) -> None:
    headers = {"traceparent": TRACEPARENT, "tracestate": "a=b"}
    before = time.time()
    observer.on_finished(finished(Call(operation="chat", model="m", is_streamed=True, trace_headers=headers)))
    span = only(exporter)
    assert (span.name, span.kind) == ("chat m", SpanKind.SERVER)
    attributes = dict(span.attributes or {})
    times = {name: attributes.pop(name) for name in list(attributes) if ".time_" in name}
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "enginectl",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 20,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.id": "r",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 11,
        "gen_ai.usage.cache_read.input_tokens": 48,
    }
    assert times == pytest.approx(
        {
            "gen_ai.server.time_to_first_token": 0.5,
            "gen_ai.server.time_per_output_token": 0.1,
            "gen_ai.response.time_to_first_chunk": 0.5,
            "gen_ai.latency.time_in_queue": 0.25,
        }
    )
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time == pytest.approx(1.5e9, rel=1e-6)
    assert span.start_time / 1e9 == pytest.approx(before - 5.0, abs=0.5)
    assert span.context is not None
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.context.trace_state.get("a") == "b"
    assert span.resource.attributes["service.name"] == "enginectl"
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    "traceparent", ["", "nonsense", "00-0-0-01", f"00-{TRACE}-{PARENT}", "00-" + "0" * 32 + f"-{PARENT}-01"]
)
def test_a_wrong_parent_is_none(observer: TracingObserver, exporter: InMemorySpanExporter, traceparent: str) -> None:
    observer.on_finished(finished(Call(operation="chat", model="m", trace_headers={"traceparent": traceparent})))
    assert only(exporter).parent is None


@pytest.mark.parametrize(("timeout_s", "kind"), [(60.0, "engine_error"), (1.5, "timeout")])
def test_errors(observer: TracingObserver, exporter: InMemorySpanExporter, timeout_s: float, kind: str) -> None:
    request = GenerateRequest(request_id="r", prompt_token_ids=[1], params=SamplingParams(), timeout_s=timeout_s)
    observer.on_finished(finished(None, reasons=(FinishReason.ERROR,), error="a step raised", request=request))
    span = only(exporter)
    assert (span.attributes or {})["error.type"] == kind
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "a step raised")


@pytest.mark.parametrize("timings", [(), (Timings(5.0, 0.0, 0.0, 6.0, 0),)])
def test_a_request_that_never_ran_has_a_span_without_times(
    observer: TracingObserver, exporter: InMemorySpanExporter, timings: tuple[Timings, ...]
) -> None:
    observer.on_finished(finished(None, reasons=(FinishReason.ABORT,), timings=timings, request=None))
    span = only(exporter)
    assert not any("time_" in name for name in span.attributes or {})
    assert span.name == "text_completion"


class Watched(FakeClient):
    """Tells an observer how each request ended."""

    def __init__(self, observer: TracingObserver) -> None:
        super().__init__()
        self._audience = Audience(PluginHost(only_named=True), [observer])

    async def generate(self, request: GenerateRequest) -> Any:
        async for chunks in super().generate(request):
            yield chunks
        self._audience.finished(Ticket(request, lambda: None), None)


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}], "stream": True}, "chat"),
        ("/v1/completions", {"prompt": SECRET, "stop": [SECRET]}, "text_completion"),
    ],
)
async def test_the_callers_span_is_the_parent_and_nothing_said_is_told(
    observer: TracingObserver, exporter: InMemorySpanExporter, path: str, body: dict[str, Any], operation: str
) -> None:
    engine = EngineConfig(model="fake/model")
    app = build_app(Watched(observer), ByteTokenizer(), engine, ServerConfig(), [OpenAIFrontend()], [observer])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        response = await http.post(path, json=body, headers={"traceparent": TRACEPARENT})
        assert response.status_code == 200
    span = only(exporter)
    assert span.name == f"{operation} fake/model"
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    assert ("gen_ai.request.stream" in (span.attributes or {})) == ("stream" in body)
    assert SECRET not in span.to_json()


# -- as a plugin -----------------------------------------------------------------------------------------------------


def test_it_serves_only_when_named_and_where_its_extra_is_installed() -> None:
    """Law 23: without the extra, naming it is an error that says what to install."""
    assert not [e for e in PluginHost().select(Role.OBSERVER, MACHINE).chosen if e.provider.name == "otel"]
    with pytest.raises(
        UnsupportedError, match=r"opentelemetry-sdk and .* not installed; pip install 'enginectl\[otel\]'"
    ):
        PluginHost(["otel"]).select(Role.OBSERVER, MACHINE)


@pytest.mark.parametrize("section", [{"endpoint": "grpc://host:4317"}, {"endpoint": "host:4318"}, {}])
def test_an_endpoint_must_be_a_url(section: dict[str, str]) -> None:
    host = PluginHost(["otel"])
    with pytest.raises(ConfigError, match="endpoint"):
        host.options(host.plugins["otel"], {"otel": section})


@pytest.mark.parametrize(("path", "posted"), [("", "/v1/traces"), ("/", "/v1/traces"), ("/mine", "/mine")])
def test_spans_reach_a_collector_at_the_latest_when_the_engine_closes(path: str, posted: str) -> None:
    received: list[tuple[str, int]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, len(self.rfile.read(int(self.headers["content-length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        options = TracingOptions(endpoint=f"http://127.0.0.1:{server.server_port}{path}")
        observer = build(BuildContext(EngineConfig(model="m"), MACHINE, options=options))
        observer.on_finished(finished(None))
        observer.close()
        server.shutdown()
    ((where, size),) = received
    assert (where, size > 100) == (posted, True)


def test_a_collector_that_is_not_there_does_not_hold_up_the_end() -> None:
    observer = build(
        BuildContext(EngineConfig(model="m"), MACHINE, options=TracingOptions(endpoint="http://127.0.0.1:9"))
    )
    observer.on_finished(finished(None))
    started = time.monotonic()
    observer.close()
    assert time.monotonic() - started < 5.0
