"""`enginectl plugins`: what is registered and by whom. Nothing is imported but registrations; nothing is evaluated."""

from __future__ import annotations

from typing import Annotated

import typer

COLUMNS = ("role", "name", "plugin", "distribution", "version", "state", "error")


def plugins_command(
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
    role: Annotated[str | None, typer.Option("--role", metavar="ROLE", help="Only this role.")] = None,
) -> None:
    """List the installed plugins: role, name, distribution, version, state and error.

    `enginectl doctor` says which of them can serve on this machine.
    """
    from enginectl.cli.startup import discover_quietly
    from enginectl.cli.tables import print_json, print_table
    from enginectl.errors import UsageError, unknown
    from enginectl.provider import Role

    wanted = role.replace("-", "_") if role else None
    roles = [known.value for known in Role]
    if wanted is not None and wanted not in roles:
        raise UsageError(unknown("role", wanted, roles))
    rows = [row for row in discover_quietly().describe() if wanted in (None, row["role"])]
    if as_json:
        print_json(rows)
    else:
        has_errors = any(row["error"] for row in rows)
        print_table(rows, COLUMNS if has_errors else COLUMNS[:-1])
