"""Running what one HTTP request asks for: one or several prompts, each with n choices, counted and collected."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from enginectl.builtin.openai.answers import PromptTokensDetails, UsageBody
from enginectl.builtin.openai.names import ModelNames
from enginectl.builtin.openai.prompts import Prompt
from enginectl.builtin.openai.protocol import GenerationFields
from enginectl.engine.chunks import coalesce
from enginectl.engine.client import EngineClient
from enginectl.errors import DeadlineError, EnginectlError, StepError
from enginectl.http.record import RequestRecord
from enginectl.http.stream import close, merge
from enginectl.types import Call, FinishReason, GenerateRequest, OutputChunk, TokenLogprobs


@dataclass(slots=True)
class Job:
    """What one HTTP request runs. Choice `index` of prompt `place` is answered under place × n + index.

    id, model, created: as shown. echo: text that precedes the output of each prompt. drop_output: the caller wanted
    the prompt only, and the one token that was made for it is not shown or billed.
    """

    id: str
    model: str
    record: RequestRecord
    prompts: list[Prompt]
    requests: list[GenerateRequest]
    n: int
    echo: list[str] | None = None
    drop_output: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    _cached_tokens: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.record.prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        self.record.completion_tokens = 0

    @property
    def num_choices(self) -> int:
        """Choices over all prompts."""
        return len(self.prompts) * self.n

    def count(self, place: int, chunk: OutputChunk) -> None:
        """Add what a chunk costs."""
        assert self.record.completion_tokens is not None, "set when the job is made"
        self.record.completion_tokens += len(chunk.token_ids)
        if chunk.num_cached_tokens:
            self._cached_tokens[place] = max(chunk.num_cached_tokens, self._cached_tokens.get(place, 0))

    def usage(self) -> UsageBody:
        """Tokens so far."""
        prompt, completion = self.record.prompt_tokens or 0, self.record.completion_tokens or 0
        cached = PromptTokensDetails(sum(self._cached_tokens.values()))
        return UsageBody(prompt, completion, prompt + completion, cached)


def call_of(body: GenerationFields, record: RequestRecord, operation: str, names: ModelNames) -> Call:
    """What observers may want to know about the call."""
    return Call(
        operation=operation,
        model=body.model or names.base[0],
        is_streamed=bool(body.stream),
        trace_headers=record.trace_headers,
    )


async def run(client: EngineClient, job: Job) -> AsyncGenerator[tuple[int, list[OutputChunk]], None]:
    """Chunks as they come, at most one a choice in each list, with the place of their prompt.

    Closing it early aborts every prompt. Raises StepError when a choice ends with an error, DeadlineError if its time
    was over.
    """
    if len(job.requests) == 1:
        source = client.generate(job.requests[0])
        try:
            async for chunks in source:
                yield 0, _checked(job, 0, chunks)
        finally:
            await close(source)
        return
    sources: list[AsyncIterator[list[OutputChunk]]] = [client.generate(request) for request in job.requests]
    async with aclosing(merge(sources)) as merged:
        async for place, chunks in merged:
            yield place, _checked(job, place, chunks)


def _checked(job: Job, place: int, chunks: list[OutputChunk]) -> list[OutputChunk]:
    for chunk in chunks:
        if chunk.finish_reason is FinishReason.ERROR:
            raise _failure(job, place, chunk)
    if len(chunks) > 1:
        chunks = coalesce(chunks)
    if job.drop_output:
        chunks = [_without_output(chunk) for chunk in chunks]
    for chunk in chunks:
        job.count(place, chunk)
    return chunks


def _failure(job: Job, place: int, chunk: OutputChunk) -> EnginectlError:
    """What ended a choice with an error: its deadline, if that has passed, or its step."""
    message = chunk.error or "the request ended with an error"
    timeout_s = job.requests[place].timeout_s
    if timeout_s is not None and time.monotonic() - job.record.started_s >= timeout_s:
        return DeadlineError(message)
    return StepError(message)


def _without_output(chunk: OutputChunk) -> OutputChunk:
    reason = FinishReason.LENGTH if chunk.finish_reason is FinishReason.STOP else chunk.finish_reason
    return msgspec.structs.replace(chunk, text="", token_ids=(), logprobs=None, finish_reason=reason, stop_reason=None)


@dataclass(slots=True)
class Collected:
    """A whole choice."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason = FinishReason.ABORT
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """The text of all chunks."""
        return "".join(self.texts)


async def collect(client: EngineClient, job: Job) -> list[Collected]:
    """Every choice, whole, in order. Cancelling it aborts the job."""
    choices = [Collected() for _ in range(job.num_choices)]
    async with aclosing(run(client, job)) as source:
        async for place, chunks in source:
            job.record.saw_token()
            for chunk in chunks:
                _append(choices[place * job.n + chunk.index], chunk)
    return choices


def _append(choice: Collected, chunk: OutputChunk) -> None:
    choice.texts.append(chunk.text)
    choice.token_ids.extend(chunk.token_ids)
    choice.logprobs.extend(chunk.logprobs or ())
    if chunk.prompt_logprobs is not None:
        choice.prompt_logprobs = chunk.prompt_logprobs
    if chunk.finish_reason is not None:
        choice.finish_reason = chunk.finish_reason
        choice.stop_reason = chunk.stop_reason
