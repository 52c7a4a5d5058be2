"""Which sampling parameters are honoured. Everything else is refused at admission, by name, never ignored.

Bounds that depend on the deployment (`logprobs`, prompt length) and `structured_outputs` are checked where they are known.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from enginectl.errors import RequestError
from enginectl.types import SamplingParams

_MAX_SEED = 2**64


def validate_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError, naming the parameter, what was found and what is allowed, if a value cannot be honoured.

    Called: at admission, on the API side, after `bad_words` are encoded into `bad_word_ids`.
    """
    check_lengths(params)
    check_sampling(params)
    check_penalties(params)
    check_logit_bias(params, vocab_size)
    check_bad_words(params, vocab_size)
    check_allowed_token_ids(params, vocab_size)
    check_min_tokens(params, vocab_size)
    check_strings("stop", params.stop)
    speculation = params.speculation
    if isinstance(speculation, str) and speculation not in ("auto", "off"):
        _refuse("speculation", repr(speculation), '"auto", "off" or a number of draft tokens')
    if not isinstance(speculation, str):
        _whole("speculation", speculation, 0)


def check_lengths(params: SamplingParams) -> None:
    """n and max_tokens."""
    _whole("n", params.n, 1)
    if params.max_tokens is not None:
        _whole("max_tokens", params.max_tokens, 1)


def check_sampling(params: SamplingParams) -> None:
    """What the sampler reads: temperature, top_k, top_p, min_p, seed."""
    _number("temperature", params.temperature, 0.0, math.inf)
    _whole("top_k", params.top_k, -1)
    _number("top_p", params.top_p, 0.0, 1.0)
    _number("min_p", params.min_p, 0.0, 1.0)
    if params.seed is not None:
        _whole("seed", params.seed, -_MAX_SEED // 2, _MAX_SEED - 1)


def check_penalties(params: SamplingParams) -> None:
    """The three penalties."""
    _number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    value = params.repetition_penalty
    if not _is_number(value) or value <= 0.0:
        _refuse("repetition_penalty", repr(value), "a finite number above 0")


def check_logit_bias(params: SamplingParams, vocab_size: int) -> None:
    """logit_bias: known tokens, numbers within OpenAI's range."""
    if not isinstance(params.logit_bias, dict | None):
        _refuse("logit_bias", repr(params.logit_bias), "a dict of token id to number")
    for token_id, bias in (params.logit_bias or {}).items():
        _token_ids("logit_bias", (token_id,), vocab_size)
        _number("logit_bias", bias, -100.0, 100.0)


def check_bad_words(params: SamplingParams, vocab_size: int) -> None:
    """bad_words and their encoding."""
    check_strings("bad_words", params.bad_words)
    if params.bad_words and not params.bad_word_ids:
        _refuse("bad_words", "words without token ids", "words encoded into bad_word_ids by the API side")
    for word in _sequence("bad_word_ids", params.bad_word_ids, "sequences of token ids"):
        if not word:
            _refuse("bad_words", "an empty sequence of token ids", "sequences of at least one token id")
        _token_ids("bad_words", word, vocab_size)


def check_allowed_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """allowed_token_ids: known tokens, of which bad_words leave at least one."""
    allowed = params.allowed_token_ids
    if allowed is None:
        return
    if not allowed:
        _refuse("allowed_token_ids", "an empty list", "at least one token id, or leave it out")
    _token_ids("allowed_token_ids", allowed, vocab_size)
    if set(allowed) <= {word[0] for word in params.bad_word_ids if len(word) == 1}:
        _refuse("allowed_token_ids", "only tokens that bad_words forbid", "at least one other token id")


def check_min_tokens(params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
    """min_tokens and the tokens it forbids, of which allowed_token_ids must leave one to go on with."""
    _whole("min_tokens", params.min_tokens, 0)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        _refuse("min_tokens", str(params.min_tokens), f"at most max_tokens, which is {params.max_tokens}")
    _token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    if params.min_tokens > 0 and params.allowed_token_ids:
        ends = end_token_ids(params, eos_token_ids)
        if set(params.allowed_token_ids) <= set(ends):
            _refuse("min_tokens", "allowed_token_ids that only end the text", "0, or an allowed token to go on with")


def end_token_ids(params: SamplingParams, eos_token_ids: Collection[int]) -> tuple[int, ...]:
    """The tokens that end this request: its stop tokens, and EOS unless it ignores that."""
    eos = () if params.ignore_eos else eos_token_ids
    return tuple(sorted({*params.stop_token_ids, *eos}))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _number(name: str, value: Any, low: float, high: float) -> None:
    if not _is_number(value) or not low <= value <= high:
        allowed = f"of at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
        _refuse(name, repr(value), f"a finite number {allowed}")


def _whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        allowed = f"of at least {low}" if high is None else f"between {low} and {high}"
        _refuse(name, repr(value), f"a whole number {allowed}")


def _sequence(name: str, value: Any, allowed: str) -> Sequence[Any]:
    if not isinstance(value, (tuple, list)):
        _refuse(name, repr(value), allowed)
    return value


def check_strings(name: str, value: Any) -> None:
    """stop and bad_words."""
    for text in _sequence(name, value, "a string, or several in a tuple or list"):
        if not isinstance(text, str) or not text:
            _refuse(name, repr(text) if text else '""', "strings of at least one character")


def _token_ids(name: str, token_ids: Any, vocab_size: int) -> None:
    for token_id in _sequence(name, token_ids, "token ids in a tuple or list"):
        if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            _refuse(name, f"token id {token_id!r}", f"ids of the vocabulary, 0 to {vocab_size - 1}")


def _refuse(name: str, found: str, allowed: str) -> NoReturn:
    raise RequestError(f"{name}: found {found}; allowed: {allowed}", param=name, code="invalid_value")
