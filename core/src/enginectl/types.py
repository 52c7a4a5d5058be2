"""The values that travel between the API side and the engine. Plain msgspec structs: cheap to make, encode and check."""

from __future__ import annotations

import enum

import msgspec


class FinishReason(enum.StrEnum):
    """Why a choice ended, in OpenAI's words, plus `error`."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    ERROR = "error"


def _make_tuple(struct: msgspec.Struct, name: str, one: type | tuple[()], none: tuple[()] | None = None) -> None:
    """Read a field as a tuple: a single value (a string is not its characters), a list or set, or None."""
    value = getattr(struct, name)
    if type(value) is tuple or value is none:
        return
    if value is None:
        value = none
    elif isinstance(value, one):
        value = (value,)
    elif isinstance(value, (list, set, frozenset)):
        value = tuple(value)
    msgspec.structs.force_setattr(struct, name, value)


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the output must match. Exactly one of the fields is set.

    json: a JSON schema as text. regex: a regular expression. choice: one of these strings. grammar: EBNF text.
    json_object: any JSON object. structural_tag: tagged sections as JSON text. backend: a grammar provider's name.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        _make_tuple(self, "choice", str)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen and when a choice ends. Lengths are in tokens. What takes several strings or ids also takes
    one, a list or None.

    n: choices per prompt. max_tokens: None means what fits. min_tokens: no end before this many.
    temperature: 0 is greedy. top_k: 0 or -1 keeps all. top_p, min_p: nucleus and relative cut-off in [0, 1].
    presence_penalty, frequency_penalty: subtracted for output tokens, in [-2, 2]. repetition_penalty: divides positive
    and multiplies negative logits of prompt and output tokens. logit_bias: token id to a number added to its logit.
    allowed_token_ids: nothing else may be chosen. bad_words: strings never produced (encoded by the API side into
    bad_word_ids). seed: None draws one at admission. stop: strings. stop_token_ids: token ids besides EOS.
    logprobs: how many alternatives a token, None for none; prompt_logprobs likewise for the prompt.
    speculation: "auto", "off" or a number of draft tokens.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    speculation: str | int = "auto"

    def __post_init__(self) -> None:
        _make_tuple(self, "stop", str, ())
        _make_tuple(self, "bad_words", str, ())
        _make_tuple(self, "bad_word_ids", (), ())
        _make_tuple(self, "stop_token_ids", int, ())
        _make_tuple(self, "allowed_token_ids", int)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What a frontend knows about the call that a request belongs to; only observers read it.

    operation: "chat", "text_completion". model: the name that was asked for. trace_headers: `traceparent` and
    `tracestate`, lower case, if the caller traces.
    """

    operation: str
    model: str
    is_streamed: bool = False
    trace_headers: dict[str, str] = {}


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to complete, `params.n` times.

    prompt_token_ids: what the model reads, BOS included. adapter: served name of an adapter, or None for the base.
    priority: lower runs first under the priority scheduler. cache_salt: separates prefix-cache entries.
    tenant: whom fairness is counted against. timeout_s: ends the request with an error after this long.
    choice_offset: number of its first choice, so that equal prompts of one call draw different noise from one seed.
    call: what it belongs to, where a frontend knows.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    adapter: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    tenant: str = ""
    timeout_s: float | None = None
    choice_offset: int = 0
    call: Call | None = None


class EngineRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One choice of one request, as the engine process receives it.

    key: unique number the API side gave it. prompt: int32 little-endian bytes. seed: drawn if the request had none.
    choice: index among n. max_tokens: resolved. eos_token_ids: the model's set (empty under ignore_eos).
    arrival_s: time.monotonic() at admission (one machine, one clock).
    """

    key: int
    request_id: str
    prompt: bytes
    params: SamplingParams
    seed: int
    choice: int
    max_tokens: int
    eos_token_ids: tuple[int, ...]
    adapter: str | None
    priority: int
    cache_salt: str | None
    tenant: str
    arrival_s: float
    timeout_s: float | None


class Timings(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """time.monotonic() seconds in a choice's life, and how often it was preempted.

    0.0 is what did not happen. A choice whose end the engine does not tell (its reader left, the engine died) has the
    API side's times, and no scheduled_s.
    """

    arrival_s: float
    scheduled_s: float
    first_token_s: float
    finished_s: float
    num_preemptions: int


class Finished(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A choice ended in the engine. stop_token_id: which stop token, None for EOS, length or abort."""

    key: int
    reason: FinishReason
    stop_token_id: int | None
    error: str | None
    num_cached_tokens: int
    timings: Timings
    refused: bool = False
    """It never ran: something only the engine knows made it wrong."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of one position: the chosen token, its rank (1 is best), and the best alternatives."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class KeyedLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of one choice in one step, one entry per emitted token (or per prompt position)."""

    key: int
    entries: tuple[TokenLogprobs | None, ...]


class EngineStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """State after a step; counters are totals since the engine started.

    drafted_by_position, accepted_by_position: draft tokens verified and kept, first position first. draft_length: drafts
    a row was to get, averaged over recent steps.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_blocks_in_use: int = 0
    num_blocks_idle: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    step_tokens: int = 0
    step_s: float = 0.0
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    draft_length: float = 0.0


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step produced, for all rows at once.

    keys: int64 bytes [num_rows]. counts: int32 bytes [num_rows], or empty when each row made one token.
    token_ids: int32 bytes [sum(counts)], row after row.
    """

    keys: bytes
    counts: bytes
    token_ids: bytes
    finished: tuple[Finished, ...]
    logprobs: tuple[KeyedLogprobs, ...]
    prompt_logprobs: tuple[KeyedLogprobs, ...]
    stats: EngineStats | None


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request: prompt, output over all choices, and how many prompt tokens came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class OutputChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of one choice, as frontends and Python callers receive it.

    text, token_ids, logprobs: new since the last chunk, all cut at the same token. finish_reason: set on the last chunk
    of the choice. stop_reason: the stop string or stop token id, None for EOS and length.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    timings: Timings | None = None


class FinishedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """How a whole request ended, for observers, hooks and the access log. request: what was asked."""

    request_id: str
    reasons: tuple[FinishReason, ...]
    usage: Usage
    timings: tuple[Timings, ...]
    adapter: str | None = None
    max_tokens: int = 0
    n: int = 1
    error: str | None = None
    request: GenerateRequest | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A finished choice, whole: what `Engine.generate` yields inside `RequestOutput`."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request of the Python API: the prompt's ids, its choices in order, and the counts."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: tuple[Completion, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: str | None = None
