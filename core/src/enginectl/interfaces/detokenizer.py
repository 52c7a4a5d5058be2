"""Token ids to text, incrementally."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enginectl.types import SamplingParams


class TextStream(ABC):
    """The text of one choice as its tokens arrive. Cost per token is O(1); no character is emitted twice."""

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these tokens; "" while a character is incomplete."""

    @abstractmethod
    def flush(self) -> str:
        """What is left at the end; incomplete bytes become U+FFFD. Called: once."""


class Detokenizer(ABC):
    """Makes text streams. Built once per API process."""

    @abstractmethod
    def start(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> TextStream:
        """A stream primed with a bounded tail of the prompt; prompt text is never emitted."""
