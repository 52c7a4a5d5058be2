"""The Python API: an engine in this process, driven by the caller's own thread.

from enginectl import Engine, SamplingParams
with Engine("path/to/model", max_num_seqs=32) as engine:
for out in engine.generate(["Hello"], SamplingParams(max_tokens=16)):
print(out.outputs[0].text)
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import wait
from types import TracebackType
from typing import Any, Self

import msgspec

from enginectl.api_side import ApiSide
from enginectl.builtin.sampling.validation import check_strings
from enginectl.config import EngineConfig
from enginectl.engine.audience import Audience
from enginectl.engine.router import OutputRouter, Ticket
from enginectl.engine.validate import validate_request
from enginectl.errors import ConfigError, EnginectlError, RequestError, unknown
from enginectl.interfaces.adapter import AdapterBackend, AdapterInfo
from enginectl.plugins import PluginHost
from enginectl.provider import Role
from enginectl.types import (
    Completion,
    EngineStats,
    FinishReason,
    GenerateRequest,
    OutputChunk,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    Usage,
)

log = logging.getLogger("enginectl.client")

Prompt = str | Sequence[int]

_STALLED_WAIT_S = 0.001
"""A pause when waiting requests need something that is not there yet, such as a compiled grammar."""

_REQUEST_FIELDS = ("adapter", "priority", "cache_salt", "tenant", "timeout_s", "call")
"""Fields of `GenerateRequest` that a caller may give by keyword; the others are made here."""

OBJECT_ROLES = frozenset(
    {
        Role.SCHEDULER,
        Role.KV_ALLOCATOR,
        Role.PREFIX_INDEX,
        Role.ATTENTION,
        Role.SAMPLER,
        Role.SPECULATOR,
        Role.ADAPTER,
        Role.GRAMMAR,
        Role.EXECUTOR,
        Role.LOGITS_PROCESSOR,
        Role.MODEL_FAMILY,
        Role.OP_SET,
        Role.WEIGHTS,
        Role.DETOKENIZER,
        Role.OBSERVER,
    }
)
"""Roles for which `Engine` takes an object instead of a provider's name."""


