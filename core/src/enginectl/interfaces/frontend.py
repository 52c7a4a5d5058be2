"""API frontends: routes of the HTTP server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from enginectl.config import EngineConfig, ServerConfig
    from enginectl.engine.client import EngineClient
    from enginectl.interfaces.observer import Observer


@dataclass(slots=True)
class FrontendContext:
    """What a frontend may use. tokenizer: `enginectl.builtin.tokenizer.Tokenizer`. info: what /server_info shows:
    versions, the assembled table, capacity.
    """

    client: EngineClient
    tokenizer: Any
    engine: EngineConfig
    server: ServerConfig
    observers: Sequence[Observer]
    info: dict[str, Any]


class Frontend(ABC):
    """Adds routes. All of them need the API key when one is set, /health and CORS preflights excepted."""

    @abstractmethod
    def routes(self, ctx: FrontendContext) -> Sequence[BaseRoute]:
        """Starlette routes. Called: once, when the server starts."""

    def check(self, server: ServerConfig) -> None:
        """Raise ConfigError for an option of the server that this frontend cannot honour.

        Called: once, before a model is opened.
        """

    def openapi(self) -> dict[str, Any]:
        """The `paths` (and `components`) these routes add to /openapi.json."""
        return {}
