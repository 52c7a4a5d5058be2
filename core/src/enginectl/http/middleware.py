"""Pure ASGI middleware, outermost first: record, (CORS,) errors, authentication, body size."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from enginectl.errors import RequestError
from enginectl.http.errors import describe, error_response
from enginectl.http.keys import bearer_key, matching_key
from enginectl.http.record import RequestRecord, attach, new_record, record_of
from enginectl.http.stream import ClientGone

logger = logging.getLogger("enginectl.server")
access_logger = logging.getLogger("enginectl.access")

TRACE_HEADERS = ("traceparent", "tracestate")
"""Headers of the W3C trace context."""

_DRAIN_BYTES = 64 * 1024 * 1024
_DRAIN_S = 10.0


class RecordRequests:
    """Gives each request its record and `X-Request-Id`, and writes its line to the access log."""

    def __init__(self, app: ASGIApp, *, log: bool) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = new_record(headers.get("x-request-id"))
        if "traceparent" in headers:
            record.trace_headers = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        attach(scope, record)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._log:
                access_logger.info(access_line(scope, record))


def access_line(scope: Scope, record: RequestRecord) -> str:
    """One line about a request: identity, outcome, counts and times; never contents, keys or queries."""
    parts = [
        f"request_id={record.request_id}",
        f"method={quote(scope['method'])}",
        f"path={quote(scope['path'], errors='replace')}",
        f"status={record.status}",
    ]
    if record.prompt_tokens is not None:
        parts.append(f"prompt_tokens={record.prompt_tokens}")
    if record.completion_tokens is not None:
        parts.append(f"completion_tokens={record.completion_tokens}")
    if record.first_token_s is not None:
        parts.append(f"ttft_ms={1000 * (record.first_token_s - record.started_s):.1f}")
    parts.append(f"total_ms={1000 * (time.monotonic() - record.started_s):.1f}")
    if record.client_gone:
        parts.append("client=gone")
    return " ".join(parts)


class AnswerErrors:
    """Turns every exception into an error body. One that comes after the answer began closes the connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def note_start(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, note_start)
        except (ClientGone, ClientDisconnect):
            record_of(scope).client_gone = True
        except Exception as exc:
            if describe(exc).unexpected:
                logger.exception("request %s failed", record_of(scope).request_id)
            if started:
                raise
            await error_response(exc)(scope, receive, send)


class RequireKey:
    """Asks for a key on every route but the open ones. The admin key opens ordinary routes as well.

    open_paths: exact paths below root_path that need none. CORS preflights are answered before they come here.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], admin_key: str | None, open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = tuple(keys)
        self._admin_key = admin_key
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not self._keys or _route_path(scope) in self._open_paths:
            await self._app(scope, receive, send)
            return
        tenant = self._tenant(Headers(scope=scope))
        if tenant is not None:
            record_of(scope).tenant = tenant
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "an API key is needed"})
        else:
            raise RequestError(
                "missing or wrong API key; send it as `Authorization: Bearer KEY`", code="invalid_api_key", status=401
            )

    def _tenant(self, headers: Headers) -> str | None:
        key = bearer_key(headers)
        if key is None:
            return None
        place = matching_key(key, self._keys)
        if place is not None:
            return f"key-{place}"
        if self._admin_key is not None and matching_key(key, (self._admin_key,)) is not None:
            return "admin"
        return None


def _route_path(scope: Scope) -> str:
    """The path as routes see it: without the root path."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


class LimitBody:
    """Refuses bodies over a size with 413, counting what really arrives.

    The rest of a refused body is read and dropped, within bounds, so that the client gets to see the answer.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_bytes:
            raise await self._too_large(receive)
        num_bytes = 0

        async def count() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise await self._too_large(receive, more=message.get("more_body", False))
            return message

        await self._app(scope, count, send)

    async def _too_large(self, receive: Receive, *, more: bool = True) -> RequestError:
        if more:
            await _drop_body(receive)
        return RequestError(
            f"the body is larger than {self._max_bytes} bytes, the limit of this server",
            code="request_too_large",
            status=413,
        )


async def _drop_body(receive: Receive) -> None:
    dropped = 0
    try:
        async with asyncio.timeout(_DRAIN_S):
            while dropped < _DRAIN_BYTES:
                message = await receive()
                dropped += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
