"""Control messages: what operators and frontends may ask of a running engine beside generating."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class HasControls(Protocol):
    """A part that answers control messages of its own. Any object chosen for a role may have this method."""

    def controls(self) -> Mapping[str, Callable[[dict[str, Any]], Any]]:
        """Message name to handler. A handler runs on the loop between two steps: it must be quick, may raise
        RequestError, and returns what msgspec can encode. Called: once, at start-up.
        """
