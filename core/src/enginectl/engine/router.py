"""The API side of the stream: requests out as choices, step outputs back as chunks of text.

One `OutputRouter` per client. It owns the open requests and makes their text; it knows nothing of transports.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from enginectl.engine.chunks import coalesce
from enginectl.engine.client import EngineInfo
from enginectl.engine.text import ChoiceText, StopMatcher
from enginectl.errors import RequestError
from enginectl.interfaces.detokenizer import Detokenizer
from enginectl.types import (
    EngineRequest,
    Finished,
    FinishedRequest,
    FinishReason,
    GenerateRequest,
    OutputChunk,
    StepOutputs,
    Timings,
    TokenLogprobs,
    Usage,
)

log = logging.getLogger("enginectl.router")

_MERGE_EVERY = 64
"""Unread chunks of a choice that become one."""


class Ticket:
    """An open request: chunks nobody has read yet, and what is needed to bill it. wake: called when there is news.

    What a reader has not read is bounded by its own request, n choices of at most max_tokens: the engine never waits
    for a reader, so a slow one costs no blocks and no row, and its chunks are merged, so that a token costs what its
    id and its text take, not an object of its own.
    """

    __slots__ = (
        "_merge_at",
        "_num_merged",
        "arrival_s",
        "failure",
        "keys",
        "num_cached_tokens",
        "num_output_tokens",
        "pending",
        "prompt_logprobs",
        "reasons",
        "request",
        "timings",
        "wake",
    )

    def __init__(self, request: GenerateRequest, wake: Callable[[], None]) -> None:
        self.request = request
        self.wake = wake
        self.arrival_s = time.monotonic()
        self.pending: list[OutputChunk] = []
        self._num_merged = 0
        self._merge_at = _MERGE_EVERY * request.params.n
        self.keys: set[int] = set()
        self.failure: Exception | None = None
        self.reasons: list[FinishReason] = []
        self.timings: list[Timings] = []
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended."""
        return not self.keys

    def put(self, chunk: OutputChunk) -> None:
        """Queue a chunk for the reader; what piles up is merged, each chunk once."""
        pending = self.pending
        pending.append(chunk)
        if len(pending) - self._num_merged >= self._merge_at:
            pending[self._num_merged :] = coalesce(pending[self._num_merged :])
            self._num_merged = len(pending)

    def take(self) -> list[OutputChunk]:
        """What nobody has read yet."""
        chunks, self.pending, self._num_merged = self.pending, [], 0
        return chunks

    def finished(self, error: str | None = None) -> FinishedRequest:
        """The account of a request that ended."""
        usage = Usage(len(self.request.prompt_token_ids), self.num_output_tokens, self.num_cached_tokens)
        return FinishedRequest(
            request_id=self.request.request_id,
            reasons=tuple(self.reasons),
            usage=usage,
            timings=tuple(self.timings),
            adapter=self.request.adapter,
            max_tokens=self.request.params.max_tokens or 0,
            n=self.request.params.n,
            error=error,
            request=self.request,
        )


class _Choice:
    """ending: its last chunk, when it was cut on this side and the engine has yet to say that it is over there too."""

    __slots__ = ("ending", "first_s", "index", "key", "text", "ticket")

    def __init__(self, key: int, index: int, text: ChoiceText, ticket: Ticket) -> None:
        self.key = key
        self.index = index
        self.text = text
        self.ticket = ticket
        self.first_s = 0.0
        self.ending: OutputChunk | None = None

    def timings(self) -> Timings:
        """Of a choice whose end the engine does not tell: as this side saw it."""
        return Timings(self.ticket.arrival_s, 0.0, self.first_s, time.monotonic(), 0)


