"""Reading contracts out of the source, and writing them as Markdown. Used by gen_reference.py."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_NEW_LINE = re.compile(r"^(?:Called|Keeps|Source|Raises|Returns)\b|^[a-z_]+(?:, [a-z_]+)*: ")


# -- reading the source ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Field:
    """An annotated class attribute. default: its source text, None if there is none. note: the string below it."""

    name: str
    kind: str
    default: str | None
    note: str


def classes(path: Path) -> dict[str, ast.ClassDef]:
    """Public classes of a module, in order."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}


def fields(node: ast.ClassDef) -> list[Field]:
    """Annotated attributes of a class body."""
    found: list[Field] = []
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            default = None if item.value is None else ast.unparse(item.value)
            found.append(Field(item.target.id, ast.unparse(item.annotation), default, _string(after)))
    return found


def methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Public methods, and `__len__`, which is a contract too."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and (not item.name.startswith("_") or item.name == "__len__"):
            yield item


def signature(function: ast.FunctionDef, name: str | None = None) -> str:
    """`name(arguments) -> type`, without self."""
    arguments = ast.unparse(function.args).removeprefix("self, ").removeprefix("self")
    returns = "" if function.returns is None else f" -> {ast.unparse(function.returns)}"
    if any(isinstance(d, ast.Name) and d.id == "property" for d in function.decorator_list):
        return f"{name or function.name}{returns.replace(' -> ', ': ')}"
    return f"{name or function.name}({arguments}){returns}"


def doc(node: ast.ClassDef | ast.FunctionDef | ast.Module) -> str:
    """The docstring, or an empty string."""
    return ast.get_docstring(node) or ""


def describe(text: str, names: Iterable[str]) -> dict[str, str]:
    """What a docstring of the form `Summary. a: what. b, c: what.` says about each of these names."""
    known = set(names)
    flat = " ".join(inspect.cleandoc(text).split())
    starts: list[tuple[int, int, list[str]]] = []
    for match in re.finditer(r"(?:^|(?<=[.:] ))((?:[a-z_*]+, )*[a-z_*]+)(?: …)?: ", flat):
        mentioned = [name for pattern in match[1].split(", ") for name in _matching(pattern, known)]
        if mentioned:
            starts.append((match.start(1), match.end(), mentioned))
    found: dict[str, str] = {}
    for (_, start, mentioned), (end, _, _) in itertools.pairwise([*starts, (len(flat), 0, [])]):
        found |= dict.fromkeys(mentioned, flat[start:end].strip())
    return found


def _matching(pattern: str, known: set[str]) -> list[str]:
    if pattern.endswith("*"):
        return [name for name in known if name.startswith(pattern[:-1])]
    return [pattern] if pattern in known else []


def _string(node: ast.stmt | None) -> str:
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


# -- Markdown ----------------------------------------------------------------------------------------------------------


def prose(text: str) -> str:
    """A docstring as paragraphs: what says when, what and why begins a line of its own."""
    lines: list[str] = []
    for line in inspect.cleandoc(text).splitlines():
        if lines and lines[-1] and _NEW_LINE.match(line):
            lines.append("")
        lines.append(line)
    return outside_code("\n".join(lines), _plain)


def cell(text: str) -> str:
    """Text for a table."""
    flat = " ".join(text.split()).replace("|", r"\|")
    return outside_code(flat, _plain)


def _plain(text: str) -> str:
    """Nothing in it is Markdown by accident; `*word*` is emphasis on purpose."""
    parts = re.split(r"(\*\w+\*)", text.replace("<", "&lt;"))
    return "".join(part if index % 2 else part.replace("*", r"\*") for index, part in enumerate(parts))


def code(text: str) -> str:
    """A code span, also inside a table."""
    return f"`{text}`".replace("|", r"\|")


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Change what is not between backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else change(part) for part in parts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def field_table(node: ast.ClassDef) -> str:
    """Name, type, default and meaning of a class's fields."""
    known = fields(node)
    meanings = describe(doc(node), (field.name for field in known))
    rows = [
        (
            code(field.name),
            code(field.kind),
            "required" if field.default is None else code(_default(field.default)),
            cell(meanings.get(field.name) or field.note),
        )
        for field in known
    ]
    return table(("name", "type", "default", "meaning"), rows)


def field_lines(node: ast.ClassDef) -> str:
    """The fields of a class as they are declared."""
    lines = [
        f"{f.name}: {f.kind}" + (f" = {_default(f.default)}" if f.default else "") + _note(f) for f in fields(node)
    ]
    return "```python\n" + "\n".join(lines) + "\n```\n"


def _note(field: Field) -> str:
    return f"  # {' '.join(field.note.split())}" if field.note else ""


def lead(node: ast.ClassDef) -> str:
    """The docstring up to the first field it describes."""
    flat = " ".join(doc(node).split())
    names = "|".join(field.name for field in fields(node))
    return re.split(rf"(?:^|(?<=[.:] ))(?:{names})(?:, [a-z_]+)*: ", flat)[0].strip()


def _default(text: str) -> str:
    made = re.fullmatch(r"field\(default_factory=(\w+)\)", text)
    return f"{made[1]}()" if made else text
