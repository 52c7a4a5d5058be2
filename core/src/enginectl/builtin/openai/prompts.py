"""From texts, token ids and messages to the token ids that the model reads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from enginectl.builtin.openai.messages import Message, num_chars, prepare_messages
from enginectl.builtin.openai.protocol import ChatRequest, TokenizeRequest
from enginectl.engine.client import EngineInfo
from enginectl.errors import RequestError
from enginectl.units import plural

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("enginectl.server")

INLINE_CHARS = 20_000
"""Longer texts are tokenised and rendered in a thread, so that no stream waits for them."""

RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "messages",
        "conversation",
        "add_generation_prompt",
        "continue_final_message",
        "tools",
        "documents",
        "chat_template",
        "tokenize",
        "return_dict",
        "return_tensors",
        "return_assistant_tokens_mask",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
        "processor_kwargs",
        "self",
    }
)
"""Names that chat_template_kwargs may not carry: they are fields of the request, or change what rendering returns."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """token_ids: what the model reads. text: what the caller sent, None for ids or a truncated text."""

    token_ids: list[int]
    text: str | None = None


async def off_loop(num_chars: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function here for a short text, in a thread for a long one."""
    if num_chars <= INLINE_CHARS:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def with_text(tokenizer: Any) -> Any:
    """The tokenizer. Raises RequestError if the model has none: such a model reads and writes token ids only."""
    if tokenizer is None:
        raise RequestError(
            "this model has no tokenizer; send token ids to /v1/completions, with return_token_ids: true",
            code="no_tokenizer",
        )
    return tokenizer


class Prompts:
    """Makes prompts with one tokenizer, which also has the model's or the server's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def from_texts(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Prompt]:
        """Tokenise texts."""
        encode = with_text(self._tokenizer).encode_batch
        batch = await off_loop(sum(map(len, texts)), encode, list(texts), add_special_tokens=add_special_tokens)
        return [Prompt(list(ids), text) for ids, text in zip(batch, texts, strict=True)]

    async def from_chat(self, body: ChatRequest | TokenizeRequest) -> tuple[Prompt, list[Message]]:
        """Render and tokenise a conversation; also returns its messages as the template saw them."""
        assert body.messages is not None, "the caller has checked that there are messages"
        encode_chat = with_text(self._tokenizer).encode_chat
        messages = prepare_messages(body.messages)
        # What a caller's own template costs, and how long what it is given beside messages, is unknown: never on the loop.
        is_unknown = body.chat_template or body.chat_template_kwargs or body.documents or body.tools
        size = INLINE_CHARS + 1 if is_unknown else num_chars(messages)
        text = await off_loop(size, self._render, body, messages)
        # Only an explicit false leaves out what belongs in front of every text; it is never put there twice.
        options = {"add_special_tokens": False} if body.add_special_tokens is False else {}
        token_ids = await off_loop(len(text), encode_chat, text, **options)
        return Prompt(list(token_ids), text), messages

    def _render(self, body: ChatRequest | TokenizeRequest, messages: list[Message]) -> str:
        options = _template_options(body)
        try:
            text = self._tokenizer.apply_chat_template(messages, chat_template=body.chat_template, **options)
        except RequestError:
            raise
        except Exception as exc:
            # A template is a program that the request feeds; whatever it raises is about this request.
            logger.info("chat template raised %s", type(exc).__name__)
            message = f"the chat template refused these messages: {type(exc).__name__}: {exc}"
            raise RequestError(message, param="messages", code="chat_template_error") from None
        assert isinstance(text, str), "a chat template renders to text"
        return text


def _template_options(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    kwargs = body.chat_template_kwargs or {}
    if reserved := sorted(RESERVED_TEMPLATE_KWARGS.intersection(kwargs)):
        raise RequestError(
            f"chat_template_kwargs may not set {', '.join(reserved)}; fields of the request do",
            param="chat_template_kwargs",
        )
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise RequestError(
            "add_generation_prompt and continue_final_message cannot both be true", param="continue_final_message"
        )
    return {
        **kwargs,
        "add_generation_prompt": not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        "continue_final_message": continues,
        "tools": body.tools or None,
        "documents": body.documents or None,
    }


def fit(
    prompt: Prompt, info: EngineInfo, *, truncate: int | None, max_tokens: int | None, param: str = "prompt"
) -> Prompt:
    """The prompt, cut to its last tokens if asked, once it is known to leave room for the output.

    truncate: how many tokens to keep, -1 for as many as fit. max_tokens: what is asked for, None for what fits.
    Raises RequestError with the numbers.
    """
    room = info.max_model_len - (max_tokens or 1)
    if truncate is not None:
        if truncate == 0:
            raise RequestError(
                "truncate_prompt_tokens is 0, which leaves nothing of the prompt; give a number above 0, or -1 for what "
                "fits",
                param="truncate_prompt_tokens",
            )
        keep = room if truncate == -1 else truncate
        if keep > info.max_model_len:
            raise RequestError(
                f"truncate_prompt_tokens is {truncate}, more than max_model_len, {info.max_model_len}",
                param="truncate_prompt_tokens",
            )
        if len(prompt.token_ids) > keep > 0:
            prompt = Prompt(prompt.token_ids[-keep:])
    num_tokens = len(prompt.token_ids)
    if num_tokens == 0:
        raise RequestError("the prompt is empty", param=param, code="empty_prompt")
    if num_tokens > room:
        asked = "at least 1 token of output" if max_tokens is None else f"max_tokens {max_tokens}"
        raise RequestError(
            f"the prompt has {num_tokens} {plural(num_tokens, 'token')} and needs room for {asked}, together {num_tokens + (max_tokens or 1)}; "
            f"this model's max_model_len is {info.max_model_len}. Shorten the prompt, set truncate_prompt_tokens or "
            "lower max_tokens",
            param=param,
            code="context_length_exceeded",
        )
    return prompt