class OutputRouter:
    """Turns GenerateRequests into EngineRequests, and StepOutputs into the chunks of open tickets."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        info: EngineInfo,
        *,
        seed: int | None = None,
        on_finished: Callable[[Ticket, str | None], None] | None = None,
    ) -> None:
        self.info = info
        self.tickets: dict[str, Ticket] = {}
        self._detokenizer = detokenizer
        self._choices: dict[int, _Choice] = {}
        self._next_key = 1
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()
        self._on_finished = on_finished

    @property
    def num_open(self) -> int:
        """Choices that have not ended."""
        return len(self._choices)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of choices that have had no token yet: they wait, or are being read. O(choices)."""
        return sum(len(c.ticket.request.prompt_token_ids) for c in self._choices.values() if c.first_s == 0.0)

    def open_adapters(self) -> tuple[frozenset[str], frozenset[str]]:
        """Adapters whose requests have had a token, and those whose requests have not. O(choices)."""
        named = [(c.first_s > 0, c.ticket.request.adapter) for c in self._choices.values()]
        running = frozenset(name for has_begun, name in named if has_begun and name is not None)
        return running, frozenset(name for has_begun, name in named if not has_begun and name is not None)

    def open(self, request: GenerateRequest, wake: Callable[[], None]) -> tuple[Ticket, list[EngineRequest]]:
        """Register a checked request; send the returned choices to the engine. If it raises, nothing has changed."""
        params = request.params
        ticket = Ticket(request, wake)
        matcher = StopMatcher(params.stop) if params.stop else None
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        prompt = np.asarray(request.prompt_token_ids, np.int32).tobytes()
        room = self.info.max_model_len - len(request.prompt_token_ids)
        eos = () if params.ignore_eos else self.info.eos_token_ids
        first, specs, choices = self._next_key, [], {}
        for index in range(params.n):
            key = first + index
            stream = self._detokenizer.start(request.prompt_token_ids, params)
            text = ChoiceText(index, stream, params, eos_token_ids=eos, matcher=matcher)
            choices[key] = _Choice(key, index, text, ticket)
            specs.append(
                EngineRequest(
                    key=key,
                    request_id=request.request_id,
                    prompt=prompt,
                    params=params,
                    seed=seed,
                    choice=index + request.choice_offset,
                    max_tokens=min(params.max_tokens, room) if params.max_tokens is not None else room,
                    eos_token_ids=eos,
                    adapter=request.adapter,
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                    tenant=request.tenant,
                    arrival_s=ticket.arrival_s,
                    timeout_s=request.timeout_s,
                )
            )
        self._next_key = first + params.n
        self._choices.update(choices)
        ticket.keys.update(choices)
        self.tickets[request.request_id] = ticket
        return ticket, specs

    def close(self, ticket: Ticket) -> list[int]:
        """Nobody reads this request any more. Returns the keys to abort in the engine."""
        keys = list(ticket.keys)
        self._drop_choices(ticket, FinishReason.ABORT)
        if self.tickets.pop(ticket.request.request_id, None) is not None and keys:
            self._report(ticket, None)
        return keys

    def fail_all(self, error: Exception) -> None:
        """The engine died: every open request ends with this error."""
        for ticket in list(self.tickets.values()):
            for choice in [self._choices[key] for key in ticket.keys]:
                if choice.ending is not None:  # nothing of it is missing
                    self._put(choice, choice.ending)
                    self._end(choice, choice.ending, choice.timings(), 0)
            if not ticket.is_done:
                self._drop_choices(ticket, FinishReason.ERROR)
                ticket.failure = error
                self._report(ticket, str(error))
            ticket.wake()
        self.tickets.clear()

    def _drop_choices(self, ticket: Ticket, reason: FinishReason) -> None:
        for key in ticket.keys:
            choice = self._choices.pop(key)
            ticket.reasons.append((choice.ending and choice.ending.finish_reason) or reason)
            ticket.timings.append(choice.timings())
            ticket.num_output_tokens += choice.text.num_output_tokens
        ticket.keys.clear()

    def dispatch(self, outputs: StepOutputs) -> list[int]:
        """Give each choice what the step made for it. Returns keys that hit a stop string: abort them."""
        finished = {end.key: end for end in outputs.finished} if outputs.finished else {}
        logprobs = {entry.key: entry.entries for entry in outputs.logprobs} if outputs.logprobs else {}
        for entry in outputs.prompt_logprobs:
            choice = self._choices.get(entry.key)
            if choice is not None:
                choice.ticket.prompt_logprobs.setdefault(entry.key, [None]).extend(entry.entries)
        touched: dict[Ticket, None] = {}
        stopped: list[int] = []
        keys = np.frombuffer(outputs.keys, np.int64).tolist()
        tokens = np.frombuffer(outputs.token_ids, np.int32).tolist()
        if outputs.counts:
            ends = np.cumsum(np.frombuffer(outputs.counts, np.int32)).tolist()
            start = 0
            for key, end in zip(keys, ends, strict=True):
                self._push(key, tokens[start:end], logprobs.get(key), finished.pop(key, None), touched, stopped)
                start = end
        else:
            for key, token in zip(keys, tokens, strict=True):
                self._push(key, (token,), logprobs.get(key), finished.pop(key, None), touched, stopped)
        for key, end in finished.items():
            self._push(key, (), None, end, touched, stopped)
        for ticket in touched:
            ticket.wake()
        return stopped

    def _push(
        self,
        key: int,
        token_ids: Sequence[int],
        logprobs: tuple[TokenLogprobs | None, ...] | None,
        finished: Finished | None,
        touched: dict[Ticket, None],
        stopped: list[int],
    ) -> None:
        choice = self._choices.get(key)
        if choice is None:
            return  # it ended here already: a stop string, or a reader that went away
        ticket = choice.ticket
        touched[ticket] = None
        if choice.ending is not None:
            if finished is not None:
                self._confirm(choice, choice.ending, finished)
            return
        if finished is not None and finished.refused:
            ticket.failure = RequestError(finished.error or "refused")
        if not choice.first_s and token_ids:
            choice.first_s = time.monotonic()
        try:
            chunk = choice.text.push(token_ids, logprobs, finished)  # type: ignore[arg-type]
        except Exception as error:  # a detokenizer's fault ends this choice, not the others
            log.exception("request %s: making text failed", ticket.request.request_id)
            chunk = _broken(choice, error)
        if chunk is not None and chunk.finish_reason is not None and finished is None:
            stopped.append(key)
            chunk, choice.ending = _split(chunk)
        if chunk is not None:
            self._put(choice, chunk)
        if finished is not None:
            self._end(choice, chunk, finished.timings, finished.num_cached_tokens)

    def _confirm(self, choice: _Choice, ending: OutputChunk, finished: Finished) -> None:
        """A choice cut here is over in the engine, too: its blocks are free, and its account is known."""
        cached, timings = finished.num_cached_tokens, finished.timings
        self._put(choice, msgspec.structs.replace(ending, num_cached_tokens=cached, timings=timings))
        self._end(choice, ending, timings, cached)

    def _put(self, choice: _Choice, chunk: OutputChunk) -> None:
        entries = choice.ticket.prompt_logprobs.pop(choice.key, None)
        if entries is not None:
            chunk = msgspec.structs.replace(chunk, prompt_logprobs=tuple(entries))
        choice.ticket.put(chunk)

    def _end(self, choice: _Choice, chunk: OutputChunk | None, timings: Timings, num_cached_tokens: int) -> None:
        ticket = choice.ticket
        del self._choices[choice.key]
        ticket.keys.discard(choice.key)
        ticket.num_output_tokens += choice.text.num_output_tokens
        ticket.timings.append(timings)
        ticket.num_cached_tokens = max(ticket.num_cached_tokens, num_cached_tokens)
        reason = chunk.finish_reason if chunk is not None and chunk.finish_reason else FinishReason.STOP
        ticket.reasons.append(reason)
        if ticket.is_done and self.tickets.pop(ticket.request.request_id, None) is not None:
            self._report(ticket, chunk.error if chunk is not None else None)

    def _report(self, ticket: Ticket, error: str | None) -> None:
        if self._on_finished is not None:
            self._on_finished(ticket, error)


def _split(chunk: OutputChunk) -> tuple[OutputChunk | None, OutputChunk]:
    """What a last chunk says, which goes out at once, and that it was the last, which waits for the engine."""
    ending = OutputChunk(
        index=chunk.index,
        text="",
        token_ids=(),
        logprobs=None if chunk.logprobs is None else (),
        finish_reason=chunk.finish_reason,
        stop_reason=chunk.stop_reason,
        error=chunk.error,
    )
    if not chunk.text and not chunk.token_ids:
        return None, ending
    return msgspec.structs.replace(chunk, finish_reason=None, stop_reason=None, error=None), ending


def _broken(choice: _Choice, error: Exception) -> OutputChunk:
    message = f"making text failed: {type(error).__name__}: {error}"
    return OutputChunk(
        index=choice.index,
        text="",
        token_ids=(),
        finish_reason=FinishReason.ERROR,
        error=message,
    )
