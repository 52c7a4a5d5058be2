"""POST /tokenize and /detokenize: what the model would read, and what token ids say."""

from __future__ import annotations

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from enginectl.builtin.openai.answers import DetokenizeAnswer, TokenizeAnswer
from enginectl.builtin.openai.names import ModelNames
from enginectl.builtin.openai.prompts import Prompts, off_loop, with_text
from enginectl.builtin.openai.protocol import DetokenizeRequest, TokenizeRequest
from enginectl.errors import RequestError
from enginectl.http.body import JsonBody
from enginectl.http.errors import json_response
from enginectl.interfaces.frontend import FrontendContext

_CHAT_ONLY = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "tools",
)


class Tokenization:
    """The routes' handlers."""

    def __init__(self, ctx: FrontendContext, names: ModelNames, prompts: Prompts) -> None:
        self._ctx = ctx
        self._names = names
        self._prompts = prompts
        self._tokenize_body = JsonBody(TokenizeRequest)
        self._detokenize_body = JsonBody(DetokenizeRequest)

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt or of messages."""
        body = await self._tokenize_body.read(request)
        await self._names.resolve(body.model)
        token_ids = await self._token_ids(body)
        to_token = with_text(self._ctx.tokenizer).id_to_token
        return json_response(
            TokenizeAnswer(
                count=len(token_ids),
                max_model_len=self._ctx.client.info.max_model_len,
                tokens=token_ids,
                token_strs=[to_token(token_id) or "" for token_id in token_ids] if body.return_token_strs else UNSET,
            )
        )

    async def _token_ids(self, body: TokenizeRequest) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            found = "none" if body.prompt is None else "both"
            raise RequestError(f"send exactly one of prompt and messages; found {found}", param="prompt")
        if body.messages is not None:
            prompt, _ = await self._prompts.from_chat(body)
            return prompt.token_ids
        for name in _CHAT_ONLY:
            if getattr(body, name) is not None:
                raise RequestError(f"{name} is only allowed with messages", param=name)
        assert body.prompt is not None, "one of the two is given"
        special = True if body.add_special_tokens is None else body.add_special_tokens
        prompts = await self._prompts.from_texts([body.prompt], add_special_tokens=special)
        return prompts[0].token_ids

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        body = await self._detokenize_body.read(request)
        await self._names.resolve(body.model)
        tokenizer = with_text(self._ctx.tokenizer)
        vocab_size = tokenizer.vocab_size
        if body.tokens and max(body.tokens) >= vocab_size:
            raise RequestError(
                f"tokens has {max(body.tokens)}; the tokenizer's ids are 0 to {vocab_size - 1}", param="tokens"
            )
        text = await off_loop(4 * len(body.tokens), tokenizer.decode, body.tokens, skip_special_tokens=False)
        return json_response(DetokenizeAnswer(text))
