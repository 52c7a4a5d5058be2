"""Answer bodies. Fields of type `UnsetType` are left out unless the request asked for them."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

PromptLogprobs = list[dict[str, Any] | None]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """cached_tokens: prompt tokens found in the prefix cache."""

    cached_tokens: int


class UsageBody(msgspec.Struct, frozen=True):
    """Tokens of a request: prompts once each, output over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatTopLogprob(msgspec.Struct, frozen=True, gc=False):
    """One alternative. bytes: the token's raw bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    """One output token; top_logprobs is empty unless alternatives were asked for."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a choice or chunk."""

    content: list[ChatLogprob]


class TextLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a text completion. text_offset: characters before the token in the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class ChatMessage(msgspec.Struct, frozen=True):
    """The answer."""

    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of n answers. stop_reason: the stop string or token id that ended it."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One completion of one prompt. index: prompt × n + choice."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/completions."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageBody


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new in a choice."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a choice; finish_reason is set on its last."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed chat completion. The first chunk of each choice carries the role."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a choice; finish_reason is set on its last."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed text completion."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A name requests may use. root: what it is loaded from. parent: an adapter's base."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "enginectl"
    root: str
    parent: str | None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of GET /v1/models."""

    object: str = "list"
    data: list[ModelCard]


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    """Answer of POST /detokenize."""

    prompt: str


class Health(msgspec.Struct, frozen=True):
    """Answer of GET /health; the status is 503 unless the engine is running. reason: why it is not."""

    status: str
    reason: str = ""


class Version(msgspec.Struct, frozen=True):
    """Answer of GET /version."""

    version: str


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of GET /server_info. engine: what the assembled engine reports. stats: state after its newest step.

    assembled, skipped, machine: of `enginectl serve`: who serves which role, who does not and why, and on what.
    """

    version: str
    state: str
    reason: str
    engine: dict[str, Any]
    stats: dict[str, Any]
    assembled: list[dict[str, str]] | UnsetType = UNSET
    skipped: list[dict[str, str]] | UnsetType = UNSET
    machine: dict[str, Any] | UnsetType = UNSET


class Done(msgspec.Struct, frozen=True):
    """Answer of administrative routes."""

    status: str
    detail: str = ""
