"""The HTTP server: every frontend's routes behind the same middleware, and uvicorn around them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from enginectl import __version__
from enginectl.config import EngineConfig, ServerConfig
from enginectl.config_checks import check_keys
from enginectl.engine.client import EngineClient
from enginectl.errors import ConfigError, UsageError, nearest
from enginectl.http.errors import error_response, json_response
from enginectl.http.middleware import AnswerErrors, LimitBody, RecordRequests, RequireKey
from enginectl.interfaces.frontend import Frontend, FrontendContext
from enginectl.interfaces.observer import Observer

logger = logging.getLogger("enginectl.server")

OPENAPI_PATH = "/openapi.json"

_FLUSH_S = 5
_KEEP_ALIVE_S = 75
_TICK_S = 0.1
_BACKLOG = 2048


def build_app(
    client: EngineClient,
    tokenizer: Any,
    engine: EngineConfig,
    server: ServerConfig,
    frontends: Sequence[Frontend],
    observers: Sequence[Observer] = (),
    info: Mapping[str, Any] | None = None,
) -> Starlette:
    """The ASGI application that serves one engine. It has no state outside itself.

    info: what /server_info shows besides the engine's own.
    Raises ConfigError if two frontends claim one route or a server option cannot be honoured.
    """
    check_keys(server)
    ctx = FrontendContext(client, tokenizer, engine, server, observers, dict(info or {}))
    document = _openapi(frontends)

    async def openapi(request: Request) -> Response:
        return json_response(document)

    routes: list[BaseRoute] = [Route(OPENAPI_PATH, openapi, methods=["GET"])]
    owners: dict[tuple[str, str], str] = {(OPENAPI_PATH, "GET"): "the server"}
    for frontend in frontends:
        mine = frontend.routes(ctx)
        _claim(owners, mine, type(frontend).__name__)
        routes += mine
    app = Starlette(
        routes=routes,
        middleware=_middleware(server),
        exception_handlers={HTTPException: _no_such_route([path for path, _ in owners])},
    )
    app.router.redirect_slashes = False
    return app


def _middleware(server: ServerConfig) -> list[Middleware]:
    """Outermost first. CORS answers preflights before keys are asked for, and marks errors too."""
    open_paths = {"/health"} if server.metrics_need_key else {"/health", "/metrics"}
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(server.allowed_origins),
        allow_methods=list(server.allowed_methods),
        allow_headers=list(server.allowed_headers),
        allow_credentials=server.allow_credentials,
        expose_headers=["X-Request-Id"],
    )
    return [
        Middleware(RecordRequests, log=server.log_requests),
        *([cors] if server.allowed_origins else []),
        Middleware(AnswerErrors),
        Middleware(RequireKey, keys=server.api_key, admin_key=server.admin_api_key, open_paths=frozenset(open_paths)),
        Middleware(LimitBody, max_bytes=server.max_request_bytes),
    ]


def _claim(owners: dict[tuple[str, str], str], routes: Sequence[BaseRoute], owner: str) -> None:
    for route in routes:
        path = getattr(route, "path", "")
        for method in sorted(getattr(route, "methods", None) or ("*",)):
            other = owners.setdefault((path, method), owner)
            if other != owner:
                raise ConfigError(f"{owner} and {other} both serve {method} {path}; leave one of them out")


def _no_such_route(paths: Sequence[str]) -> Callable[[Request, Exception], Response]:
    def answer(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException), "registered for HTTPException only"
        path, method = request.url.path[:200], request.method
        if exc.status_code == 404 and exc.detail == "Not Found":
            hint = nearest(path, paths) or f"; {OPENAPI_PATH} lists the routes"
            exc = HTTPException(404, f"no route {method} {path!r}{hint}", exc.headers)
        elif exc.status_code == 405:
            allowed = (exc.headers or {}).get("Allow", "other methods")
            exc = HTTPException(405, f"{path!r} does not take {method}; allowed: {allowed}", exc.headers)
        return error_response(exc)

    return answer


def _openapi(frontends: Sequence[Frontend]) -> dict[str, Any]:
    itself = {"200": {"description": "success", "content": {"application/json": {"schema": {"type": "object"}}}}}
    paths: dict[str, Any] = {OPENAPI_PATH: {"get": {"summary": "This document", "responses": itself}}}
    schemas: dict[str, Any] = {}
    for frontend in frontends:
        part = frontend.openapi()
        paths |= part.get("paths", {})
        schemas |= part.get("components", {}).get("schemas", {})
    key = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "enginectl", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": key}},
        "security": [{"key": []}, {}],
    }


def bind(server: ServerConfig) -> socket.socket:
    """A socket that listens where the configuration says. Call it before the model is loaded, to fail early.

    Raises UsageError with the address and the reason.
    """
    if server.uds is not None:
        return _bind_unix(server.uds)
    family = socket.AF_INET6 if server.host and ":" in server.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((server.host, server.port))
        sock.listen(_BACKLOG)
    except (OSError, OverflowError) as exc:
        sock.close()
        reason, advice = str(exc), "choose another --host or --port"
        if isinstance(exc, OSError) and exc.errno == errno.EADDRINUSE:
            reason, advice = "another process listens there", "stop it or choose another --port"
        raise UsageError(f"cannot listen on {server.host} port {server.port}: {reason}; {advice}") from None
    sock.setblocking(False)
    return sock


def _bind_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path):
            _remove_stale_socket(path)
        sock.bind(path)
        sock.listen(_BACKLOG)
    except OSError as exc:
        sock.close()
        raise UsageError(f"cannot listen on the Unix socket {path!r}: {exc}; choose another --uds") from None
    except UsageError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _remove_stale_socket(path: str) -> None:
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise UsageError(f"{path!r} exists and is not a socket; choose another --uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise UsageError(f"another process listens on {path!r}; stop it or choose another --uds")


async def run_server(
    app: Starlette,
    client: EngineClient,
    server: ServerConfig,
    *,
    sock: socket.socket | None = None,
    on_started: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM or `stop`, then drain: /health says so, new requests get 503, running ones may finish.

    The caller owns the client and closes it afterwards. sock: from `bind`, bound here if None. on_started is told the
    address once requests are answered. A second signal ends the drain at once.
    Raises UsageError if the address or the TLS files cannot be used.
    """
    sock = sock if sock is not None else bind(server)
    try:
        http = _Server(_uvicorn_config(app, server), client, server.drain_timeout_s)
        http.on_started = lambda: on_started(_address(sock, server)) if on_started is not None else None
        http.stop = stop
        await http.serve(sockets=[sock])
    finally:
        sock.close()
        if server.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(server.uds)


