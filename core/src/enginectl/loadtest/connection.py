"""One HTTP/1.1 connection as an asyncio protocol: no streams and no copies between the socket and who reads the answer.

The client shares its cores with the server it measures, so what it costs per event counts.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from enginectl.loadtest.target import Target


class LostConnection(Exception):
    """The connection ended before the answer did. has_begun: some of the answer had come."""

    def __init__(self, message: str, *, has_begun: bool) -> None:
        super().__init__(message)
        self.has_begun = has_begun


class Sink(Protocol):
    """Takes an answer as it comes."""

    def on_status(self, status: int) -> None:
        """The status, before any data."""

    def on_data(self, data: bytes, now_s: float) -> None:
        """More of the body, and when it came."""


class Connection(asyncio.Protocol):
    """One request at a time. is_open: another may be sent. on_closed is called with it when its socket is closed."""

    def __init__(self, on_closed: Callable[[Connection], None]) -> None:
        self.is_open = False
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None
        self._now_s = 0.0
        self._has_begun = False
        self._ends_with_connection = False

    @classmethod
    async def open(cls, target: Target, on_closed: Callable[[Connection], None]) -> Connection:
        """Connect. Raises OSError."""
        context = ssl.create_default_context() if target.is_tls else None
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: cls(on_closed), target.host, target.port, ssl=context)
        return connection

    async def exchange(self, request: bytes, sink: Sink) -> None:
        """Send a request and give its answer to sink; returns when that is complete. Cancelling closes the connection.

        Raises LostConnection.
        """
        assert self._done is None, "one request at a time"
        if self._transport is None or not self.is_open:
            raise LostConnection("the server closed the connection", has_begun=False)
        self._done = asyncio.get_running_loop().create_future()
        self._sink = sink
        self._has_begun = self._ends_with_connection = False
        self._transport.write(request)
        try:
            await self._done
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._done = self._sink = None

    def close(self) -> None:
        """Close at once, whatever is unsent."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # -- called by the event loop ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """Part of asyncio.Protocol."""
        self._now_s = time.perf_counter()
        self._has_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is not HTTP: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Part of asyncio.Protocol."""
        self.is_open = False
        if self._ends_with_connection and error is None:
            self.on_message_complete()
        else:
            self._fail(str(error or "the server closed the connection"))
        self._on_closed(self)

    def _fail(self, reason: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(LostConnection(reason, has_begun=self._has_begun))

    # -- called by the parser --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """An answer begins; nothing says yet how long it is."""
        self._ends_with_connection = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """An answer without either of these ends when the connection does."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        """The status is known."""
        if self._sink is not None:
            self._sink.on_status(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        """Part of the answer, without HTTP's own framing."""
        if self._sink is not None:
            self._sink.on_data(body, self._now_s)

    def on_message_complete(self) -> None:
        """The answer is complete."""
        self._ends_with_connection = False
        self.is_open = self.is_open and self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)
