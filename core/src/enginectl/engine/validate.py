"""Everything that can be wrong with one request, found before it is queued: a RequestError touches nobody else."""

from __future__ import annotations

from enginectl.builtin.sampling.validation import validate_params
from enginectl.engine.client import EngineInfo
from enginectl.errors import NotFoundError, RequestError, unknown
from enginectl.provider import Role
from enginectl.types import GenerateRequest
from enginectl.units import plural

_IGNORE_PRIORITY = frozenset({"fcfs", "fair"})
"""Core's schedulers that do not read a request's priority. Whether a plugin's does is not known: it is let through."""


def validate_request(
    request: GenerateRequest, info: EngineInfo, *, max_logprobs: int, adapters: tuple[str, ...]
) -> None:
    """Raise RequestError, naming the field, what was found and what is allowed."""
    params = request.params
    validate_params(params, info.vocab_size)
    refuse_unread_priority(request.priority, info)
    _validate_prompt(request, info)
    if params.structured_outputs is not None and params.ignore_eos:
        raise RequestError(
            "ignore_eos contradicts structured_outputs: when the structure is complete, only the end may follow; leave "
            "one of them out",
            param="ignore_eos",
        )
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(params, name)
        if asked is not None and not 0 <= asked <= max_logprobs:
            raise RequestError(f"{name} is {asked}, allowed are 0 to {max_logprobs}", param=name)
    if request.adapter is not None and request.adapter not in adapters:
        raise NotFoundError(unknown("model or adapter", request.adapter, adapters), param="model")
    if request.timeout_s is not None and not request.timeout_s > 0:
        raise RequestError(f"timeout is {request.timeout_s}, it must be a number of seconds above 0", param="timeout")


def refuse_unread_priority(priority: int | None, info: EngineInfo) -> None:
    """Raise RequestError for a priority that the scheduler would ignore."""
    schedulers = [row[1] for row in info.table if row[0] == Role.SCHEDULER]
    if priority and schedulers and _IGNORE_PRIORITY.issuperset(schedulers):
        raise RequestError(
            f"priority is not supported here: the {schedulers[0]} scheduler does not read it; start with "
            '--scheduling-policy priority (in Python, scheduling_policy="priority")',
            param="priority",
            code="unsupported_parameter",
        )


def _validate_prompt(request: GenerateRequest, info: EngineInfo) -> None:
    ids, params = request.prompt_token_ids, request.params
    length = len(ids)
    if length == 0:
        raise RequestError("the prompt has no tokens; at least one is needed", param="prompt")
    if min(ids) < 0 or max(ids) >= info.vocab_size:
        wrong = next(token for token in ids if not 0 <= token < info.vocab_size)
        raise RequestError(f"token id {wrong} is not in the vocabulary (0 to {info.vocab_size - 1})", param="prompt")
    room, tokens = info.max_model_len - length, f"{length} {plural(length, 'token')}"
    if room < 1:
        raise RequestError(
            f"the prompt has {tokens} and the context is {info.max_model_len}, which leaves no room for output; "
            "shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    if params.max_tokens is not None and params.max_tokens > room:
        raise RequestError(
            f"max_tokens is {params.max_tokens} and the prompt has {tokens}, together more than the context of "
            f"{info.max_model_len}; ask for at most {room}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    worst = length + (params.max_tokens if params.max_tokens is not None else room)
    if -(-worst // info.block_size) > info.num_kv_tokens // info.block_size:
        raise RequestError(
            f"prompt and max_tokens are {worst} tokens, the KV pool holds {info.num_kv_tokens}; ask for fewer",
            param="max_tokens",
            code="context_length_exceeded",
        )
