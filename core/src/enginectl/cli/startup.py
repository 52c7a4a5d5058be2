"""Starting an engine from the command line: progress while it starts, and what it turned out to be."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from enginectl.errors import PluginError, unknown

if TYPE_CHECKING:
    from enginectl.api_side import ApiSide
    from enginectl.config import EngineConfig
    from enginectl.config_sources import Resolved
    from enginectl.context import Machine
    from enginectl.engine.client import EngineInfo
    from enginectl.engine.supervisor import EngineProcess
    from enginectl.interfaces.detokenizer import Detokenizer
    from enginectl.interfaces.frontend import Frontend
    from enginectl.interfaces.observer import Observer
    from enginectl.plugins import PluginHost

log = logging.getLogger("enginectl.startup")

SHORT_SEQUENCE = 2048
"""Tokens of a sequence people plan with, beside max_model_len."""

COLUMNS = ("role", "provider", "plugin", "distribution", "version")


@dataclass(frozen=True, slots=True)
class Started:
    """An engine that serves, and the parts on this side of it. The owner closes the client. frontends: to be mounted, if
    they were asked for.
    """

    client: EngineProcess
    api: ApiSide
    host: PluginHost
    machine: Machine
    observers: tuple[Observer, ...]
    frontends: tuple[Frontend, ...] = ()

    @property
    def table(self) -> list[dict[str, str]]:
        """The assembled providers, the engine's and this side's, as rows of COLUMNS."""
        rows = [*self.client.info.table, *self._api_rows()]
        return [dict(zip(COLUMNS, row, strict=True)) for row in rows]

    def _api_rows(self) -> list[tuple[str, str, str, str, str]]:
        from enginectl.provider import Role

        wanted = {Role.DETOKENIZER: self.client.config.roles.get(Role.DETOKENIZER.value)}
        return [
            (role.value, entry.provider.name, entry.plugin.name, entry.plugin.distribution, entry.plugin.version)
            for role in (Role.DETOKENIZER, Role.FRONTEND, Role.PARSER, Role.OBSERVER)
            for entry in self.host.select(role, self.machine, wanted.get(role)).chosen
        ]


def check_plugins(config: EngineConfig, origins: Mapping[str, str] | None = None) -> PluginHost:
    """The plugins of this configuration. Raises PluginError or ConfigError for whatever is wrong with them.

    origins: where each value came from, for messages.
    """
    from enginectl.config_aliases import check_method, check_promises
    from enginectl.plugins import PluginHost

    host = PluginHost(config.plugins, only_named=config.only_plugins)
    check_method(config, host)
    host.check_sections(config.plugin_options)
    for name in config.plugin_options:
        host.options(host.plugins[name], config.plugin_options, origins)
    host.check_choices(config.roles, config.scheduling_policy)
    check_promises(config, host)
    return host


def check_start(resolved: Resolved) -> PluginHost:
    """As `check_plugins`, and whatever else can be known to be wrong before a model is opened.

    Raises EnginectlError; imports no torch and starts nothing.
    """
    from enginectl.config_checks import check_adapter_paths, check_memory, check_tokenizer, model_path
    from enginectl.machine import detect_machine, seen_from
    from enginectl.provider import Role
    from enginectl.resolve import resolve_device

    config, server = resolved.engine, resolved.server
    host = check_plugins(config, resolved.origins)
    parsers: list[str] = []
    for flag, name in (
        ("--tool-call-parser", server.tool_call_parser),
        ("--reasoning-parser", server.reasoning_parser),
    ):
        if name is not None and name not in host.catalogue[Role.PARSER]:
            if (refused := host.refused(Role.PARSER, name)) is not None:
                raise PluginError(f"{flag}: {refused}")
            known = host.catalogue[Role.PARSER]
            hint = "Install the package that brings it, or see `enginectl plugins`"
            raise PluginError(f"{flag}: {unknown('parser', name, known, hint=hint)}")
        parsers += [name] if name is not None else []
    if server.chat_template is not None:
        from enginectl.builtin.chat_template import given_template

        given_template(server.chat_template)
    model_path(config.model)  # raises if there is none; who reads it is the engine's to say, which has torch
    check_tokenizer(config)
    check_adapter_paths(config)
    machine = detect_machine()
    check_memory(config, machine)
    machine = seen_from(machine, resolve_device(config, machine))
    _check_choices(config, host, machine)
    for name in parsers:
        host.select(Role.PARSER, machine, name)
    return host


def _check_choices(config: EngineConfig, host: PluginHost, machine: Machine) -> None:
    """Raise PluginError if a part that was chosen by name, or by its plugin's, cannot serve on this machine."""
    from enginectl.provider import Role

    chosen = {Role.SCHEDULER.value: config.scheduling_policy, **config.roles}
    for role in Role:
        wanted = chosen.get(role.value)
        host.select(role, machine, None if wanted is None or "=" in wanted else wanted)


