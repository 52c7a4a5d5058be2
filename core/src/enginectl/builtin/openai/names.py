"""The names requests may give as `model`: the base's own, and one per adapter."""

from __future__ import annotations

from typing import Any

import msgspec

from enginectl.builtin.openai.features import providers
from enginectl.config import EngineConfig, ServerConfig
from enginectl.engine.client import EngineClient
from enginectl.errors import NotFoundError, unknown
from enginectl.interfaces.adapter import AdapterInfo


def served_names(engine: EngineConfig, server: ServerConfig) -> tuple[str, ...]:
    """Names of the base; the first is the one shown."""
    return server.served_model_name or (engine.model,)


class ModelNames:
    """Resolves names. Adapters come and go at run time, by our own routes or others': a miss asks the engine."""

    def __init__(self, client: EngineClient, base: tuple[str, ...], lora_modules: dict[str, str]) -> None:
        self._client = client
        self.base = base
        self._adapters = dict.fromkeys(client.info.adapters, "") | lora_modules
        self._adapters = {name: path for name, path in self._adapters.items() if name in client.info.adapters}

    @property
    def adapters(self) -> dict[str, str]:
        """Name to path ("" if unknown), as of the last refresh."""
        return dict(self._adapters)

    async def resolve(self, name: str | None) -> str | None:
        """The adapter to use, None for the base. Raises NotFoundError for an unknown name."""
        if name is None or name in self.base:
            return None
        if name not in self._adapters:
            await self.refresh()
        if name in self._adapters:
            return name
        message = unknown("model", name[:200], (*self.base, *self._adapters))
        raise NotFoundError(message, param="model", code="model_not_found")

    async def refresh(self) -> None:
        """Ask the engine which adapters there are."""
        if not providers(self._client.info, "adapter"):
            return
        answer: Any = await self._client.control("list_adapters")
        known = msgspec.convert(answer, tuple[AdapterInfo, ...], from_attributes=True)
        self._adapters = {adapter.name: adapter.path for adapter in known}
