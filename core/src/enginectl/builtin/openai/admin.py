"""Administrative routes: they change the server, and need the admin key."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from enginectl.builtin.openai.answers import Done
from enginectl.builtin.openai.features import providers
from enginectl.builtin.openai.names import ModelNames
from enginectl.builtin.openai.protocol import LoadAdapterRequest, UnloadAdapterRequest
from enginectl.errors import NotFoundError, RequestError, unknown
from enginectl.http.body import JsonBody
from enginectl.http.errors import json_response
from enginectl.http.keys import require_admin
from enginectl.interfaces.frontend import FrontendContext


class Administration:
    """The routes' handlers."""

    def __init__(self, ctx: FrontendContext, names: ModelNames) -> None:
        self._ctx = ctx
        self._names = names
        self._load_body = JsonBody(LoadAdapterRequest)
        self._unload_body = JsonBody(UnloadAdapterRequest)

    async def load_adapter(self, request: Request) -> Response:
        """Load an adapter under a name."""
        require_admin(request, self._ctx.server)
        body = await self._load_body.read(request)
        self._need("adapter", "install an adapter plugin, such as enginectl-lora-sgmv, and start with --enable-lora")
        if body.lora_name in self._names.base:
            raise RequestError(f"{body.lora_name!r} is a name of the base model", param="lora_name")
        arguments = {"name": body.lora_name, "path": body.lora_path, "replace": body.load_inplace}
        await self._ctx.client.control("load_adapter", arguments)
        await self._names.refresh()
        return json_response(Done("loaded", f"adapter {body.lora_name!r} serves under that name"))

    async def unload_adapter(self, request: Request) -> Response:
        """Forget an adapter once its last request is done."""
        require_admin(request, self._ctx.server)
        body = await self._unload_body.read(request)
        self._need("adapter", "install an adapter plugin, such as enginectl-lora-sgmv, and start with --enable-lora")
        await self._names.refresh()
        if body.lora_name not in self._names.adapters:
            raise NotFoundError(unknown("adapter", body.lora_name, self._names.adapters), param="lora_name")
        await self._ctx.client.control("unload_adapter", {"name": body.lora_name})
        await self._names.refresh()
        return json_response(Done("unloaded", f"adapter {body.lora_name!r} takes no new requests"))

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget every cached prefix that no running request uses."""
        require_admin(request, self._ctx.server)
        if request.query_params:
            raise RequestError("this route takes no query parameters", param=next(iter(request.query_params)))
        self._need("prefix_index", "install a prefix-cache plugin, such as enginectl-prefix-cache")
        answer = await self._ctx.client.control("reset_prefix_cache")
        detail = "" if answer is None else msgspec.json.encode(answer, enc_hook=str).decode()
        return json_response(Done("reset", detail))

    def _need(self, role: str, what_to_do: str) -> None:
        if not providers(self._ctx.client.info, role):
            raise RequestError(f"no {role} provider serves here; {what_to_do}", code="unsupported_feature")
