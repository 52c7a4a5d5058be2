"""`--help` as plain text: sections of flags, none of which is cut short however narrow the terminal is."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class SectionedCommand(TyperCommand):
    """A command whose flags are shown by panel. The help of a long flag starts on a line of its own."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write each panel as a section, in the order of its first flag."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                plain = "Arguments" if param.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(param, "rich_help_panel", None) or plain, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)
