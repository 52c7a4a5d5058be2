"""Reads one answer as it comes: server-sent events are counted and timed, and only those that say more are decoded."""

from __future__ import annotations

from typing import Any

import msgspec

_MAX_BODY_BYTES = 1 << 20
_DATA = b"data:"
_DONE = b"[DONE]"
_TELLING = (
    b'"error"',
    *(mark % gap for mark in (b'"usage":%s{', b':%s""', b'"delta":%s{}', b'"content":%snull') for gap in (b"", b" ")),
)
"""What events hold that may not be merely text. Quotes inside of a text are escaped, so text does not look like this."""


class Answer:
    """A sink for one answer.

    times_s: when each event with text came; some servers send one without, for a token that has none yet. is_done: the
    stream was ended by the server. error: of an event that reports one. keep_events: also keep the payloads of all events.
    """

    __slots__ = (
        "body",
        "error",
        "events",
        "is_chat",
        "is_done",
        "is_stream",
        "is_unreadable",
        "output_tokens",
        "prompt_tokens",
        "rest",
        "status",
        "times_s",
    )

    def __init__(self, *, is_stream: bool = True, is_chat: bool = False, keep_events: bool = False) -> None:
        self.is_stream = is_stream
        self.is_chat = is_chat
        self.status = 0
        self.times_s: list[float] = []
        self.is_done = False
        self.is_unreadable = False
        self.error: str | None = None
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.body = b""
        self.events: list[bytes] | None = [] if keep_events else None
        self.rest = b""

    def on_status(self, status: int) -> None:
        """Part of Sink."""
        self.status = status

    def on_data(self, data: bytes, now_s: float) -> None:
        """Part of Sink."""
        if not self.is_stream or self.status != 200:
            if len(self.body) < _MAX_BODY_BYTES:
                self.body += data
            return
        lines = (self.rest + data if self.rest else data).split(b"\n")
        self.rest = lines.pop()
        for line in lines:
            if line.startswith(_DATA):
                self._on_event(line, now_s)

    def _on_event(self, line: bytes, now_s: float) -> None:
        if self.events is not None:
            self.events.append(line[len(_DATA) :].strip())
        # The first is decoded because a chat's begins with the role alone.
        if self.times_s and not any(mark in line for mark in _TELLING) and _DONE not in line[:16]:
            self.times_s.append(now_s)
            return
        payload = line[len(_DATA) :].strip()
        if payload == _DONE:
            self.is_done = True
            return
        try:
            event = msgspec.json.decode(payload)
        except msgspec.DecodeError:
            event = None
        if not isinstance(event, dict):
            self.is_unreadable = True
            return
        if event.get("error") is not None:
            self.error = message_of(event)
        self._on_usage(event.get("usage"))
        if self._has_output(event.get("choices")):
            self.times_s.append(now_s)

    def _on_usage(self, usage: Any) -> None:
        if isinstance(usage, dict):
            self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
            self.output_tokens = usage.get("completion_tokens", self.output_tokens)

    def _has_output(self, choices: Any) -> bool:
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return False
        if not self.is_chat:
            return bool(choices[0].get("text"))
        delta = choices[0].get("delta") or {}
        return any(delta.get(key) for key in ("content", "reasoning", "reasoning_content", "tool_calls"))

    def read_whole(self) -> Any:
        """The JSON of an answer that was not streamed, its usage noted; None if it is none."""
        try:
            value = msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            self.is_unreadable = True
            return None
        if isinstance(value, dict):
            self._on_usage(value.get("usage"))
        return value


def message_of(value: Any) -> str:
    """The message of an error in OpenAI's form, or in whatever form it is."""
    error = value.get("error", value) if isinstance(value, dict) else value
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:300]
