"""What the assembled engine can do, and what a request asks for that it cannot."""

from __future__ import annotations

import msgspec

from enginectl.builtin.openai.protocol import (
    REFUSED,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    ResponseFormat,
    StructuredOutputsField,
)
from enginectl.engine.client import EngineInfo
from enginectl.engine.validate import refuse_unread_priority
from enginectl.errors import RequestError
from enginectl.types import StructuredOutputs


def providers(info: EngineInfo, role: str) -> tuple[str, ...]:
    """Names of the providers that serve a role."""
    return tuple(row[1] for row in info.table if row[0] == role)


def unsupported(param: str, why: str) -> RequestError:
    """The refusal of one parameter."""
    return RequestError(f"{param} is not supported here: {why}", param=param, code="unsupported_parameter")


def refuse_unsupported(body: ChatRequest | CompletionRequest, info: EngineInfo) -> None:
    """Raise for the first parameter that nothing here can honour."""
    for name, why in REFUSED.items():
        if getattr(body, name, None) is not None:
            raise unsupported(name, why)
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is only allowed with stream: true", param="stream_options")
    refuse_unread_priority(body.priority, info)
    if isinstance(body.speculation, int) and body.speculation > 0 and not providers(info, "speculator"):
        raise unsupported("speculation", "no speculator serves; install one, such as enginectl-spec-ngram, and name it")
    if isinstance(body, ChatRequest):
        _refuse_tools(body)


def _refuse_tools(body: ChatRequest) -> None:
    why = "this server does not turn what a model writes into tool calls; leave it out"
    if body.tools:
        raise unsupported("tools", why)
    if body.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", why)
    if body.modalities not in (None, ["text"]):
        raise unsupported("modalities", 'this server answers with text only; leave it out or send ["text"]')


def structured_outputs(body: GenerationFields, info: EngineInfo) -> StructuredOutputs | None:
    """The constraint of a request, from structured_outputs or response_format, or None.

    Raises RequestError if both are given, none or several constraints are in one, or no grammar backend serves.
    """
    wanted, param = None, "response_format"
    if body.response_format is not None:
        wanted = _from_response_format(body.response_format)
    if body.structured_outputs is not None:
        if wanted is not None:
            raise RequestError("give structured_outputs or response_format, not both", param="structured_outputs")
        wanted, param = _from_field(body.structured_outputs), "structured_outputs"
    if wanted is None:
        return None
    backends = providers(info, "grammar")
    if not backends:
        why = "no grammar backend serves; install a grammar plugin and name it with --plugins"
        raise unsupported(param, why)
    if wanted.backend is not None and wanted.backend not in backends:
        raise unsupported(f"{param}.backend", f"{wanted.backend!r} does not serve; choose from {', '.join(backends)}")
    return wanted


def _from_response_format(wanted: ResponseFormat) -> StructuredOutputs | None:
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise RequestError("response_format.json_schema is missing", param="response_format.json_schema")
        return StructuredOutputs(json=msgspec.json.encode(wanted.json_schema.schema).decode())
    if wanted.json_schema is not None:
        raise RequestError('response_format.json_schema needs type "json_schema"', param="response_format.json_schema")
    return StructuredOutputs(json_object=True) if wanted.type == "json_object" else None


def _from_field(field: StructuredOutputsField) -> StructuredOutputs:
    given = [
        name
        for name in ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        if getattr(field, name) not in (None, False)
    ]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise RequestError(
            f"structured_outputs needs exactly one of json, regex, choice, grammar, json_object, structural_tag; "
            f"found {found}",
            param="structured_outputs",
        )
    return StructuredOutputs(
        json=_as_text(field.json),
        regex=field.regex,
        choice=tuple(field.choice) if field.choice is not None else None,
        grammar=field.grammar,
        json_object=bool(field.json_object),
        structural_tag=_as_text(field.structural_tag),
        backend=field.backend,
    )


def _as_text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()
