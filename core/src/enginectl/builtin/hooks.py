"""Core's own plugins: one object per entry point. Plain data; nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from enginectl.builtin.scheduler_options import FairOptions, QueueOptions
from enginectl.builtin.tracing_options import TracingOptions, without_opentelemetry
from enginectl.hookspecs import hookimpl
from enginectl.provider import Capabilities, Provider, Role

_FLOATS = frozenset({"float32", "bfloat16", "float16"})
_BOTH = frozenset({"cpu", "cuda"})


class _Plugin:
    """Hook implementations made from a list of providers, one hook a role they serve."""

    def __init__(self, *providers: Provider) -> None:
        for role in {provider.role for provider in providers}:
            mine = [provider for provider in providers if provider.role is role]
            hook = hookimpl(_returning(mine), specname=f"enginectl_{role.value}")
            setattr(self, f"enginectl_{role.value}", hook)


def _returning(providers: Sequence[Provider]) -> Callable[[], Sequence[Provider]]:
    def register() -> Sequence[Provider]:
        return providers

    return register


_here = "enginectl.builtin"

fcfs = _Plugin(
    Provider(
        Role.SCHEDULER,
        "fcfs",
        f"{_here}.scheduler_fcfs:build",
        rank=10,
        config=QueueOptions,
        summary="first come, first served",
    ),
)
priority = _Plugin(
    Provider(
        Role.SCHEDULER,
        "priority",
        f"{_here}.scheduler_priority:build",
        config=QueueOptions,
        summary="lower numbers first",
    ),
)
fair = _Plugin(
    Provider(
        Role.SCHEDULER,
        "fair",
        f"{_here}.scheduler_fair:build",
        config=FairOptions,
        summary="tenants share by tokens",
    ),
)
paged = _Plugin(
    Provider(Role.KV_ALLOCATOR, "paged", f"{_here}.allocator_paged:build", summary="free list, then oldest idle block"),
)
torch = _Plugin(
    Provider(
        Role.ATTENTION,
        "torch",
        f"{_here}.attention_torch:build",
        capabilities=Capabilities(devices=_BOTH, dtypes=_FLOATS, host_lengths=True),
        summary="gather and scaled dot product, any device",
    ),
    Provider(Role.SAMPLER, "torch", f"{_here}.sampling:build_sampler", summary="position-keyed noise, any device"),
    Provider(
        Role.OP_SET,
        "torch",
        f"{_here}.ops_torch:build",
        capabilities=Capabilities(devices=_BOTH, dtypes=_FLOATS),
        summary="plain torch, prepacked linears on a CPU",
    ),
)
logits = _Plugin(
    Provider(Role.LOGITS_PROCESSOR, "penalties", f"{_here}.sampling:build_penalties", rank=50),
    Provider(Role.LOGITS_PROCESSOR, "logit_bias", f"{_here}.sampling:build_logit_bias", rank=40),
    Provider(Role.LOGITS_PROCESSOR, "bad_words", f"{_here}.sampling:build_bad_words", rank=30),
    Provider(Role.LOGITS_PROCESSOR, "min_tokens", f"{_here}.sampling:build_min_tokens", rank=20),
    Provider(Role.LOGITS_PROCESSOR, "allowed_token_ids", f"{_here}.sampling:build_allowed_token_ids", rank=10),
)
transformers = _Plugin(
    Provider(
        Role.MODEL_FAMILY,
        "transformers",
        f"{_here}.transformers_family:build",
        capabilities=Capabilities(devices=_BOTH, dtypes=_FLOATS),
        summary="any decoder that takes our attention, through transformers",
    ),
)
native = _Plugin(
    Provider(
        Role.MODEL_FAMILY,
        "native",
        f"{_here}.native:build",
        rank=10,
        capabilities=Capabilities(devices=_BOTH, dtypes=_FLOATS),
        summary="Llama and its kin, dense and mixtures of experts, on an op set",
    ),
)
safetensors = _Plugin(
    Provider(Role.WEIGHTS, "safetensors", f"{_here}.weights:build_safetensors", summary="Hugging Face directories"),
)
gguf = _Plugin(Provider(Role.WEIGHTS, "gguf", f"{_here}.weights:build_gguf", summary="GGUF files, dequantised"))
tokenizers = _Plugin(
    Provider(Role.DETOKENIZER, "tokenizers", f"{_here}.detokenizer:build", summary="incremental, O(1) a token"),
)
local = _Plugin(
    Provider(Role.EXECUTOR, "local", "enginectl.engine.runner:build", summary="one device in the engine process"),
)
openai = _Plugin(Provider(Role.FRONTEND, "openai", f"{_here}.openai:build_frontend", summary="OpenAI-compatible API"))
otel = _Plugin(
    Provider(
        Role.OBSERVER,
        "otel",
        f"{_here}.tracing:build",
        rank=-1,
        unsupported=without_opentelemetry,
        config=TracingOptions,
        summary="a span of each request to an OpenTelemetry collector",
    ),
)
prometheus = _Plugin(
    Provider(Role.OBSERVER, "prometheus", f"{_here}.prometheus:build_observer", summary="counters and histograms"),
    Provider(Role.FRONTEND, "prometheus", f"{_here}.prometheus:build_frontend", summary="GET /metrics"),
)
