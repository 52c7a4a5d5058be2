"""Chat messages as templates expect them: known roles, text content, arguments of past tool calls as objects."""

from __future__ import annotations

from typing import Any

import msgspec

from enginectl.errors import RequestError, nearest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles a message may have. `developer` reaches the template as `system`, which is what OpenAI means by it."""

_TEXT_PARTS = ("text", "input_text", "output_text")

Message = dict[str, Any]


def prepare_messages(messages: list[Message]) -> list[Message]:
    """Copies of the messages that a chat template can render. Fields we do not know go to the template as they are.

    Raises RequestError naming the message for a wrong role or content that is not text.
    """
    return [_prepare(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _prepare(message: Message, where: str) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        hint = nearest(role, ROLES) if isinstance(role, str) else ""
        found = repr(role)[:100] if "role" in message else "none"
        raise RequestError(f"{where}.role is {found}{hint or ';'} allowed: {', '.join(ROLES)}", param=f"{where}.role")
    prepared = {**message, "role": "system" if role == "developer" else role}
    if message.get("tool_calls") is not None:
        prepared["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    prepared["content"] = _text(
        message.get("content"), f"{where}.content", may_be_empty=bool(message.get("tool_calls"))
    )
    return prepared


def _text(content: object, where: str, *, may_be_empty: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_empty:
        return ""
    if isinstance(content, list) and content:
        return "\n".join(_part(part, f"{where}[{place}]") for place, part in enumerate(content))
    raise RequestError(f"{where}: expected a string or a list of text parts, got {_kind(content)}", param=where)


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        raise RequestError(f"{where}: this model reads text only, found {repr(kind)[:100]}", param=f"{where}.type")
    assert isinstance(part, dict), "only a dict has a kind"
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text: expected a string, got {_kind(text)}", param=f"{where}.text")
    return text


def _tool_calls(calls: object, where: str) -> list[Message]:
    if not isinstance(calls, list):
        raise RequestError(f"{where}: expected a list, got {_kind(calls)}", param=where)
    return [_tool_call(call, f"{where}[{place}]") for place, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}: expected an object with function.name", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments.encode() or b"{}")
        except (msgspec.DecodeError, RecursionError):
            raise RequestError(
                f"{where}.function.arguments: expected JSON text", param=f"{where}.function.arguments"
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}


def _kind(value: object) -> str:
    names = {type(None): "null", dict: "object", list: "array", str: "str", bool: "bool", int: "int", float: "float"}
    return names.get(type(value), type(value).__name__)
