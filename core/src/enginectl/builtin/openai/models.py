"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from enginectl.builtin.openai.answers import ModelCard, ModelList
from enginectl.builtin.openai.names import ModelNames
from enginectl.errors import NotFoundError, unknown
from enginectl.http.errors import json_response
from enginectl.interfaces.frontend import FrontendContext


class Models:
    """The routes' handlers."""

    def __init__(self, ctx: FrontendContext, names: ModelNames) -> None:
        self._ctx = ctx
        self._names = names
        self._created = int(time.time())

    async def list_all(self, request: Request) -> Response:
        """Every name requests may use."""
        return json_response(ModelList(data=await self._cards()))

    async def one(self, request: Request) -> Response:
        """One of them."""
        wanted = request.path_params["model"]
        cards = {card.id: card for card in await self._cards()}
        if wanted not in cards:
            raise NotFoundError(unknown("model", wanted[:200], cards), param="model", code="model_not_found")
        return json_response(cards[wanted])

    async def _cards(self) -> list[ModelCard]:
        await self._names.refresh()
        root = self._ctx.client.info.model
        cards = [self._card(name, root, None) for name in self._names.base]
        for name, path in self._names.adapters.items():
            cards.append(self._card(name, path, self._names.base[0]))
        return cards

    def _card(self, name: str, root: str, parent: str | None) -> ModelCard:
        max_model_len = self._ctx.client.info.max_model_len
        return ModelCard(id=name, created=self._created, root=root, parent=parent, max_model_len=max_model_len)
