"""What the command line says when something is wrong: one message on standard error and an exit status."""

from __future__ import annotations

import sys
import traceback
from typing import Any

from enginectl.errors import EnginectlError, nearest

FAILURE = 1
USAGE = 2
INTERRUPTED = 130


def report(error: BaseException, *, debug: bool) -> int:
    """Print the message for an error and return the exit status. debug: print the traceback too."""
    if debug:
        traceback.print_exception(error)
    if isinstance(error, EnginectlError):
        _print(str(error))
        return error.exit_status
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
        print(error, file=sys.stderr)
        return USAGE
    if hasattr(error, "format_message"):  # typer's own, whichever click it brings
        _print(_usage_message(error))
        return int(getattr(error, "exit_code", USAGE))
    _print(f"internal error: {type(error).__name__}: {error}")
    if not debug:
        _print("run the same command with --debug for the traceback, and please report it", label="hint")
    return FAILURE


def _usage_message(error: Any) -> str:
    """The message of a wrong command line, with the nearest flag or command."""
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", None) or "enginectl"
    flag = getattr(error, "option_name", None)
    if flag is not None and "o such option" in str(error.format_message()):
        known = [name for p in context.command.params for name in (*p.opts, *p.secondary_opts)] if context else []
        return f"{command}: no such flag {flag}{nearest(flag, known) or ';'} `{command} --help` lists them"
    return f"{command}: {error.format_message()}"


def _print(message: str, label: str = "error") -> None:
    from rich.console import Console
    from rich.text import Text

    style = "bold red" if label == "error" else "bold"
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble((f"{label}: ", style), message))
