"""Sampling flags of `generate` and `chat`, and what is filled in where none was given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from enginectl.config_checks import Range
from enginectl.errors import UsageError, unknown
from enginectl.types import SamplingParams

if TYPE_CHECKING:
    from enginectl.builtin.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 256
"""Of `generate`, if as many fit: base models do not stop by themselves."""

_PANEL = "Sampling"

RANGES = {
    "temperature": Range(lambda value: 0 <= value <= 2, "0 to 2"),
    "top_p": Range(lambda value: 0 <= value <= 1, "0 to 1"),
    "top_k": Range(lambda value: value >= -1, "a count, or 0 for all"),
}

MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", min=0, help="Most tokens of an answer; 0 is what fits.", rich_help_panel=_PANEL),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", "-t", help="0 is greedy. Default: the model's.", rich_help_panel=_PANEL),
]
TopP = Annotated[float | None, typer.Option("--top-p", help="Nucleus. Default: the model's.", rich_help_panel=_PANEL)]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", help="Most likely tokens to keep. Default: the model's.", rich_help_panel=_PANEL),
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="Text that ends an answer. May be repeated.", rich_help_panel=_PANEL)
]


def sampling_values(
    *, max_tokens: int | None, temperature: float | None, top_p: float | None, top_k: int | None, stop: list[str] | None
) -> dict[str, Any]:
    """Flags as fields of SamplingParams, without those not given. Raises UsageError for a value out of range."""
    values = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "stop": stop or None,
    }
    for name, value in values.items():
        if name in RANGES and value is not None and not RANGES[name].allows(value):
            raise UsageError(f"--{name.replace('_', '-')} is {value}; allowed: {RANGES[name].words}")
    given = {name: value for name, value in values.items() if value is not None}
    return given if max_tokens is None else {**given, "max_tokens": max_tokens or None}


def typed_params(values: dict[str, Any], where: str = "sampling") -> SamplingParams:
    """Typed sampling parameters. Raises UsageError for an unknown name or a value of the wrong type."""
    for name in values:
        if name not in SamplingParams.__struct_fields__:
            raise UsageError(f"{where}: {unknown('sampling parameter', name, SamplingParams.__struct_fields__)}")
    try:
        return msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error}") from error


def with_defaults(values: dict[str, Any], defaults: dict[str, Any], tokenizer: Tokenizer) -> SamplingParams:
    """The parameters of a request: what was given over the model's own defaults; bad words as token ids."""
    known = {name: value for name, value in defaults.items() if name in SamplingParams.__struct_fields__}
    params = typed_params({**known, **values})
    if params.bad_words:
        params = msgspec.structs.replace(params, bad_word_ids=tokenizer.bad_word_ids(params.bad_words))
    return params
