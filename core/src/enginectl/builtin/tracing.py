"""OpenTelemetry traces: a span of each request, made when it ends, by the semantic conventions for generative AI.

A span says how a request went and never what it said. Nothing here runs in the engine process.
Source: https://github.com/open-telemetry/semantic-conventions-genai, the span `gen_ai.inference.client`, seen from the
server. Times that only a server knows have the names of its metrics (`gen_ai.server.*`), and the wait for a place in the
batch that of vLLM's spans.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from enginectl import __version__
from enginectl.builtin.tracing_options import TracingOptions
from enginectl.context import BuildContext
from enginectl.interfaces.observer import Observer
from enginectl.types import Call, FinishedRequest, FinishReason, GenerateRequest, SamplingParams, Timings

PROVIDER = "enginectl"
TRACES_PATH = "/v1/traces"

_CLOSE_S = 3.0

Attribute = tuple[str, AttributeValue]


class TracingObserver(Observer):
    """Makes the spans. processor: where they go when they end."""

    def __init__(self, processor: SpanProcessor) -> None:
        named = Resource({"service.name": PROVIDER, "service.version": __version__})
        self._provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(PROVIDER, __version__)
        self._propagator = TraceContextTextMapPropagator()

    def on_finished(self, finished: FinishedRequest) -> None:
        """Make and end the request's span."""
        request = finished.request
        call = request.call if request is not None and request.call is not None else _UNKNOWN
        arrival_s = min((t.arrival_s for t in finished.timings), default=time.monotonic())
        end_s = max((t.finished_s for t in finished.timings), default=arrival_s)
        to_wall_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            f"{call.operation} {call.model}".rstrip(),
            context=self._parent(call),
            kind=SpanKind.SERVER,
            attributes=dict(_attributes(finished, call)),
            start_time=round(arrival_s * 1e9) + to_wall_ns,
        )
        if finished.error is not None or FinishReason.ERROR in finished.reasons:
            span.set_attribute("error.type", _error_type(request, end_s - arrival_s))
            span.set_status(Status(StatusCode.ERROR, finished.error))
        span.end(end_time=round(end_s * 1e9) + to_wall_ns)

    def _parent(self, call: Call) -> Context:
        # An empty context, so that a span of whoever happens to run the event loop is not the parent.
        return self._propagator.extract(call.trace_headers, context=Context())

    def close(self) -> None:
        """Send what is left; a collector that does not answer is not waited for."""
        sending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        sending.start()
        sending.join(_CLOSE_S)


_UNKNOWN = Call(operation="text_completion", model="")


def _attributes(finished: FinishedRequest, call: Call) -> Iterator[Attribute]:
    yield "gen_ai.operation.name", call.operation
    yield "gen_ai.provider.name", PROVIDER
    if call.model:
        yield "gen_ai.request.model", call.model
        yield "gen_ai.response.model", call.model
    if call.is_streamed:
        yield "gen_ai.request.stream", True
    if finished.request is not None:
        yield from _of_params(finished.request.params)
    yield "gen_ai.response.id", finished.request_id
    yield "gen_ai.response.finish_reasons", [reason.value for reason in finished.reasons]
    yield "gen_ai.usage.input_tokens", finished.usage.prompt_tokens
    yield "gen_ai.usage.output_tokens", finished.usage.completion_tokens
    yield "gen_ai.usage.cache_read.input_tokens", finished.usage.cached_tokens
    yield from _times(finished, [timings for timings in finished.timings if timings.first_token_s > 0], call)


def _of_params(params: SamplingParams) -> Iterator[Attribute]:
    yield "gen_ai.request.temperature", params.temperature
    yield "gen_ai.request.top_p", params.top_p
    yield "gen_ai.request.frequency_penalty", params.frequency_penalty
    yield "gen_ai.request.presence_penalty", params.presence_penalty
    if params.top_k > 0:
        yield "gen_ai.request.top_k", params.top_k
    if params.max_tokens is not None:
        yield "gen_ai.request.max_tokens", params.max_tokens
    if params.seed is not None:
        yield "gen_ai.request.seed", params.seed
    if params.n != 1:
        yield "gen_ai.request.choice.count", params.n


def _times(finished: FinishedRequest, ran: list[Timings], call: Call) -> Iterator[Attribute]:
    """In seconds, from the arrival of the first choice to the events of any."""
    if not ran:
        return
    arrival_s = min(timings.arrival_s for timings in ran)
    first_s = min(timings.first_token_s for timings in ran) - arrival_s
    yield "gen_ai.server.time_to_first_token", first_s
    if call.is_streamed:
        yield "gen_ai.response.time_to_first_chunk", first_s
    scheduled = [timings.scheduled_s for timings in ran if timings.scheduled_s > 0]
    if scheduled:
        yield "gen_ai.latency.time_in_queue", min(scheduled) - arrival_s
    num_gaps = finished.usage.completion_tokens - len(ran)
    if num_gaps > 0:
        decoding_s = sum(timings.finished_s - timings.first_token_s for timings in ran)
        yield "gen_ai.server.time_per_output_token", decoding_s / num_gaps


def _error_type(request: GenerateRequest | None, spent_s: float) -> str:
    """One of a few words: "timeout" if the request's own time was over, else "engine_error"."""
    timeout_s = request.timeout_s if request is not None else None
    return "timeout" if timeout_s is not None and spent_s >= timeout_s else "engine_error"


def build(ctx: BuildContext) -> TracingObserver:
    """The observer `otel`."""
    options: TracingOptions = ctx.options
    path = urlsplit(options.endpoint).path
    endpoint = options.endpoint if path.strip("/") else options.endpoint.rstrip("/") + TRACES_PATH
    return TracingObserver(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
