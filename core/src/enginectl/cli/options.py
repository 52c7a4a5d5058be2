"""Commands that take the configuration: the flags are made from the fields of the configuration structs."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from enginectl.cli.arguments import GRAMMAR_FLAG, Arguments
from enginectl.cli.flags import ENGINE_FLAGS, METAVARS, ROLE_PANEL, SERVER_FLAGS
from enginectl.config import EngineConfig, ServerConfig
from enginectl.config_sources import ROLE_KEYS, Resolved, field_types, resolve
from enginectl.logs import LogConfig


@dataclass(frozen=True, slots=True)
class Invocation:
    """What one invocation said about the configuration."""

    flags: dict[str, Any]
    plugin_flags: dict[str, dict[str, str]]
    config_file: Path | None
    debug: bool

    def resolve(self, **defaults: Any) -> Resolved:
        """The configuration from every source. defaults: the command's own, as flags, where no flag was given."""
        flags = {**defaults, **{name: value for name, value in self.flags.items() if value not in (None, [], ())}}
        resolved = resolve(flags, plugin_flags=self.plugin_flags, config_file=self.config_file)
        if self.debug and "log_level" not in resolved.origins:
            logs = msgspec.structs.replace(resolved.logs, log_level="debug")
            return Resolved(resolved.engine, resolved.server, logs, {**resolved.origins, "log_level": "--debug"})
        return resolved


def takes_config(*, server: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command MODEL and every configuration flag; its first parameter becomes the Invocation.

    server: whether the flags of the HTTP side are among them.
    """
    panels = {**(SERVER_FLAGS if server else {}), **ENGINE_FLAGS}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _, *own = inspect.signature(function, eval_str=True).parameters.values()
        added = [*_common(), *_flags(panels), *_roles()]
        names = [parameter.name for parameter in added if parameter.name not in ("context", "config")]

        @functools.wraps(function)
        def command(**given: Any) -> Any:
            arguments = given.pop("context").obj or Arguments()
            config_file = given.pop("config")
            flags = {name: given.pop(name) for name in names}
            return function(Invocation(flags, arguments.plugin_flags, config_file, arguments.debug), **given)

        del command.__wrapped__  # typer would read the annotations of the original
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in [*added, *own]]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _common() -> Iterator[inspect.Parameter]:
    yield inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    model = typer.Argument(metavar="MODEL", show_default=False, help="Directory or file with the model.")
    yield _parameter("model", Annotated[str | None, model])
    config = typer.Option("--config", metavar="FILE", help="TOML file with the same settings.")
    yield _parameter("config", Annotated[Path | None, config])


def _flags(panels: dict[str, dict[str, str]]) -> Iterator[inspect.Parameter]:
    types = {**field_types(), "structured_outputs_config": str | None}
    defaults = _defaults()
    for panel, flags in panels.items():
        for name, help_text in flags.items():
            yield _parameter(name, _annotation(name, types[name], defaults.get(name), help_text, panel))


def _roles() -> Iterator[inspect.Parameter]:
    for role in ROLE_KEYS:
        words = role.replace("_", " ")
        option = typer.Option(
            _flag(role), metavar="NAME", help=f"Provider of the {words} role.", rich_help_panel=ROLE_PANEL
        )
        yield _parameter(role, Annotated[str | None, option])


def _annotation(name: str, kind: Any, default: Any, help_text: str, panel: str) -> Any:
    help_text += _shown(default)
    flag = GRAMMAR_FLAG if name == "structured_outputs_config" else _flag(name)
    kinds = set(typing.get_args(kind)) or {kind}
    if bool in kinds:
        option = typer.Option(f"{flag}/--no-{flag[2:]}", help=help_text, rich_help_panel=panel)
        return Annotated[bool | None, option]
    several = typing.get_origin(kind) is tuple or name == "lora_modules"
    # Text, whatever the field's type: one place converts values of every source, with one kind of message.
    option = typer.Option(
        flag,
        metavar=METAVARS.get(name, _metavar(name, kinds)),
        help=help_text,
        rich_help_panel=panel,
    )
    return Annotated[list[str] | None, option] if several else Annotated[str | None, option]


def _metavar(name: str, kinds: set[Any]) -> str:
    if name.endswith("_bytes"):
        return "SIZE"
    if int in kinds:
        return "INTEGER"
    return "NUMBER" if float in kinds else "TEXT"


def _shown(default: Any) -> str:
    """The default as help shows it, if there is something to show."""
    if default in (None, "", (), msgspec.NODEFAULT) or isinstance(default, dict):
        return ""
    if isinstance(default, bool):
        return f" Default: {'on' if default else 'off'}."
    return f" Default: {','.join(default) if isinstance(default, tuple) else default}."


def _defaults() -> dict[str, Any]:
    structs: tuple[type[msgspec.Struct], ...] = (EngineConfig, ServerConfig, LogConfig)
    return {f.name: f.default for struct in structs for f in msgspec.structs.fields(struct)}


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
