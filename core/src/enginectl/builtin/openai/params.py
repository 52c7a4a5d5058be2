"""Request fields to `SamplingParams`: the request's value, else the model's generation_config, else the default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from enginectl.builtin.openai.features import structured_outputs
from enginectl.builtin.openai.prompts import with_text
from enginectl.builtin.openai.protocol import INT64_MAX, GenerationFields
from enginectl.engine.client import EngineInfo
from enginectl.errors import RequestError
from enginectl.types import SamplingParams

DRAW_A_SEED = -1
"""As in other engines, this seed means none was given."""

_MERGED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "speculation",
)


def sampling_params(
    body: GenerationFields,
    info: EngineInfo,
    tokenizer: Any,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """How the engine shall sample for this request. max_tokens, logprobs, prompt_logprobs: already resolved.

    Raises RequestError for values that contradict each other or name tokens outside the vocabulary.
    """
    values = {name: info.sampling_defaults[name] for name in _MERGED if name in info.sampling_defaults}
    values |= {name: getattr(body, name) for name in _MERGED if getattr(body, name) is not None}
    _check_token_ids("logit_bias", body.logit_bias or (), info.vocab_size)
    _check_token_ids("allowed_token_ids", body.allowed_token_ids or (), info.vocab_size)
    _check_token_ids("stop_token_ids", body.stop_token_ids or (), info.vocab_size)
    min_tokens = values.get("min_tokens", 0)
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(f"min_tokens ({min_tokens}) is more than max_tokens ({max_tokens})", param="min_tokens")
    bad_words = tuple(body.bad_words or ())
    return SamplingParams(
        n=body.n or 1,
        max_tokens=max_tokens,
        logit_bias=body.logit_bias or None,
        allowed_token_ids=_tuple_or_none(body.allowed_token_ids),
        bad_words=bad_words,
        bad_word_ids=tuple(tuple(ids) for ids in with_text(tokenizer).bad_word_ids(bad_words)) if bad_words else (),
        seed=None if body.seed is None or body.seed == DRAW_A_SEED else body.seed & INT64_MAX,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=structured_outputs(body, info),
        **values,
    )


def _tuple_or_none(values: list[int] | None) -> tuple[int, ...] | None:
    return tuple(values) if values is not None else None


def _check_token_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise RequestError(f"{param} names token {largest}; this model's tokens are 0 to {vocab_size - 1}", param=param)


def check_num_logprobs(param: str, wanted: int | None, max_logprobs: int) -> None:
    """Raises RequestError if more alternatives are wanted than the server allows."""
    if wanted is not None and wanted > max_logprobs:
        raise RequestError(
            f"{param} asks for {wanted} alternatives; the most is {max_logprobs} (the server's --max-logprobs)",
            param=param,
        )


def chosen_max_tokens(body: GenerationFields, other: int | None = None) -> int | None:
    """max_tokens of a request or, for chat, max_completion_tokens; None means what fits."""
    if other is not None and body.max_tokens is not None and other != body.max_tokens:
        raise RequestError(
            f"max_tokens ({body.max_tokens}) and max_completion_tokens ({other}) differ; send one of them",
            param="max_completion_tokens",
        )
    return other if other is not None else body.max_tokens
