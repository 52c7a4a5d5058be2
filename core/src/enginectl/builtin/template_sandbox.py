"""The Jinja environments chat templates run in.

Every template runs in Jinja's immutable sandbox. One that came with a request also runs under a budget: it may take a
bounded number of steps and make bounded strings. That keeps an accident or a crude attack from stalling the server;
it is no replacement for deciding who may send templates.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 100_000
"""Loop iterations and calls one rendering of a request's template may make."""

MAX_CHARS = 4 * 1024 * 1024
"""Longest text such a rendering may make, in characters."""

MAX_SOURCE_CHARS = 128 * 1024
"""Longest template a request may bring, in characters."""

MAX_WIDTH = 1000
BUDGET = "__budget"
WIDE_FORMAT = re.compile(r"\d{4,}|\*")


class Generation(Extension):
    """`{% generation %}` marks the assistant's part for training masks; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads a plain class attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateNamespace(Namespace):
    """A namespace whose attributes cannot shadow Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        for name in dict(*rest, **kwargs):
            _check_name(name)
        Namespace.__init__(self, *rest, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace attribute may not begin with an underscore: {name!r}")


def raise_exception(message: object) -> None:
    """What templates call to refuse a conversation."""
    raise jinja2.TemplateError(str(message))


def strftime_now(format: str) -> str:
    """The local time, as templates put it into system prompts."""
    return datetime.now().strftime(format)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: no HTML escapes, characters as they are."""
    if isinstance(indent, int) and indent > MAX_WIDTH:
        raise BudgetError(f"tojson: indent is at most {MAX_WIDTH}, found {indent}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict(...)` without the class behind it."""
    return dict(*args, **kwargs)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The dialect of Hugging Face chat templates."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        self.filters["tojson"] = tojson
        del self.globals["lipsum"]
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now
        self.globals["dict"] = make_dict
        self.globals["namespace"] = TemplateNamespace

    def compiled(self, source: str) -> jinja2.Template:
        """Raises jinja2.TemplateSyntaxError."""
        return self.from_string(source)

    def rendered(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """The text."""
        return template.render(variables)

    def is_over_budget(self, error: Exception) -> bool:
        """Whether rendering ended because the template may do no more."""
        return isinstance(error, BudgetError)


class BudgetError(SecurityError):
    """A request's template does more than it may."""


class Budget:
    """Steps one rendering has left."""

    __slots__ = ("num_steps_left",)

    def __init__(self) -> None:
        self.num_steps_left = MAX_STEPS

    def step(self) -> None:
        """Take one."""
        self.num_steps_left -= 1
        if self.num_steps_left < 0:
            raise BudgetError(f"the template takes more than {MAX_STEPS} steps")


class GuardedEnvironment(TemplateEnvironment):
    """For templates from requests: counts loop iterations and calls, and bounds what strings can grow to."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self) -> None:
        super().__init__()
        for name in ("center", "format", "wordwrap", "batch", "slice", "indent"):
            del self.filters[name]
        self.filters["replace"] = _replace
        self.filters["join"] = _join

    def compiled(self, source: str) -> jinja2.Template:
        if len(source) > MAX_SOURCE_CHARS:
            raise BudgetError(f"the template has {len(source)} characters, allowed are {MAX_SOURCE_CHARS}")
        tree = _Counted().visit(self.parse(source))
        tree.set_environment(self)
        return self.from_string(tree)

    def rendered(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        parts, num_chars = [], 0
        for part in template.generate({**variables, BUDGET: Budget()}):
            num_chars += _fits(len(part))
            _fits(num_chars)
            parts.append(part)
        return "".join(parts)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __context.parent[BUDGET].step()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        if isinstance(method, BuiltinMethodType) and isinstance(method.__self__, str):
            _check_string_call(method.__self__, method.__name__, (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise BudgetError("a template in a request may not use **")
        if operator == "*":
            _fits(_size(left) * _size(right))
        elif operator == "+":
            _fits(_length(left) + _length(right))
        elif isinstance(left, str):
            _check_string_call(left, "format", right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def loop_step(self) -> str:
        """Called at the start of each iteration; `call` counts it."""
        return ""

    def joined(self, *values: Any) -> str:
        """The `~` operator."""
        _fits(sum(_length(value) for value in values))
        return "".join([str(value) for value in values])


class _Counted(NodeTransformer):
    """Makes loops and concatenations call the environment, where they are counted."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_environment_call("loop_step", [], node.lineno), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _environment_call("joined", node.nodes, node.lineno)


def _environment_call(name: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name, lineno=lineno), args, [], None, None, lineno=lineno)


def _fits(num_chars: int) -> int:
    if num_chars > MAX_CHARS:
        raise BudgetError(f"the template makes a text of more than {MAX_CHARS} characters")
    return num_chars


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 20


def _size(value: Any) -> int:
    return max(1, abs(value)) if isinstance(value, int) else max(1, _length(value))


def _check_string_call(text: str, name: str, args: tuple[Any, ...]) -> None:
    """Refuse calls whose result may be far larger than what goes in."""
    if name in ("format", "format_map") and WIDE_FORMAT.search(text):
        raise BudgetError(f"the format string {text[:40]!r} is too wide")
    if name in ("replace", "join", "translate"):
        _fits((len(text) + 1) * max([1, *(_total(arg) for arg in args)]))
    elif any(isinstance(arg, int) and arg > MAX_WIDTH for arg in args):
        raise BudgetError(f"numbers given to string methods are at most {MAX_WIDTH} in a request's template")


def _total(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(_length(item) + 1 for item in value)
    return _length(value)


def _replace(text: object, old: str, new: str) -> str:
    source = str(text)
    _check_string_call(source, "replace", (new,))
    return source.replace(old, new)


def _join(values: Any, separator: str = "", attribute: str | None = None) -> str:
    items = [str(value if attribute is None else value[attribute]) for value in values]
    _fits(sum(len(item) + len(separator) for item in items))
    return separator.join(items)
