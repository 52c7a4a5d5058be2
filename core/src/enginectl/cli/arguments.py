"""The pass over the arguments before typer sees them: plugin options, flags that take several values, and the other
spellings of flags that people bring along.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from enginectl.errors import UsageError

GRAMMAR_FLAG = "--structured-outputs-config.backend"
SPECULATIVE_FLAG = "--speculative-config"
SHORT_FLAGS = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}
"""Short forms that other engines have."""

_PLUGIN_FLAG = re.compile(r"--([A-Za-z0-9][\w-]*)\.([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)


@dataclass(slots=True)
class Arguments:
    """What is left for typer, and what was taken out: plugin to its options, and whether --debug was given."""

    rest: list[str] = field(default_factory=list)
    plugin_flags: dict[str, dict[str, str]] = field(default_factory=dict)
    debug: bool = False


def split_arguments(given: Sequence[str], config_commands: Collection[str]) -> Arguments:
    """Take out --debug, and for commands that configure an engine `--plugin.option value`; repeat flags per value.

    `--max_model_len` becomes `--max-model-len`, `-tp` what it is short for, and `--speculative-config.key value` part of
    `--speculative-config`. Raises UsageError for an option given twice.
    """
    end = list(given).index("--") if "--" in given else len(given)
    words = [word for word in given[:end] if word != "--debug"]
    result = Arguments(debug=len(words) < end)
    command = next((index for index, word in enumerate(words) if not word.startswith("-")), None)
    if command is None or words[command] not in config_commands:
        result.rest = [*words, *given[end:]]
        return result
    result.rest = words[: command + 1]
    _walk(words[command + 1 :], result)
    result.rest += given[end:]
    return result


def _walk(words: Sequence[str], result: Arguments) -> None:
    # MODEL comes first or after a flag with exactly one value: `--served-model-name a MODEL` and `MODEL … a b` both work.
    model_first = bool(words) and not words[0].startswith("-")
    index, speculative = 0, Arguments()
    while index < len(words):
        word = _spelt(words[index])
        index += 1
        match = _PLUGIN_FLAG.fullmatch(word)
        if match and word.partition("=")[0] != GRAMMAR_FLAG:
            plugin, key, value = match.groups()
            if value is None:
                value, index = _value(words, index)
            _take(speculative if f"--{plugin}" == SPECULATIVE_FLAG else result, plugin, key, value)
        elif word in ("--lora-modules", "--served-model-name"):
            values = list(words[index : index + 1])
            while index + len(values) < len(words) and _continues(word, words[index + len(values)], model_first):
                values.append(words[index + len(values)])
            index += len(values)
            result.rest += [part for value in values for part in (word, value)] or [word]
        else:
            result.rest.append(word)
    for section in speculative.plugin_flags.values():
        if any(word.partition("=")[0] == SPECULATIVE_FLAG for word in result.rest):
            raise UsageError(f"{SPECULATIVE_FLAG} is given as JSON and by --speculative-config.KEY; give one of them")
        result.rest += [SPECULATIVE_FLAG, json.dumps({key: _decoded(value) for key, value in section.items()})]


def _spelt(word: str) -> str:
    """The flag in our spelling; a word that is none stays as it is."""
    flag, equals, value = word.partition("=")
    if flag.startswith("--"):
        plugin, dot, key = flag.partition(".")
        return plugin.replace("_", "-") + dot + key + equals + value
    return SHORT_FLAGS.get(flag, flag) + equals + value


def _decoded(text: str) -> Any:
    """A number, a boolean, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _continues(flag: str, word: str, model_first: bool) -> bool:
    """Whether the word is one more value of the flag."""
    if word.startswith("-"):
        return False
    return "=" in word or word.startswith(("{", "[")) if flag == "--lora-modules" else model_first


def _value(words: Sequence[str], index: int) -> tuple[str, int]:
    """The value after a plugin flag; one that is followed by another flag, or by nothing, is a switch."""
    if index < len(words) and not words[index].startswith("--"):
        return words[index], index + 1
    return "true", index


def _take(result: Arguments, plugin: str, key: str, value: str) -> None:
    section = result.plugin_flags.setdefault(plugin, {})
    if key in section:
        raise UsageError(f"--{plugin}.{key} is given twice: {section[key]!r} and {value!r}")
    section[key] = value
