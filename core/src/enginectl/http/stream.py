"""Answers that end when the client goes away: event streams, and waiting for a whole result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from enginectl.http.record import record_of

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_QUEUE_ITEMS = 64

STALL_S = 300.0
"""How long a client may leave a frame unread."""


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


@asynccontextmanager
async def until_disconnect(
    receive: Receive, is_stalled: Callable[[], bool] | None = None, *, check_s: float = 60.0
) -> AsyncIterator[None]:
    """Cancel the body when the client goes away, and raise ClientGone in its place.

    is_stalled: asked every check_s; a client that has stopped reading counts as gone.

    The request's body has been read before. Leave the context before the last message is sent: the server reports a
    disconnect after it, too.
    """
    task = asyncio.current_task()
    assert task is not None, "until_disconnect needs a running task"
    gone = False

    async def watch() -> None:
        nonlocal gone
        while True:
            try:
                async with asyncio.timeout(check_s if is_stalled is not None else None):
                    if (await receive())["type"] == "http.disconnect":
                        break
            except TimeoutError:
                if is_stalled is not None and is_stalled():
                    break
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()


class EventStream(Response):
    """Sends frames of bytes as they come, each in one message, waiting whenever the client does not read.

    The status goes out with the first frame, so that an error before it still gets a status of its own. frames is
    closed when the stream ends for whatever reason.

    A client that takes nothing for stall_s is cut off. Until then it holds no more than its own answer: the engine
    does not wait for it, what it has not read is merged, and max_tokens bounds it.
    """

    def __init__(self, frames: AsyncGenerator[bytes, None], *, stall_s: float = STALL_S) -> None:
        super().__init__()
        self._frames = frames
        self._stall_s = stall_s
        self._sending_since: float | None = None

    def _is_stalled(self) -> bool:
        since = self._sending_since
        return since is not None and time.monotonic() - since > self._stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # In a task of its own: a frame then wakes this coroutine alone, and not through the dozen around it that wait.
        await asyncio.create_task(self._stream(scope, receive, send))

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with until_disconnect(receive, self._is_stalled, check_s=self._stall_s / 4):
                async for frame in self._frames:
                    self._sending_since = time.monotonic()
                    if not started:
                        started = True
                        record_of(scope).saw_token()
                        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
                    self._sending_since = None
        finally:
            await self._frames.aclose()
        assert started, "an event stream has at least one frame"
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def close(source: AsyncIterator[object]) -> None:
    """Close an iterator early, which aborts what feeds it."""
    aclose = getattr(source, "aclose", None)
    if aclose is not None:
        await aclose()


async def merge(sources: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of several iterators as they come, with the place of the iterator.

    The first error ends all of them; so does closing this generator. Each is read only as fast as this one is.
    """
    queue: asyncio.Queue[tuple[int, T | None, BaseException | None]] = asyncio.Queue(_QUEUE_ITEMS)

    async def pump(place: int, source: AsyncIterator[T]) -> None:
        error: BaseException | None = None
        try:
            async for item in source:
                await queue.put((place, item, None))
        except Exception as exc:
            error = exc
        finally:
            await close(source)
        await queue.put((place, None, error))

    pumps = [asyncio.create_task(pump(place, source)) for place, source in enumerate(sources)]
    try:
        num_open = len(pumps)
        while num_open:
            place, item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                num_open -= 1
            else:
                yield place, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
