"""Grammars: constraints compiled off the loop, applied as masks, advanced by accepted tokens and rolled back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from enginectl.types import StructuredOutputs


class GrammarMatcher(ABC):
    """The state of one choice."""

    @abstractmethod
    def fill_mask(self, mask: NDArray[np.bool_]) -> None:
        """Set mask [vocab_size] to True where a token may come next. Called: once per position and step."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Advance; False, unchanged, if the token is not allowed."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens."""

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Whether only the end may follow."""


class GrammarBackend(ABC):
    """Compiles constraints. Thread safe: compiles run in a pool beside the loop."""

    @abstractmethod
    def refuses(self, spec: StructuredOutputs) -> str | None:
        """Why it cannot honour this constraint, or None. Called: at admission, on the API side."""

    @abstractmethod
    def compile(self, spec: StructuredOutputs) -> object:
        """The compiled constraint; may take seconds. Raises RequestError if it is contradictory or malformed."""

    @abstractmethod
    def matcher(self, compiled: object) -> GrammarMatcher:
        """A fresh state; a matter of microseconds. Called: once per choice, by the loop or where it was compiled."""
