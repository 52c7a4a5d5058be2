"""Sends requests over kept-alive connections and says what became of each."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from enginectl.errors import EnginectlError
from enginectl.loadtest.answers import Answer, message_of
from enginectl.loadtest.connection import Connection, LostConnection
from enginectl.loadtest.target import Target

_OK = 200


class Outcome(msgspec.Struct, kw_only=True):
    """One request. Times are of `time.perf_counter`.

    event_s: when each event with output came. error: kind of failure, "" for none: `connect`, `timeout`,
    `disconnected`, `http STATUS`, `stream error`, `cut short` or `unreadable`. late_s: by how much the client itself
    was late to send it.
    """

    start_s: float
    end_s: float
    event_s: list[float] = []
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    detail: str = ""
    late_s: float = 0.0


class Client:
    """Connections to one server, kept for the next request. `close` it."""

    def __init__(self, target: Target, *, timeout_s: float = 600.0) -> None:
        self.target = target
        self.timeout_s = timeout_s
        self._idle: list[Connection] = []
        self._unclosed: set[Connection] = set()
        self._heads: dict[tuple[str, str], bytes] = {}

    async def close(self) -> None:
        """Close every connection, and wait until it is."""
        for connection in self._unclosed:
            connection.close()
        self._idle.clear()
        while self._unclosed:
            await asyncio.sleep(0.001)

    async def get(self, path: str) -> Any:
        """A JSON document. Raises EnginectlError."""
        answer = Answer(is_stream=False)
        outcome = await self.send("GET", path, b"", answer)
        if outcome.error:
            raise EnginectlError(f"{self.target.url}{path}: {outcome.error}: {outcome.detail}")
        value = answer.read_whole()
        if value is None:
            raise EnginectlError(f"{self.target.url}{path}: the answer is not JSON")
        return value

    async def send(self, method: str, path: str, body: bytes, answer: Answer) -> Outcome:
        """One request. Failures are in the outcome, never raised."""
        head = self._heads.get((method, path))
        if head is None:
            head = self._heads[(method, path)] = self.target.head(method, path)
        request = b"%s%d\r\n\r\n%s" % (head, len(body), body)
        outcome = Outcome(start_s=time.perf_counter(), end_s=0.0)
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._exchange(request, answer)
        except TimeoutError:
            outcome.error, outcome.detail = "timeout", f"no complete answer in {self.timeout_s:g} s"
        except LostConnection as error:
            outcome.error, outcome.detail = "disconnected", str(error)
        except OSError as error:
            outcome.error, outcome.detail = "connect", str(error)
        outcome.end_s = time.perf_counter()
        outcome.event_s = answer.times_s
        if not outcome.error:
            outcome.error, outcome.detail = _failure(answer)
        outcome.prompt_tokens = answer.prompt_tokens or 0
        outcome.output_tokens = len(answer.times_s) if answer.output_tokens is None else answer.output_tokens
        return outcome

    async def _exchange(self, request: bytes, answer: Answer) -> None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_open:
                continue
            try:
                await self._use(connection, request, answer)
                return
            except LostConnection as error:
                # The server closed an idle connection just as it was used again: it has not seen the request.
                if error.has_begun:
                    raise
        connection = await Connection.open(self.target, self._unclosed.discard)
        self._unclosed.add(connection)
        await self._use(connection, request, answer)

    async def _use(self, connection: Connection, request: bytes, answer: Answer) -> None:
        try:
            await connection.exchange(request, answer)
        finally:
            if connection.is_open:
                self._idle.append(connection)
            else:
                connection.close()


def _failure(answer: Answer) -> tuple[str, str]:
    """Kind and detail of what is wrong with a complete answer."""
    if answer.status != _OK:
        try:
            detail = message_of(msgspec.json.decode(answer.body))
        except msgspec.DecodeError:
            detail = answer.body[:300].decode(errors="replace")
        return f"http {answer.status}", detail
    if answer.error is not None:
        return "stream error", answer.error
    if answer.is_unreadable:
        return "unreadable", "an event of the stream is not a JSON object"
    if answer.is_stream and not answer.is_done:
        return "cut short", "the stream ended without [DONE]"
    return "", ""
