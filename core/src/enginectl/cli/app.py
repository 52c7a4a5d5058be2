"""The commands and what runs them. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enginectl.cli.arguments import Arguments, split_arguments
from enginectl.cli.bench import bench_app
from enginectl.cli.capacity import capacity_command
from enginectl.cli.chat import chat_command
from enginectl.cli.config import config_command
from enginectl.cli.doctor import doctor_command
from enginectl.cli.errors import INTERRUPTED, report
from enginectl.cli.generate import generate_command
from enginectl.cli.help import SectionedCommand
from enginectl.cli.plugins import plugins_command
from enginectl.cli.serve import serve_command
from enginectl.cli.simulate import simulate_command

if TYPE_CHECKING:
    from enginectl.plugins import PluginHost

CONFIG_COMMANDS = frozenset({"serve", "generate", "chat", "config", "simulate"})
"""Commands whose `--plugin.option value` flags are plugin options."""


def main(given: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0, 1 for a failure, 2 for a wrong command, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if given is None else given)
    arguments = Arguments(debug="--debug" in words)
    try:
        arguments = split_arguments(words, CONFIG_COMMANDS)
        arguments.debug |= os.environ.get("ENGINECTL_DEBUG", "") not in ("", "0")
        return _run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except typer.Abort:
        return INTERRUPTED
    except Exception as error:
        return report(error, debug=arguments.debug)


def build_app() -> typer.Typer:
    """The application with core's commands."""
    app = typer.Typer(
        name="enginectl",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    command = partial(app.command, cls=SectionedCommand)
    app.callback(help="Serve language models with an engine assembled from plugins.")(_root)
    command("serve", short_help="Serve a model over the OpenAI-compatible HTTP API.")(serve_command)
    command("generate", short_help="Complete prompts without a server.")(generate_command)
    command("chat", short_help="Talk to a model.")(chat_command)
    command("plugins", short_help="List the installed plugins.")(plugins_command)
    command("doctor", short_help="Say which providers can serve on this machine.")(doctor_command)
    command("config", short_help="Print the resolved configuration.")(config_command)
    command("capacity", short_help="Say how many tokens fit in so much KV memory.")(capacity_command)
    command("simulate", short_help="Plan capacity with the real scheduler and no model.")(simulate_command)
    app.add_typer(bench_app(), name="bench")
    app.command("version")(version_command)
    return app


def _leave(version: bool) -> None:
    if version:
        version_command()
        raise typer.Exit


def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks. May stand anywhere.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_leave)
    ] = False,
) -> None:
    """Options that stand before a command; `main` has dealt with --debug."""


def version_command() -> None:
    """Print the version."""
    from enginectl import __version__

    print(f"enginectl {__version__}")


def _run(arguments: Arguments) -> int:
    app = build_app()
    core_commands = {command.name for command in app.registered_commands}
    core_commands |= {group.name for group in app.registered_groups}
    word = next((word for word in arguments.rest if not word.startswith("-")), None)
    if word not in core_commands:
        _add_plugin_commands(app)
    command = typer.main.get_command(app)
    status: Any = command.main(args=arguments.rest, prog_name="enginectl", standalone_mode=False, obj=arguments)
    return status if isinstance(status, int) else 0


def _add_plugin_commands(app: typer.Typer, host: PluginHost | None = None) -> None:
    """Let plugins add commands. One that fails is reported and the others go on; none can replace core's."""
    from enginectl.plugins import PluginHost

    core = list(app.registered_commands)
    for hook in (host or PluginHost()).hook.enginectl_commands.get_hookimpls():
        try:
            hook.function(*(app for _ in hook.argnames))
        except Exception as error:
            print(f"warning: plugin {hook.plugin_name!r} adds no commands: {error}", file=sys.stderr)
    taken = {command.name for command in core}
    added = [command for command in app.registered_commands[len(core) :] if _name(command) not in taken]
    app.registered_commands[:] = [*core, *added]


def _name(command: Any) -> str | None:
    """The name typer will give a command."""
    return command.name or (command.callback.__name__.lower().replace("_", "-") if command.callback else None)
