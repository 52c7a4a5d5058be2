"""What the routes that generate share: a body becomes a job, whose answer is streamed or whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from enginectl.builtin.openai.generation import Collected, Job, call_of, collect
from enginectl.builtin.openai.logprobs import TokenTexts
from enginectl.builtin.openai.names import ModelNames
from enginectl.builtin.openai.prompts import Prompt, Prompts
from enginectl.builtin.openai.protocol import GenerationFields
from enginectl.builtin.openai.sse import Shape, event_frames
from enginectl.http.body import JsonBody
from enginectl.http.errors import json_response
from enginectl.http.record import RequestRecord, record_of
from enginectl.http.stream import EventStream, until_disconnect
from enginectl.interfaces.frontend import FrontendContext
from enginectl.types import GenerateRequest, SamplingParams

Body = TypeVar("Body", bound=GenerationFields)


class GenerationRoute(ABC, Generic[Body]):
    """A handler. body_type: what it reads. operation: its name for observers."""

    body_type: ClassVar[type[GenerationFields]]
    operation: ClassVar[str]

    def __init__(self, ctx: FrontendContext, names: ModelNames, prompts: Prompts, texts: TokenTexts) -> None:
        self._ctx = ctx
        self._names = names
        self._prompts = prompts
        self._texts = texts
        self._body: JsonBody[Body] = JsonBody(self.body_type)  # type: ignore[arg-type]

    async def handle(self, request: Request) -> Response:
        """Answer one request, streamed or whole."""
        body = await self._body.read(request)
        job = await self._job(body, record_of(request.scope))
        client = self._ctx.client
        if body.stream:
            return EventStream(event_frames(client, job, self._shape(body, job)))
        async with until_disconnect(request.receive):
            choices = await collect(client, job)
        return json_response(self._answer(body, job, choices))

    @abstractmethod
    async def _job(self, body: Body, record: RequestRecord) -> Job:
        """What is to be run. Raises RequestError."""

    @abstractmethod
    def _answer(self, body: Body, job: Job, choices: list[Collected]) -> msgspec.Struct:
        """The whole answer."""

    @abstractmethod
    def _shape(self, body: Body, job: Job) -> Shape:
        """How its events look."""

    def _request(
        self,
        body: Body,
        record: RequestRecord,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        adapter: str | None,
        *,
        choice_offset: int = 0,
    ) -> GenerateRequest:
        """One prompt for the engine, with what the body and the caller say about it."""
        return GenerateRequest(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            params=params,
            adapter=adapter,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            tenant=record.tenant or body.user or adapter or "",
            timeout_s=body.timeout,
            call=call_of(body, record, self.operation, self._names),
            choice_offset=choice_offset,
        )
