"""`enginectl serve`: the HTTP server in front of an engine process."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from enginectl.cli.options import Invocation, takes_config

if TYPE_CHECKING:
    import socket

    from enginectl.cli.startup import Started
    from enginectl.config_sources import Resolved
    from enginectl.plugins import PluginHost

log = logging.getLogger("enginectl.serve")


@takes_config(server=True)
def serve_command(invocation: Invocation) -> None:
    """Serve a model over the OpenAI-compatible HTTP API."""
    import asyncio

    from enginectl.cli.startup import check_start
    from enginectl.logs import configure_logging

    resolved = invocation.resolve()
    configure_logging(resolved.logs)
    host = check_start(resolved)
    from enginectl.server import bind

    sock = bind(resolved.server)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve(resolved, host, sock))


async def serve(resolved: Resolved, host: PluginHost, sock: socket.socket) -> None:
    """Launch the engine, serve until a signal, and close both.

    sock: listens already, so that a taken port is found before a model is loaded.
    """
    from enginectl.cli.startup import launch_engine, log_assembly
    from enginectl.server import build_app, run_server

    with sock:
        started = await launch_engine(resolved, host, with_frontends=True)
        try:
            log_assembly(started)
            app = build_app(
                started.client,
                started.api.tokenizer,
                started.client.config,
                resolved.server,
                started.frontends,
                started.observers,
                server_info(started),
            )
            await run_server(app, started.client, resolved.server, sock=sock, on_started=_announce)
        finally:
            await started.client.close()


def server_info(started: Started) -> dict[str, Any]:
    """What /server_info shows besides the engine's own facts: who assembled what from where, and the machine."""
    from enginectl import __version__
    from enginectl.cli.doctor import machine_facts

    info = started.client.info
    return {
        "version": __version__,
        "assembled": started.table,
        "skipped": [{"role": role, "provider": name, "reason": reason} for role, name, reason in info.skipped],
        "machine": machine_facts(started.machine),
    }


def _announce(address: str) -> None:
    log.info("serving on %s", address)


def _loop_factory() -> Any:
    """uvloop's loop where there is one, else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
