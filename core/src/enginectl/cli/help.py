"""`--help` as plain text: sections of flags, none of which is cut short however narrow the terminal is."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

_KIND = re.compile(r" <(\w+)[^>]*>")
_WORDS = {"int": "INTEGER", "float": "NUMBER"}


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
                formatter.write_dl([(_KIND.sub(_in_words, name), text) for name, text in records])


def _in_words(kind: re.Match[str]) -> str:
    """What typer shows of a type, `<int range>`, as the other flags have it; nothing for an argument, which has a name."""
    if kind.string[0] != "-":
        return ""
    return f" {_WORDS.get(kind[1], 'TEXT')}"
