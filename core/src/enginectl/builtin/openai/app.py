"""The frontend: its routes, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.routing import BaseRoute, Route

from enginectl.builtin.openai.admin import Administration
from enginectl.builtin.openai.chat import ChatCompletions
from enginectl.builtin.openai.completions import TextCompletions
from enginectl.builtin.openai.logprobs import TokenTexts
from enginectl.builtin.openai.models import Models
from enginectl.builtin.openai.names import ModelNames, served_names
from enginectl.builtin.openai.openapi import describe_routes
from enginectl.builtin.openai.prompts import Prompts
from enginectl.builtin.openai.status import Status
from enginectl.builtin.openai.tokenize import Tokenization
from enginectl.config import ServerConfig
from enginectl.errors import ConfigError
from enginectl.interfaces.frontend import Frontend, FrontendContext


class OpenAIFrontend(Frontend):
    """Chat and text completions as OpenAI defines them, and the routes that users of other engines expect beside."""

    def check(self, server: ServerConfig) -> None:
        """Raises ConfigError for parsers: no route reads what one would find."""
        _refuse_parsers(server)

    def routes(self, ctx: FrontendContext) -> Sequence[BaseRoute]:
        """Every route."""
        self.check(ctx.server)
        names = ModelNames(ctx.client, served_names(ctx.engine, ctx.server), ctx.engine.lora_modules)
        prompts = Prompts(ctx.tokenizer)
        texts = TokenTexts(ctx.tokenizer)
        chat = ChatCompletions(ctx, names, prompts, texts)
        completions = TextCompletions(ctx, names, prompts, texts)
        models = Models(ctx, names)
        tokenization = Tokenization(ctx, names, prompts)
        admin = Administration(ctx, names)
        status = Status(ctx)
        return [
            Route("/v1/chat/completions", chat.handle, methods=["POST"]),
            Route("/v1/completions", completions.handle, methods=["POST"]),
            Route("/v1/models", models.list_all, methods=["GET"]),
            Route("/v1/models/{model:path}", models.one, methods=["GET"]),
            Route("/tokenize", tokenization.tokenize, methods=["POST"]),
            Route("/detokenize", tokenization.detokenize, methods=["POST"]),
            Route("/health", status.health, methods=["GET"]),
            Route("/version", status.version, methods=["GET"]),
            Route("/server_info", status.server_info, methods=["GET"]),
            Route("/v1/load_lora_adapter", admin.load_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", admin.unload_adapter, methods=["POST"]),
            Route("/reset_prefix_cache", admin.reset_prefix_cache, methods=["POST"]),
        ]

    def openapi(self) -> dict[str, Any]:
        """Every route above."""
        return describe_routes()


def _refuse_parsers(server: ServerConfig) -> None:
    wanted = {
        "--tool-call-parser": server.tool_call_parser,
        "--enable-auto-tool-choice": server.enable_auto_tool_choice or None,
        "--reasoning-parser": server.reasoning_parser,
    }
    for flag, value in wanted.items():
        if value is not None:
            shown = flag if value is True else f"{flag} {value}"
            raise ConfigError(
                f"{shown}: the frontend 'openai' does not turn what a model writes into tool calls or reasoning yet; leave "
                "the option out"
            )