class Engine:
    """An assembled engine. Use as a context manager, or call `close()`.

    model: directory or file. plugins: entry points that must serve. Any role may be given by keyword: a string selects
    a provider by name (`attention="torch"`), an object is used as it is (`scheduler=MyScheduler()`), no entry point
    needed (OBJECT_ROLES are those that take one). Every other keyword is a field of `EngineConfig`, spelt as on the
    command line where that has words of its own: `kv_cache_memory_bytes="4GiB"`,
    `speculative_config={"method": "ngram"}`.
    Raises EnginectlError (see `enginectl.errors`) with what was asked, found, allowed, and what to do.
    """

    def __init__(self, model: str, *, plugins: Sequence[str] = (), **options: Any) -> None:
        from enginectl.config_sources import engine_config

        roles: dict[str, str] = dict(options.pop("roles", {}))
        overrides: dict[str, Any] = {}
        for role in Role:
            part = options.pop(role.value, None)
            if isinstance(part, str):
                roles[role.value] = part
            elif part is not None:
                if role not in OBJECT_ROLES:
                    names = ", ".join(sorted(OBJECT_ROLES))
                    raise ConfigError(
                        f"{role.value}={type(part).__name__}(…): this role takes no object, only a name; roles that "
                        f"take one: {names}. Register a provider from a plugin instead"
                    )
                overrides[role.value] = part
        for name in options:
            if name not in EngineConfig.__struct_fields__:
                raise ConfigError(unknown("option", name, (*EngineConfig.__struct_fields__, *Role)))
        self._start(engine_config(str(model), plugins=tuple(plugins), roles=roles, **options), overrides)

    def _start(self, config: EngineConfig, overrides: dict[str, Any]) -> None:
        from enginectl.compose import compose
        from enginectl.engine.threads import use_threads
        from enginectl.machine import detect_machine

        machine = detect_machine()
        host = PluginHost(config.plugins, only_named=config.only_plugins)
        use_threads(config, machine)
        detokenizer = overrides.pop(Role.DETOKENIZER.value, None)
        observer = overrides.pop(Role.OBSERVER.value, None)
        self._assembled = compose(config, machine=machine, host=host, overrides=overrides)
        try:
            self.config = self._assembled.config
            self.info = self._assembled.info
            self.core = self._assembled.core
            self._api = ApiSide(self.config, host, machine)
            self._tokenizer = self._api.load_tokenizer(self.info)
            self._host = host
            observers = [*self._api.all_of(Role.OBSERVER).values(), *([observer] if observer else [])]
            self._audience = Audience(host, observers)
            self._router = OutputRouter(
                detokenizer or self._api.detokenizer(self.info),
                self.info,
                seed=config.seed,
                on_finished=self._audience.finished,
            )
        except BaseException:
            self._assembled.close()
            raise
        self._ids = itertools.count(1)
        self._is_closed = False

    # -- use -----------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The model's `enginectl.builtin.tokenizer.Tokenizer`, or None."""
        return self._tokenizer

    def stats(self) -> EngineStats:
        """Rows, blocks and totals now."""
        return self.core.stats()

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """Every adapter that a request may name."""
        self._refuse_if_closed()
        backend: AdapterBackend | None = self._assembled.parts.get("adapter")
        return () if backend is None else backend.list()

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        """Load an adapter, or load one anew in place. Raises RequestError with the reason, and nothing has changed."""
        return msgspec.convert(
            self._control("load_adapter", {"name": name, "path": str(path), "replace": replace}), AdapterInfo
        )

    def unload_adapter(self, name: str) -> None:
        """Take no new requests for an adapter; those that are open end as they would have."""
        self._control("unload_adapter", {"name": name})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Complete one or several prompts (text or token ids), batched; results in the order of the prompts.

        params: one for all or one each; the default is greedy with what fits. fields: fields of `GenerateRequest` for
        all of them (adapter, priority, cache_salt, timeout_s). Raises RequestError, before anything runs, if one of
        them is wrong; a prompt that fails on the way has `error` set and what it had so far.
        """
        indexed = sorted(self.generate_as_completed(prompts, params, **fields), key=lambda pair: pair[0])
        return [output for _, output in indexed]

    def generate_as_completed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Any,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Like `generate`, but yields (index of the prompt, result) as each is finished."""
        self._refuse_if_closed()
        refuse_unknown_fields(fields)
        return self._completed(prompts, params, fields)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **fields: Any) -> Iterator[OutputChunk]:
        """Complete one prompt, yielding chunks as they come. Leaving early aborts it."""
        self._refuse_if_closed()
        refuse_unknown_fields(fields)
        return self._streamed(prompt, params, fields)

    def chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **template_kwargs: Any
    ) -> RequestOutput:
        """Answer a conversation through the model's chat template.

        template_kwargs: fields of `GenerateRequest`, as for `generate`; every other is a variable for the template. A
        field of `SamplingParams` is refused with RequestError: it belongs in params.
        """
        self._refuse_if_closed()
        refuse_sampling_fields(template_kwargs)
        if self._tokenizer is None:
            raise EnginectlError("the model has no tokenizer, so it cannot chat; give token ids to generate()")
        fields = {name: template_kwargs.pop(name) for name in _REQUEST_FIELDS if name in template_kwargs}
        text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, **template_kwargs)
        return self.generate([self._tokenizer.encode_chat(text)], params, **fields)[0]

    def close(self) -> None:
        """Free the engine. Using it afterwards raises EnginectlError (`stats()` stays); closing again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True  # first: what is freed half-way must not be used either
        self._assembled.close()
        self._audience.close()

    def __enter__(self) -> Self:
        """The engine itself."""
        self._refuse_if_closed()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close."""
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise EnginectlError("the engine is closed; make a new one")

    def _completed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        fields: dict[str, Any],
    ) -> Iterator[tuple[int, RequestOutput]]:
        requests = self._requests(prompts, params, fields)
        open_tickets = {ticket: i for i, ticket in enumerate(self._submit(requests))}
        collected: dict[Ticket, list[OutputChunk]] = {ticket: [] for ticket in open_tickets}
        news: list[Ticket] = []
        for ticket in open_tickets:
            ticket.wake = functools.partial(news.append, ticket)
        try:
            while open_tickets:
                self._step()
                woken, news[:] = dict.fromkeys(news), []
                for ticket in woken:  # thousands may wait; those that run have news
                    if ticket not in open_tickets:
                        continue
                    collected[ticket] += ticket.take()
                    if ticket.is_done:
                        yield open_tickets.pop(ticket), assemble(ticket, collected.pop(ticket))
        finally:
            self._abort(open_tickets)

    def _streamed(self, prompt: Prompt, params: SamplingParams | None, fields: dict[str, Any]) -> Iterator[OutputChunk]:
        (ticket,) = self._submit(self._requests([prompt], params, fields))
        try:
            while not ticket.is_done or ticket.pending:
                if not ticket.pending:
                    self._step()
                yield from ticket.take()
        finally:
            self._abort([ticket])

    def _requests(
        self, prompts: Any, params: SamplingParams | Sequence[SamplingParams] | None, fields: dict[str, Any]
    ) -> list[GenerateRequest]:
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
            prompts = [prompts]
        chosen = params if params is not None else SamplingParams(temperature=0.0)
        each = [chosen] * len(prompts) if isinstance(chosen, SamplingParams) else list(chosen)
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts and {len(each)} sampling parameters; give one, or one each")
        ids = [self._encode(prompt) for prompt in prompts]
        offsets = duplicate_offsets(ids, each)
        made, adapters = [], tuple(info.name for info in self.adapters)
        for prompt, one, offset in zip(ids, each, offsets, strict=True):
            request = GenerateRequest(
                request_id=f"request-{next(self._ids)}",
                prompt_token_ids=prompt,
                params=self._with_bad_words(one),
                choice_offset=offset,
                **fields,
            )
            validate_request(request, self.info, max_logprobs=self.config.max_logprobs, adapters=adapters)
            self._host.hook.enginectl_request_admitted(request=request)
            made.append(request)
        return made

    def _control(self, name: str, arguments: dict[str, Any]) -> Any:
        from enginectl.engine.control import ControlDesk, NotYet

        self._refuse_if_closed()
        desk = ControlDesk(self._assembled)
        while True:
            try:
                return desk.handle(name, arguments)
            except NotYet as pending:
                wait([pending.future])

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self._tokenizer is None:
            raise RequestError("the model has no tokenizer; give the prompt as token ids", param="prompt")
        return self._tokenizer.encode(prompt)

    def _with_bad_words(self, params: SamplingParams) -> SamplingParams:
        if not params.bad_words:
            return params
        if self._tokenizer is None:
            raise RequestError("the model has no tokenizer; give bad_word_ids instead of bad_words", param="bad_words")
        check_strings("bad_words", params.bad_words)
        ids = (*params.bad_word_ids, *self._tokenizer.bad_word_ids(params.bad_words))
        return msgspec.structs.replace(params, bad_word_ids=ids)

    def _submit(self, requests: Sequence[GenerateRequest]) -> list[Ticket]:
        tickets = []
        for request in requests:
            ticket, specs = self._router.open(request, _nothing)
            for spec in specs:
                self.core.add(spec)
            tickets.append(ticket)
        return tickets

    def _step(self) -> None:
        self._refuse_if_closed()  # by whoever reads a stream that was begun before
        for outputs in self.core.step():
            if outputs.stats is not None:
                self._audience.stats(outputs.stats)
            stopped = self._router.dispatch(outputs)
            if stopped:
                self.core.abort(stopped)
        if self.core.has_work and not self.core.made_progress:
            time.sleep(_STALLED_WAIT_S)

    def _abort(self, tickets: Sequence[Ticket] | dict[Ticket, int]) -> None:
        if self._is_closed:
            return
        for ticket in tickets:
            self.core.abort(self._router.close(ticket))
        if self.core.has_work:
            self._step()


