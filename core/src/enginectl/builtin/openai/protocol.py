"""Request bodies. Every field is listed; one that is not is refused by name.

A field is honoured, or refused with the reason (`REFUSED`), or documented here as having no effect (`NO_EFFECT`).
None always means "not given": the model's generation_config decides, then the default of `SamplingParams`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from enginectl.http.record import REQUEST_ID_PATTERN

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

Count: TypeAlias = Annotated[int, Meta(ge=0, le=INT32_MAX)]
PositiveCount: TypeAlias = Annotated[int, Meta(ge=1, le=INT32_MAX)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Probability: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
# The bounds keep logits finite in fp32.
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=100)]
RepetitionPenalty: TypeAlias = Annotated[float, Meta(ge=0.01, le=100)]
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
NonEmpty: TypeAlias = Annotated[str, Meta(min_length=1)]
Messages: TypeAlias = Annotated[list[dict[str, Any]], Meta(min_length=1)]
Words: TypeAlias = Annotated[list[NonEmpty], Meta(max_length=256)]

NO_EFFECT = {
    "user": "who asks; nothing is recorded, and only the fair scheduler reads it, as the tenant where there are no keys",
    "safety_identifier": "who asks; nothing is recorded",
    "metadata": "labels for stored answers; nothing is stored",
    "store": "answers are never stored",
    "service_tier": "there is one tier",
    "prompt_cache_key": "the prefix cache is keyed by content; see cache_salt to separate entries",
    "prompt_cache_retention": "the prefix cache evicts by recent use",
    "parallel_tool_calls": "only matters together with tools",
}
"""Parameters of the OpenAI client that are accepted and change nothing here, with the reason."""

REFUSED = {
    "suffix": "inserting text before a suffix needs a model trained for it; put its fill-in tokens into the prompt",
    "functions": "deprecated by OpenAI; use tools",
    "function_call": "deprecated by OpenAI; use tool_choice",
    "audio": "this server answers with text only",
    "web_search_options": "this server does not search the web",
    "prediction": "predicted outputs are not supported; a speculation plugin speeds up repeated text",
    "reasoning_effort": "not interpreted by the server; pass what the chat template expects in chat_template_kwargs",
    "verbosity": "not interpreted by the server; pass what the chat template expects in chat_template_kwargs",
}
"""Parameters of the OpenAI client that are refused when set, with the reason."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """include_usage: a last chunk with usage. continuous_usage_stats: usage so far in every chunk.

    include_obfuscation has no effect: no padding is ever sent.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema the answer must match. name, description and strict change nothing: it always matches."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any]
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the answer is: free text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputsField(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the output must match: exactly one of the first six. backend: a grammar plugin by name."""

    json: str | dict[str, Any] | None = None
    regex: NonEmpty | None = None
    choice: Annotated[list[NonEmpty], Meta(min_length=1)] | None = None
    grammar: NonEmpty | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    backend: str | None = None


class GenerationFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What chat and text completions share."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    seed: Annotated[int, Meta(ge=-INT64_MAX, le=INT64_MAX)] | None = None
    stop: NonEmpty | Words | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: Count | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: Words | None = None
    prompt_logprobs: Count | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    structured_outputs: StructuredOutputsField | None = None
    speculation: Literal["auto", "off"] | Annotated[int, Meta(ge=0, le=64)] | None = None
    priority: Annotated[int, Meta(ge=-INT32_MAX, le=INT32_MAX)] | None = None
    request_id: Annotated[str, Meta(pattern=REQUEST_ID_PATTERN)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    return_token_ids: bool | None = None
    timeout: Annotated[float, Meta(gt=0, le=86400 * 7)] | None = None

    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class ChatRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions. chat_template: instead of the model's. chat_template_kwargs: passed to it."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: NonEmpty | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None

    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None

    functions: Any = None
    function_call: Any = None
    audio: Any = None
    web_search_options: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions. prompt: one or several texts or lists of token ids."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Count | None = None
    best_of: PositiveCount | None = None

    suffix: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /tokenize: a prompt, or messages and what a chat completion says about them.

    add_special_tokens: true for prompts and false for messages unless given.
    """

    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: NonEmpty | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


class LoadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/load_lora_adapter. load_inplace: replace the adapter of that name."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=256)]
    lora_path: NonEmpty
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=256)]
