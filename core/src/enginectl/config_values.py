"""One configuration value: from text, TOML or Python to the type of its field, or an error that says what is allowed."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from enginectl.errors import ConfigError

DTYPE_SYNONYMS = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
}
"""What people write for a dtype, and the name we use."""

COMMA_LISTS = frozenset({"plugins", "allowed_origins", "allowed_methods", "allowed_headers"})
"""Lists whose flags may hold several values with commas between them."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value somebody gave. where: flag, variable or file, for messages. textual: numbers are still text."""

    value: Any
    where: str
    textual: bool = False


def convert(name: str, setting: Setting, wanted: Any) -> Any:
    """The value as the type of the field `name`.

    Text may say `auto` for a value that can be left open, sizes may have a unit, lists are comma separated.
    Raises ConfigError that names the source, the field, what was found and what is allowed.
    """
    value = setting.value
    try:
        if name.endswith("_bytes") and isinstance(value, str):
            return _size(value, wanted, f"{setting.where}: {name}")
        if name == "lora_modules":
            return lora_modules(value)
        if name == "speculative_config":
            return _object(value)
        if name.endswith("dtype") and isinstance(value, str):
            return DTYPE_SYNONYMS.get(value, value)
        if setting.textual:
            value = _from_text(name, value, wanted)
        return msgspec.convert(value, wanted, strict=not setting.textual)
    except (msgspec.ValidationError, ValueError) as error:
        detail = "" if isinstance(error, msgspec.ValidationError) else f" ({error})"
        raise ConfigError(
            f"{setting.where}: {name} is {setting.value!r}{detail}; allowed: {describe(name, wanted)}"
        ) from error


def describe(name: str, wanted: Any) -> str:
    """The type of a field in words, for messages and help."""
    if name == "lora_modules":
        return "NAME=PATH, or a JSON object of names and paths"
    if name == "speculative_config":
        return 'a JSON object such as {"method": "ngram", "num_speculative_tokens": 4}'
    arguments = set(typing.get_args(wanted)) or {wanted}
    if name.endswith("_bytes"):
        words = "a size such as 4GiB, 512MiB or a number of bytes"
    elif bool in arguments:
        words = "true or false"
    elif int in arguments:
        words = "a whole number"
    elif float in arguments:
        words = "a number"
    elif typing.get_origin(wanted) is tuple:
        words = "a list of text"
    else:
        words = "text"
    return f"{words}, or auto" if type(None) in arguments and words != "text" else words


def lora_modules(value: Any) -> dict[str, str]:
    """Adapters by served name, from NAME=PATH items, JSON text, or a table. Raises ValueError."""
    if isinstance(value, Mapping):
        pairs: list[tuple[Any, Any]] = list(value.items())
    else:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise ValueError("not a table or a list")
        pairs = [pair for item in items for pair in _lora_pairs(item)]
    modules: dict[str, str] = {}
    for name, path in pairs:
        if not (isinstance(name, str) and name and isinstance(path, str) and path):
            raise ValueError("a name or a path is missing")
        if name in modules:
            raise ValueError(f"{name!r} is given twice")
        modules[name] = path
    return modules


def _lora_pairs(item: Any) -> list[tuple[Any, Any]]:
    if isinstance(item, str) and item.lstrip().startswith(("{", "[")):
        item = json.loads(item)
    if isinstance(item, list):
        return [pair for element in item for pair in _lora_pairs(element)]
    if isinstance(item, Mapping):
        if "path" not in item:
            return list(item.items())
        extra = set(item) - {"name", "path"}
        if extra:
            raise ValueError(f"unknown key {min(extra)!r}, known are name and path")
        return [(item.get("name"), item["path"])]
    parts = str(item).split(",")
    if not all("=" in part for part in parts):  # the comma belongs to a path
        parts = [str(item)]
    return [(name.strip(), path.strip()) for name, _, path in (part.partition("=") for part in parts)]


def _object(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, Mapping):
        raise ValueError("not an object")
    return {str(key).replace("-", "_"): entry for key, entry in value.items()}


def _size(text: str, wanted: Any, what: str) -> int | None:
    from enginectl.units import parse_size

    if is_optional(wanted) and text.lower() in ("auto", "none"):
        return None
    return parse_size(text, what=what)


def from_json(value: Any, kind: Any) -> Any:
    """A plugin's option that was given as text: a list is JSON or separated by commas, a table is JSON.

    Text that is neither is returned as it is: converting it says what is wrong.
    """
    kinds = _members(kind)
    is_list = not {tuple, list}.isdisjoint(kinds)
    if not isinstance(value, str) or not (is_list or any(_is_table(each) for each in kinds)):
        return value
    if is_list and not value.lstrip().startswith("["):
        return value.split(",")
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value


def wrong_option(where: str, key: str, value: Any, kind: Any, detail: str) -> str:
    """The message for a plugin's option of the wrong type. detail: what the conversion said."""
    kinds, found = _members(kind), detail.partition(" - at `")
    if any(_is_table(each) for each in kinds):
        words = 'a JSON object, such as {"name": 1}, or a table of the file'
    elif not {tuple, list}.isdisjoint(kinds):
        words = 'a list, separated by commas or as JSON, such as ["a", "b"]'
    elif choices := [each for each in kinds if not isinstance(each, type)]:
        words = ", ".join(repr(value) for each in choices for value in typing.get_args(each)) or "another value"
    else:
        words = " or ".join(sorted({describe("", each) for each in kinds - {types.NoneType}}))
    inner = found[2].rstrip("`").removeprefix("$.")
    reason = found[0][:1].lower() + found[0][1:] + (f" at {inner}" if inner != key else "")
    return f"{where}: {key} is {value!r} ({reason}); allowed: {words}"


def _members(kind: Any) -> set[Any]:
    """The plain types that a field may hold: dict for `Annotated[dict[str, int], …] | None`."""
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return _members(typing.get_args(kind)[0])
    if origin in (types.UnionType, typing.Union):
        return {member for each in typing.get_args(kind) for member in _members(each)}
    return {kind if origin is None or origin is typing.Literal else origin}


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Mapping | msgspec.Struct)


def _from_text(name: str, value: Any, wanted: Any) -> Any:
    """Text as its field's type wants it: `auto`, comma lists."""
    if typing.get_origin(wanted) is tuple:
        if isinstance(value, str):
            items = value.split(",")
        elif name in COMMA_LISTS:
            items = [part for item in value for part in item.split(",")]
        else:  # a repeated flag: a key or a name may contain a comma
            items = value
        # An empty key is an error later: it would leave the server open, where a key was meant.
        return [item.strip() for item in items if item.strip() or name == "api_key"]
    if is_optional(wanted) and isinstance(value, str) and value.lower() in ("auto", "none"):
        return None
    return value


def is_optional(wanted: Any) -> bool:
    """Whether a field may be None, which text spells `auto`."""
    return typing.get_origin(wanted) in (types.UnionType, typing.Union) and type(None) in typing.get_args(wanted)


def unknown_key(where: str, kind: str, key: str, known: Iterable[str]) -> ConfigError:
    """The error for a key nobody knows, with the nearest one. The whole list would be a page long."""
    close = difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}?" if close else "`enginectl serve --help` lists what there is"
    return ConfigError(f"{where}: unknown {kind} {key!r}; {hint}")
