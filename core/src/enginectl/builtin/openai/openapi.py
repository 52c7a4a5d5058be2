"""The OpenAPI description of the routes, made from the structs that read and write them."""

from __future__ import annotations

from typing import Any

import msgspec

from enginectl.builtin.openai import answers, protocol
from enginectl.http.errors import ErrorBody

Operation = tuple[str, str, str, type[msgspec.Struct] | None, type[msgspec.Struct], type[msgspec.Struct] | None]

_OPERATIONS: tuple[Operation, ...] = (
    # method, path, summary, request, answer, event
    ("post", "/v1/chat/completions", "Complete a chat", protocol.ChatRequest, answers.ChatAnswer, answers.ChatChunk),
    ("post", "/v1/completions", "Complete texts", protocol.CompletionRequest, answers.TextAnswer, answers.TextChunk),
    ("get", "/v1/models", "Names that requests may use", None, answers.ModelList, None),
    ("get", "/v1/models/{model}", "One of those names", None, answers.ModelCard, None),
    ("post", "/tokenize", "Text or messages to token ids", protocol.TokenizeRequest, answers.TokenizeAnswer, None),
    ("post", "/detokenize", "Token ids to text", protocol.DetokenizeRequest, answers.DetokenizeAnswer, None),
    ("get", "/health", "Whether the engine takes requests", None, answers.Health, None),
    ("get", "/version", "Version of enginectl", None, answers.Version, None),
    ("get", "/server_info", "What was assembled, and its state", None, answers.ServerInfo, None),
    ("post", "/v1/load_lora_adapter", "Load an adapter (admin key)", protocol.LoadAdapterRequest, answers.Done, None),
    (
        "post",
        "/v1/unload_lora_adapter",
        "Unload an adapter (admin key)",
        protocol.UnloadAdapterRequest,
        answers.Done,
        None,
    ),
    ("post", "/reset_prefix_cache", "Forget cached prefixes (admin key)", None, answers.Done, None),
)

_REF = "#/components/schemas/{name}"


def describe_routes() -> dict[str, Any]:
    """`paths` and `components` of every route of this frontend."""
    structs = {struct for operation in _OPERATIONS for struct in operation[3:] if struct is not None} | {ErrorBody}
    ordered = sorted(structs, key=lambda struct: struct.__name__)
    refs, schemas = msgspec.json.schema_components(ordered, ref_template=_REF)
    ref_of = dict(zip(ordered, refs, strict=True))
    _note_fields(schemas)
    paths: dict[str, Any] = {}
    for method, path, summary, request, answer, event in _OPERATIONS:
        content = {"application/json": {"schema": ref_of[answer]}}
        if event is not None:
            content["text/event-stream"] = {"schema": ref_of[event]}
        operation: dict[str, Any] = {
            "summary": summary,
            "responses": {
                "200": {"description": "success", "content": content},
                "default": {
                    "description": "error",
                    "content": {"application/json": {"schema": ref_of[ErrorBody]}},
                },
            },
        }
        if answer is answers.Health:
            operation["responses"]["503"] = {"description": "not now", "content": content}
        if request is not None:
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref_of[request]}}}
        if "{model}" in path:
            operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths.setdefault(path, {})[method] = operation
    return {"paths": paths, "components": {"schemas": schemas}}


def _note_fields(schemas: dict[str, Any]) -> None:
    """Say at each field that is refused or has no effect why that is so."""
    for name in ("ChatRequest", "CompletionRequest"):
        for field, schema in schemas[name]["properties"].items():
            if field in protocol.REFUSED:
                schema |= {"type": "null", "description": f"Refused when set: {protocol.REFUSED[field]}."}
            elif field in protocol.NO_EFFECT:
                schema["description"] = f"Accepted without effect: {protocol.NO_EFFECT[field]}."