def discover_quietly() -> PluginHost:
    """Every plugin, for commands that show failed ones in their own way: no warnings."""
    from enginectl.plugins import PluginHost

    logger = logging.getLogger("enginectl.plugins")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        return PluginHost()
    finally:
        logger.setLevel(level)


async def launch_engine(resolved: Resolved, host: PluginHost, *, with_frontends: bool = False) -> Started:
    """Start the engine process and wait until it serves. Raises EnginectlError with what stood in the way.

    host: from `check_start`, which is quick and finds most mistakes before anything is started. with_frontends: build
    them, and let them look at the server's options, first.
    """
    from enginectl.api_side import ApiSide
    from enginectl.engine.supervisor import EngineProcess
    from enginectl.machine import detect_machine
    from enginectl.provider import Role

    config, template = resolved.engine, resolved.server.chat_template
    machine = detect_machine()
    api = ApiSide(config, host, machine)

    def make_detokenizer(info: EngineInfo) -> Detokenizer:
        api.load_tokenizer(info, template)
        return api.detokenizer(info)

    observers = tuple(api.all_of(Role.OBSERVER).values())
    frontends: tuple[Frontend, ...] = tuple(api.all_of(Role.FRONTEND).values()) if with_frontends else ()
    for frontend in frontends:
        frontend.check(resolved.server)
    with start_up_status() as progress:
        client = EngineProcess(
            config, host, make_detokenizer, observers=observers, logs=resolved.logs, progress=progress
        )
        try:
            await client.start()
        except BaseException:
            await client.close()
            raise
    started = Started(client, api, host, machine, observers, frontends)
    for line in idle_options(resolved.origins, {row["plugin"] for row in started.table}):
        log.warning("%s", line)
    return started


def idle_options(origins: Mapping[str, str], serving: Collection[str]) -> Iterator[str]:
    """A line for each option of a plugin that does not serve, if a flag or a variable gave it for this very start.

    A file may have sections for plugins that serve at other times. origins: `plugins.NAME.KEY` to the source.
    """
    for name, where in origins.items():
        kind, _, rest = name.partition(".")
        plugin = rest.rpartition(".")[0]
        if kind == "plugins" and plugin and plugin not in serving and where.startswith(("--", "environment variable")):
            yield f"{where} has no effect: the plugin {plugin!r} serves nothing here; choose it, or leave the option out"


@contextmanager
def start_up_status() -> Iterator[Callable[[str], None]]:
    """A spinner with the present stage on a terminal, log lines elsewhere. Gives what takes the stages."""
    if not sys.stderr.isatty():
        yield log.info
        return
    from rich.console import Console

    with Console(stderr=True).status("starting the engine") as status:
        yield lambda stage: status.update(stage)


def log_assembly(started: Started) -> None:
    """Log the assembled table, who was skipped and why, and what the KV pool holds."""
    from enginectl.cli.tables import format_rows

    info = started.client.info
    for line in format_rows(started.table, COLUMNS):
        log.info("%s", line)
    for role, name, reason in info.skipped:
        log.info("skipped %s %s: %s", role, name, reason)
    log.info("%s, %s on %s", info.architecture, info.dtype, info.device)
    for line in capacity_lines(info):
        log.info("%s", line)


def capacity_lines(info: EngineInfo) -> list[str]:
    """KV capacity in tokens and bytes, and how many sequences of which length fit."""
    from enginectl.units import format_size, plural

    size = format_size(info.num_kv_tokens * info.kv_bytes_per_token)
    lines = [f"KV cache: {info.num_kv_tokens:,} tokens in {size}, {info.kv_bytes_per_token:,} bytes per token"]
    for length in dict.fromkeys((info.max_model_len, min(SHORT_SEQUENCE, info.max_model_len))):
        blocks = -(-length // info.block_size) * info.block_size
        num = info.num_kv_tokens // blocks
        lines.append(f"fits {num:,} {plural(num, 'sequence')} of {length:,} {plural(length, 'token')}")
    return lines
