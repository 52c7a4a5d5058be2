"""Parsers that split output text into reasoning, tool calls and content."""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of a tool call: index among the calls; id and name on its first piece; arguments as JSON text."""

    index: int
    id: str | None
    name: str | None
    arguments: str


class ParsedDelta(msgspec.Struct, frozen=True):
    """What a piece of text turned out to be."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class OutputParser(ABC):
    """One choice's parser. push and flush together return every character of the text once."""

    @abstractmethod
    def push(self, text: str) -> ParsedDelta:
        """Text that became certain."""

    @abstractmethod
    def flush(self) -> ParsedDelta:
        """The end. Called: once."""
