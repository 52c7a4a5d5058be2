"""Waking one waiter on the event loop."""

from __future__ import annotations

import asyncio


class News:
    """News for one reader, who looks first and waits only if there is nothing: what is announced while nobody waits is
    not kept. Half the price of an asyncio.Event, of which a token would pay one.
    """

    __slots__ = ("_loop", "_waiting")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None

    def announce(self) -> None:
        """Wake the reader, if it waits. Called: on the event loop."""
        waiting = self._waiting
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def next(self) -> asyncio.Future[None]:
        """Await this for the next announcement."""
        self._waiting = waiting = self._loop.create_future()
        return waiting
