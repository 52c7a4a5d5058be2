"""GET /health, /version and /server_info."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from enginectl import __version__
from enginectl.builtin.openai.answers import Health, Version
from enginectl.engine.client import EngineState
from enginectl.http.errors import json_response
from enginectl.interfaces.frontend import FrontendContext


class Status:
    """The routes' handlers."""

    def __init__(self, ctx: FrontendContext) -> None:
        self._ctx = ctx

    async def health(self, request: Request) -> Response:
        """200 while the engine takes requests; else 503 and why not."""
        client = self._ctx.client
        running = client.state is EngineState.RUNNING
        headers = {"Cache-Control": "no-store"}
        return json_response(Health(client.state.value, client.reason), 200 if running else 503, headers)

    async def version(self, request: Request) -> Response:
        """The version of the enginectl distribution."""
        return json_response(Version(__version__))

    async def server_info(self, request: Request) -> Response:
        """What was assembled, and its state now: providers with their distributions and versions, capacity, counters."""
        client = self._ctx.client
        stats = client.stats()
        return json_response(
            {
                "version": __version__,
                "state": client.state.value,
                "reason": client.reason,
                **self._ctx.info,
                "engine": _public(client.info),
                "stats": _public(stats),
            }
        )


def _public(struct: object) -> dict[str, object]:
    fields: tuple[str, ...] = getattr(struct, "__struct_fields__", ())
    return {name: getattr(struct, name) for name in fields}
