"""From texts, token ids and messages to the token ids that the model reads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from enginectl.builtin.openai.messages import Message, prepare_messages
from enginectl.builtin.openai.protocol import ChatRequest, TokenizeRequest
from enginectl.engine.client import EngineInfo
from enginectl.errors import ConfigError, RequestError

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


def load_template(given: str | None) -> str | None:
    """The server's chat template: the contents of a file, or the text itself.

    Raises ConfigError for a name that is neither.
    """
    if given is None or "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        raise ConfigError(f"chat_template {given!r} is neither a readable file nor a Jinja template: {exc}") from None


class Prompts:
    """Makes prompts with one tokenizer."""

    def __init__(self, tokenizer: Any, chat_template: str | None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    async def from_texts(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Prompt]:
        """Tokenise texts."""
        num_chars = sum(map(len, texts))
        if len(texts) == 1 and num_chars <= INLINE_CHARS:
            return [Prompt(list(self._tokenizer.encode(texts[0], add_special_tokens=add_special_tokens)), texts[0])]
        encode = self._tokenizer.encode_batch
        batch = await off_loop(num_chars, encode, list(texts), add_special_tokens=add_special_tokens)
        return [Prompt(list(ids), text) for ids, text in zip(batch, texts, strict=True)]

    async def from_chat(self, body: ChatRequest | TokenizeRequest) -> tuple[Prompt, list[Message]]:
        """Render and tokenise a conversation; also returns its messages as the template saw them."""
        assert body.messages is not None, "the caller has checked that there are messages"
        messages = prepare_messages(body.messages)
        num_chars = sum(len(message["content"]) for message in messages)
        if body.chat_template is not None:
            # What a caller's template costs is unknown: never on the loop.
            num_chars = max(num_chars, INLINE_CHARS + 1)
        text = await off_loop(num_chars, self._render, body, messages)
        if body.add_special_tokens:
            token_ids = await off_loop(len(text), self._tokenizer.encode, text, add_special_tokens=True)
        else:
            token_ids = await off_loop(len(text), self._tokenizer.encode_chat, text)
        return Prompt(list(token_ids), text), messages

    def _render(self, body: ChatRequest | TokenizeRequest, messages: list[Message]) -> str:
        options = _template_options(body)
        template = body.chat_template if body.chat_template is not None else self._chat_template
        try:
            text = self._tokenizer.apply_chat_template(messages, chat_template=template, **options)
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


def fit(prompt: Prompt, info: EngineInfo, *, truncate: int | None, max_tokens: int | None) -> Prompt:
    """The prompt, cut to its last tokens if asked, once it is known to leave room for the output.

    truncate: how many tokens to keep, -1 for as many as fit. max_tokens: what is asked for, None for what fits.
    Raises RequestError with the numbers.
    """
    room = info.max_model_len - (max_tokens or 1)
    if truncate is not None:
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
        raise RequestError("the prompt is empty", param="prompt", code="empty_prompt")
    if num_tokens > room:
        asked = "at least 1 token of output" if max_tokens is None else f"max_tokens {max_tokens}"
        raise RequestError(
            f"the prompt has {num_tokens} tokens and needs room for {asked}, together {num_tokens + (max_tokens or 1)}; "
            f"this model's max_model_len is {info.max_model_len}. Shorten the prompt, set truncate_prompt_tokens or "
            "lower max_tokens",
            param="prompt",
            code="context_length_exceeded",
        )
    return prompt
