"""What both clients share: admission on the API side, tickets, and the asynchronous stream of chunks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

from enginectl.config import EngineConfig
from enginectl.engine.audience import Audience
from enginectl.engine.client import EngineClient, EngineState
from enginectl.engine.messages import Abort, Control, Reply, Submit, ToEngine
from enginectl.engine.news import News
from enginectl.engine.router import OutputRouter, Ticket
from enginectl.engine.validate import validate_request
from enginectl.errors import DeadlineError, EngineDeadError, OverloadedError, RequestError
from enginectl.interfaces.observer import Observer
from enginectl.plugins import PluginHost
from enginectl.types import EngineStats, GenerateRequest, OutputChunk, StepOutputs

log = logging.getLogger("enginectl.client")

_POLL_S = 0.02
_LATE_S = 1.0
"""The engine ends what has run out of time itself, between steps; so much later, this side does it."""
_ABORT_S = 1.0
"""How long an engine may take to answer aborts at shutdown: a step, on a slow machine."""


class RoutedClient(EngineClient):
    """Everything but the transport. Subclasses send messages and call `_on_outputs` and `_on_reply` on the loop."""

    def __init__(self, config: EngineConfig, host: PluginHost, observers: Sequence[Observer] = ()) -> None:
        self.config = config
        self.host = host
        self._audience = Audience(host, observers)
        self.router: OutputRouter | None = None
        self._stats = EngineStats()
        self._state = EngineState.STARTING
        self._reason = "the engine is starting"
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._control_ids = itertools.count(1)
        self._adapters: dict[str, str | None] = {}
        self._is_draining = False

    @abstractmethod
    def _send(self, message: ToEngine) -> None:
        """Hand a message to the engine; never blocks. Raises EngineDeadError if there is none."""

    # -- EngineClient --------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """What the engine does now."""
        return self._state

    @property
    def reason(self) -> str:
        """Why the state is not RUNNING."""
        return self._reason

    def stats(self) -> EngineStats:
        """The newest the engine sent."""
        return self._stats

    def open_adapters(self) -> tuple[frozenset[str], frozenset[str]]:
        """See `EngineClient.open_adapters`."""
        return self.router.open_adapters() if self.router is not None else (frozenset(), frozenset())

    async def generate(self, request: GenerateRequest) -> AsyncIterator[list[OutputChunk]]:
        """See `EngineClient.generate`."""
        news = News()
        ticket = self._open(request, news.announce)
        try:
            while True:
                while not ticket.pending and ticket.failure is None and not ticket.is_done:
                    await (news.next() if request.timeout_s is None else _until_late(news.next(), ticket))
                if ticket.failure is not None:
                    raise ticket.failure
                if ticket.pending:
                    yield ticket.take()
                else:
                    return
        finally:
            self._close(ticket)

    async def abort(self, request_id: str) -> None:
        """End a request; its choices finish with reason `abort`."""
        ticket = self.router.tickets.get(request_id) if self.router is not None else None
        if ticket is not None:
            with contextlib.suppress(EngineDeadError):
                self._send(Abort(list(ticket.keys)))

    async def control(self, name: str, arguments: dict[str, Any] | None = None) -> Any:
        """Ask the engine and wait for its answer."""
        arguments = arguments or {}
        number = next(self._control_ids)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Control(number, name, arguments))
            value = await reply
        finally:
            self._replies.pop(number, None)
        if name == "load_adapter":
            self._adapters[arguments["name"]] = arguments["path"]
        elif name == "unload_adapter":
            self._adapters[arguments["name"]] = None
        return value

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, wait for running ones, abort the rest."""
        self._is_draining = True
        if self._state is EngineState.RUNNING:
            self._set_state(EngineState.DRAINING, "the server is shutting down")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        await self._until_idle(deadline)
        if self.router is None or not self.router.num_open:
            return
        keys = [key for ticket in self.router.tickets.values() for key in ticket.keys]
        with contextlib.suppress(EngineDeadError):
            self._send(Abort(keys))
        await self._until_idle(loop.time() + _ABORT_S)
        if self.router.num_open:
            self._set_state(EngineState.DEAD, "the engine does not answer")
            self._fail_open("the engine does not answer, and the server is shutting down")

    async def _until_idle(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        while self.router is not None and self.router.num_open and loop.time() < deadline:
            await asyncio.sleep(_POLL_S)

    # -- for subclasses ------------------------------------------------------------------------------------------

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Adapters a request may name: those of the start and those loaded since, less those unloaded since."""
        changed = self._adapters
        names = dict.fromkeys((*self.info.adapters, *changed))
        return tuple(name for name in names if name not in changed or changed[name] is not None)

    def _set_state(self, state: EngineState, reason: str = "") -> None:
        self._state, self._reason = state, reason

    def _open(self, request: GenerateRequest, wake: Any) -> Ticket:
        router = self._check_open(request)
        self.host.hook.enginectl_request_admitted(request=request)
        ticket, specs = router.open(request, wake)
        try:
            self._send(Submit(specs))
        except BaseException:
            router.close(ticket)
            raise
        return ticket

    def _check_open(self, request: GenerateRequest) -> OutputRouter:
        router = self.router
        if self._is_draining:
            raise OverloadedError("the server is shutting down; send the request elsewhere", retry_after_s=30)
        if self._state is not EngineState.RUNNING or router is None:
            raise EngineDeadError(f"the engine is {self._state.value}: {self._reason}; send the request again later")
        validate_request(request, self.info, max_logprobs=self.config.max_logprobs, adapters=self.adapter_names)
        if request.request_id in router.tickets:
            raise RequestError(f"request_id {request.request_id!r} is in use by a running request", param="request_id")
        most = self.info.max_num_seqs + self.config.max_num_queued_requests
        if request.params.n > most:
            raise RequestError(f"n is {request.params.n}; this server takes at most {most} choices at once", param="n")
        waiting = router.num_open + request.params.n - self.info.max_num_seqs
        if waiting > self.config.max_num_queued_requests:
            raise OverloadedError(
                f"open choices: {router.num_open}; {self.info.max_num_seqs} may run and "
                f"{self.config.max_num_queued_requests} wait; try again later"
            )
        limit = self.config.max_num_queued_tokens
        if limit is not None:
            queued, more = router.num_queued_tokens, len(request.prompt_token_ids) * request.params.n
            if queued and queued + more > limit:
                raise OverloadedError(
                    f"{queued} prompt tokens wait and this request has {more}, at most {limit} may wait; try again later"
                )
        return router

    def _close(self, ticket: Ticket) -> None:
        router = self.router
        if router is None:
            return
        keys = router.close(ticket)
        if keys:
            with contextlib.suppress(EngineDeadError):
                self._send(Abort(keys))

    def _on_outputs(self, outputs: StepOutputs) -> None:
        assert self.router is not None, "the engine is ready"
        if outputs.stats is not None:
            self._stats = outputs.stats
            self._audience.stats(outputs.stats)
        stopped = self.router.dispatch(outputs)
        if stopped:
            with contextlib.suppress(EngineDeadError):
                self._send(Abort(stopped))

    def _on_reply(self, reply: Reply) -> None:
        future = self._replies.get(reply.id)
        if future is None or future.done():
            return
        if reply.error is None:
            future.set_result(reply.value)
        else:
            future.set_exception(RequestError(reply.error, param=reply.param))

    def _fail_open(self, message: str) -> None:
        """The engine is gone: end what is open."""
        if self.router is not None:
            self.router.fail_all(EngineDeadError(message))
        for future in self._replies.values():
            if not future.done():
                future.set_exception(EngineDeadError(message))


async def _until_late(news: asyncio.Future[None], ticket: Ticket) -> None:
    """Wait for news. Raises DeadlineError if there is none long after the request's time was over: the step that runs
    is long (a CPU reads a large prompt), or hangs, which nobody can tell from here.
    """
    timeout_s = ticket.request.timeout_s
    assert timeout_s is not None, "called for requests with a deadline"
    try:
        async with asyncio.timeout(ticket.arrival_s + timeout_s + _LATE_S - time.monotonic()):
            await news
    except TimeoutError:
        raise DeadlineError(f"timeout of {timeout_s} s exceeded; the step that ran then has not ended yet") from None
