"""Chat messages: what OpenAI says about them. Their form for the template is the tokenizer's business."""

from __future__ import annotations

from typing import Any

from enginectl.errors import RequestError, nearest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles a message may have. `developer` reaches the template as `system`, which is what OpenAI means by it."""

Message = dict[str, Any]


def prepare_messages(messages: list[Message]) -> list[Message]:
    """Copies of the messages with known roles and a content. Other fields go to the template as they are.

    Raises RequestError naming the message.
    """
    return [_prepare(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _prepare(message: Message, where: str) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        hint = nearest(role, ROLES) if isinstance(role, str) else ""
        found = repr(role)[:100] if "role" in message else "missing"
        raise RequestError(f"{where}.role is {found}{hint or ';'} allowed: {', '.join(ROLES)}", param=f"{where}.role")
    content = message.get("content")
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls: expected a list", param=f"{where}.tool_calls")
    if not isinstance(content, str | list) and not (content is None and calls):
        raise RequestError(f"{where}.content: expected a text or a list of text parts", param=f"{where}.content")
    return {**message, "role": "system" if role == "developer" else role}


def num_chars(messages: list[Message]) -> int:
    """About how much text there is, to decide whether rendering is quick."""
    return sum(_num_chars(message.get("content")) for message in messages)


def _num_chars(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    if isinstance(content, list):
        return sum(len(part.get("text") or "") for part in content if isinstance(part, dict) and _has_text(part))
    return 0


def _has_text(part: Message) -> bool:
    return isinstance(part.get("text"), str)


def text_of(message: Message) -> str:
    """A message's text; parts are joined by newlines."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or () if isinstance(part, dict) and _has_text(part))