def _uvicorn_config(app: Starlette, server: ServerConfig) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http="httptools",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        root_path=server.root_path,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_FLUSH_S,
        ssl_keyfile=server.ssl_keyfile,
        ssl_certfile=server.ssl_certfile,
        ssl_ca_certs=server.ssl_ca_certs,
        ssl_cert_reqs=ssl.VerifyMode[f"CERT_{server.ssl_cert_reqs.upper()}"],
        ssl_keyfile_password=server.ssl_keyfile_password,
    )
    try:
        config.load()
    except OSError as exc:
        # ssl.SSLError is an OSError.
        raise UsageError(f"the TLS files cannot be used ({exc}); check --ssl-keyfile and --ssl-certfile") from None
    return config


def _address(sock: socket.socket, server: ServerConfig) -> str:
    if server.uds is not None:
        return f"unix:{server.uds}"
    host, port = sock.getsockname()[:2]
    scheme = "https" if server.ssl_certfile is not None else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn's server, except that it drains the engine first and returns after a signal instead of raising it."""

    def __init__(self, config: uvicorn.Config, client: EngineClient, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._client = client
        self._drain_timeout_s = drain_timeout_s
        self.on_started: Callable[[], None] = lambda: None
        self.stop: asyncio.Event | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends at once, whichever they are."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        stopped = self.stop is not None and self.stop.is_set()
        return await super().on_tick(counter) or stopped

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._drain()
        await super().shutdown(sockets)

    async def _drain(self) -> None:
        """Silent when nothing runs."""
        drain = asyncio.ensure_future(self._client.drain(self._drain_timeout_s))
        await asyncio.wait({drain}, timeout=_TICK_S)
        if not drain.done():
            logger.info("draining: running requests may take %g s more", self._drain_timeout_s)
        while not drain.done() and not self.force_exit:
            await asyncio.wait({drain}, timeout=_TICK_S)
        if not drain.done():
            drain.cancel()
        for result in await asyncio.gather(drain, return_exceptions=True):
            if isinstance(result, Exception):
                logger.error("draining failed: %s", result)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signal is not raised again: the caller still has an engine to close."""
        signals = (signal.SIGINT, signal.SIGTERM)
        try:
            before = {number: signal.signal(number, self.handle_exit) for number in signals}
        except ValueError:
            # Not the main thread: whoever runs us there stops us by other means.
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