def refuse_sampling_fields(fields: Iterable[str]) -> None:
    """Raise RequestError for a keyword of a call that belongs in its SamplingParams."""
    for name in fields:
        if name in SamplingParams.__struct_fields__:
            raise RequestError(
                f"{name} is a sampling parameter, not a keyword of this call; pass SamplingParams({name}=…)", param=name
            )


def refuse_unknown_fields(fields: Iterable[str]) -> None:
    """Raise RequestError for a keyword of a call that is no field of its GenerateRequest."""
    refuse_sampling_fields(fields)
    for name in fields:
        if name not in _REQUEST_FIELDS:
            raise RequestError(unknown("keyword", name, _REQUEST_FIELDS), param=name)


def duplicate_offsets(prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[int]:
    """The first choice number of each prompt of a call: equal prompts draw different noise from one seed, and a prompt's
    noise does not depend on which others came with it.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    offsets = []
    for prompt, one in zip(prompts, params, strict=True):
        key = tuple(prompt)
        offsets.append(seen[key])
        seen[key] += one.n
    return offsets


def assemble(ticket: Ticket, chunks: Sequence[OutputChunk]) -> RequestOutput:
    """A finished request from its chunks."""
    completions = [_completion(index, chunks) for index in range(ticket.request.params.n)]
    error = next((chunk.error for chunk in chunks if chunk.error is not None), None)
    if ticket.failure is not None:
        error = str(ticket.failure)
    return RequestOutput(
        request_id=ticket.request.request_id,
        prompt_token_ids=ticket.request.prompt_token_ids,
        outputs=tuple(completions),
        usage=Usage(len(ticket.request.prompt_token_ids), ticket.num_output_tokens, ticket.num_cached_tokens),
        prompt_logprobs=next((c.prompt_logprobs for c in chunks if c.prompt_logprobs is not None), None),
        error=error,
    )


def _completion(index: int, chunks: Sequence[OutputChunk]) -> Completion:
    mine = [chunk for chunk in chunks if chunk.index == index]
    last = mine[-1] if mine else None
    logprobs: list[TokenLogprobs] = []
    for chunk in mine:
        logprobs += chunk.logprobs or ()
    return Completion(
        index=index,
        text="".join(chunk.text for chunk in mine),
        token_ids=tuple(token for chunk in mine for token in chunk.token_ids),
        finish_reason=(last.finish_reason if last is not None else None) or FinishReason.ABORT,
        stop_reason=last.stop_reason if last is not None else None,
        logprobs=tuple(logprobs) if any(chunk.logprobs is not None for chunk in mine) else None,
    )


def _nothing() -> None:
    """The synchronous caller looks for itself."""
