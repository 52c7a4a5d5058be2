"""Streamed completions as server-sent events. What is the same in every event of a stream is encoded once."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from enginectl.builtin.openai.generation import Job, run
from enginectl.engine.client import EngineClient
from enginectl.http.errors import describe
from enginectl.http.stream import DONE
from enginectl.types import OutputChunk

logger = logging.getLogger("enginectl.server")

Extras = dict[str, Any]
"""JSON members to add to one event."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How chunks of one API look.

    kind: the `object` member. open, close: JSON around the text. first: the event before a choice's first chunk:
    (text or JSON of the text's member, members of the choice, members of the chunk), or None for no such event.
    logprobs: the value of `logprobs` for a chunk, or None when the request wants none.
    """

    kind: str
    open: bytes
    close: bytes
    first: Callable[[int, OutputChunk], tuple[bytes, Extras, Extras] | None]
    logprobs: Callable[[int, OutputChunk], object] | None
    token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


class EventWriter:
    """Writes the events of one job."""

    def __init__(self, job: Job, shape: Shape) -> None:
        self._job = job
        self._shape = shape
        self._encode = msgspec.json.Encoder().encode
        head = {"id": job.id, "object": shape.kind, "created": job.created, "model": job.model}
        self._head = b"data: " + self._encode(head)[:-1] + b',"choices":['
        self._opens = [b'%s{"index":%d,%s' % (self._head, index, shape.open) for index in range(job.num_choices)]
        self._begun = [False] * job.num_choices
        self._tail = b',"usage":null}\n\n' if shape.include_usage else b"}\n\n"
        self._plain_close = shape.close + b',"logprobs":null,"finish_reason":null}]' + self._tail
        self._is_plain = shape.logprobs is None and not shape.token_ids and not shape.continuous_usage

    def events(self, place: int, chunks: list[OutputChunk]) -> bytes:
        """The events for new chunks of one prompt; may be empty while text is held back."""
        parts: list[bytes] = []
        for chunk in chunks:
            index = place * self._job.n + chunk.index
            if not self._begun[index]:
                self._begun[index] = True
                parts.append(self._first(index, chunk))
            if self._is_plain and chunk.finish_reason is None:
                if chunk.text:
                    parts += (self._opens[index], self._encode(chunk.text), self._plain_close)
            elif chunk.finish_reason is not None or chunk.text or chunk.token_ids:
                parts.append(self._full(index, chunk))
        return b"".join(parts)

    def _first(self, index: int, chunk: OutputChunk) -> bytes:
        first = self._shape.first(index, chunk)
        if first is None:
            return b""
        value, of_choice, of_chunk = first
        members = {"logprobs": None, "finish_reason": None, **of_choice}
        close = self._shape.close + b"," + self._members(members) + b"}]"
        if of_chunk:
            close += b"," + self._members(of_chunk)
        return self._opens[index] + value + close + self._usage_tail()

    def _full(self, index: int, chunk: OutputChunk) -> bytes:
        shape = self._shape
        members: Extras = {
            "logprobs": shape.logprobs(index, chunk) if shape.logprobs is not None else None,
            "finish_reason": chunk.finish_reason,
        }
        if chunk.finish_reason is not None:
            members["stop_reason"] = chunk.stop_reason
        if shape.token_ids:
            members["token_ids"] = chunk.token_ids
        close = shape.close + b"," + self._members(members) + b"}]"
        return self._opens[index] + self._encode(chunk.text) + close + self._usage_tail()

    def _members(self, members: Extras) -> bytes:
        return self._encode(members)[1:-1]

    def _usage_tail(self) -> bytes:
        if not self._shape.continuous_usage:
            return self._tail
        return b',"usage":' + self._encode(self._job.usage()) + b"}\n\n"

    def end(self) -> bytes:
        """Usage, if wanted, and the end of the stream."""
        if not self._shape.include_usage:
            return DONE
        return self._head + b'],"usage":' + self._encode(self._job.usage()) + b"}\n\n" + DONE


async def event_frames(client: EngineClient, job: Job, shape: Shape) -> AsyncGenerator[bytes, None]:
    """Frames of a stream. An error before the first is raised; after it, an error event ends the stream."""
    writer = EventWriter(job, shape)
    started = False
    try:
        async with aclosing(run(client, job)) as source:
            async for place, chunks in source:
                if frame := writer.events(place, chunks):
                    started = True
                    yield frame
    except Exception as exc:
        if not started:
            raise
        error = describe(exc)
        if error.unexpected:
            logger.exception("request %s failed while streaming", job.id)
        yield b"data: " + msgspec.json.encode(error.body) + b"\n\n"
    else:
        yield writer.end()
