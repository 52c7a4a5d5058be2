"""Prompts for `enginectl generate`: from arguments, standard input or JSON lines, with sampling parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from enginectl.cli.sampling import typed_params
from enginectl.errors import UsageError

if TYPE_CHECKING:
    from enginectl.builtin.tokenizer import Tokenizer

_OWN_KEYS = ("id", "prompt", "messages")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text or a conversation to complete. sampling: values that replace the command's, by field. id: the caller's."""

    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    id: str | int | None = None
    sampling: dict[str, Any] | None = None

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """What the model reads. Raises RequestError for messages the template refuses."""
        if self.messages is None:
            return tokenizer.encode(self.text or "")
        return tokenizer.encode_chat(tokenizer.apply_chat_template(list(self.messages)))


def read_prompts(
    texts: Sequence[str], source: Path | None, *, as_chat: bool = False, system: str | None = None
) -> list[Prompt]:
    """The prompts of an invocation, in order.

    texts: from the command line. source: a file of JSON lines, `-` for standard input. Without either, standard input
    is one prompt. as_chat: a text is a user's message. system: goes before every conversation without one.
    Raises UsageError.
    """
    if texts and source is not None:
        raise UsageError("prompts are given as arguments and by --input; give one of them")
    if source is not None:
        prompts = list(parse_lines(_lines(source), str(source)))
    elif texts:
        prompts = [Prompt(text=text) for text in texts]
    elif not sys.stdin.isatty():
        prompts = [Prompt(text=_from_stdin())]
    else:
        raise UsageError("no prompts: give them after MODEL, by --input FILE, or on standard input")
    if not prompts:
        raise UsageError(f"--input {source}: no prompts in it")
    if as_chat or system is not None:
        prompts = [_as_chat(prompt, system) for prompt in prompts]
    if any(prompt.text == "" for prompt in prompts):
        raise UsageError("a prompt is empty; there is nothing to complete")
    return prompts


def _from_stdin() -> str:
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise UsageError(
            "no prompts: standard input is empty; give them after MODEL, by --input FILE, or write one there"
        )
    return text


def parse_lines(lines: Iterable[str], where: str) -> Iterator[Prompt]:
    """Prompts from JSON lines: {"prompt": text} or {"messages": […]}, and optionally an id and sampling parameters."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{where} line {number}"
        try:
            row = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise UsageError(f"{place}: not JSON: {error}") from error
        if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
            raise UsageError(f'{place}: expected an object with either "prompt" or "messages"')
        sampling = {key: value for key, value in row.items() if key not in _OWN_KEYS}
        typed_params(sampling, place)
        yield Prompt(_prompt_text(row, place), _messages(row, place), _id(row, place), sampling)


def _prompt_text(row: dict[str, Any], place: str) -> str | None:
    text = row.get("prompt")
    if text is not None and not isinstance(text, str):
        raise UsageError(f"{place}: prompt is {text!r}; allowed: text")
    return text


def _messages(row: dict[str, Any], place: str) -> tuple[dict[str, Any], ...] | None:
    if "messages" not in row:
        return None
    messages = row["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise UsageError(f'{place}: messages must be a list of objects such as {{"role": "user", "content": "…"}}')
    return tuple(messages)


def _id(row: dict[str, Any], place: str) -> str | int | None:
    value = row.get("id")
    if value is not None and not isinstance(value, str | int):
        raise UsageError(f"{place}: id is {value!r}; allowed: text or a whole number")
    return value


def _as_chat(prompt: Prompt, system: str | None) -> Prompt:
    messages = prompt.messages or ({"role": "user", "content": prompt.text},)
    if system is not None and messages[0].get("role") != "system":
        messages = ({"role": "system", "content": system}, *messages)
    return Prompt(None, messages, prompt.id, prompt.sampling)


def _lines(source: Path) -> Iterator[str]:
    if str(source) == "-":
        yield from sys.stdin
        return
    try:
        with source.open(encoding="utf-8") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"--input {source}: cannot be read: {reason}") from error
