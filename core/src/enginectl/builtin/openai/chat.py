"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from enginectl.builtin.openai.answers import ChatAnswer, ChatChoice, ChatMessage
from enginectl.builtin.openai.features import refuse_unsupported
from enginectl.builtin.openai.generation import Collected, Job
from enginectl.builtin.openai.logprobs import chat_logprobs, prompt_logprobs
from enginectl.builtin.openai.messages import Message, text_of
from enginectl.builtin.openai.params import (
    check_num_logprobs,
    chosen_max_tokens,
    sampling_params,
)
from enginectl.builtin.openai.prompts import fit
from enginectl.builtin.openai.protocol import ChatRequest
from enginectl.builtin.openai.route import GenerationRoute
from enginectl.builtin.openai.sse import Extras, Shape
from enginectl.errors import RequestError
from enginectl.http.record import RequestRecord
from enginectl.types import OutputChunk, SamplingParams


class ChatCompletions(GenerationRoute[ChatRequest]):
    """The route's handler."""

    body_type = ChatRequest
    operation = "chat"

    async def _job(self, body: ChatRequest, record: RequestRecord) -> Job:
        info = self._ctx.client.info
        adapter = await self._names.resolve(body.model)
        refuse_unsupported(body, info)
        asked = chosen_max_tokens(body, body.max_completion_tokens)
        if asked == 0:
            raise RequestError("max_tokens must be at least 1", param="max_tokens")
        params = self._params(body, asked)
        prompt, messages = await self._prompts.from_chat(body)
        prompt = fit(prompt, info, truncate=body.truncate_prompt_tokens, max_tokens=asked, param="messages")
        if body.request_id is not None:
            record.name(body.request_id)
        answer_id = f"chatcmpl-{record.request_id}"
        return Job(
            id=answer_id,
            model=body.model or self._names.base[0],
            record=record,
            prompts=[prompt],
            requests=[self._request(body, record, f"{answer_id}{record.suffix}", prompt, params, adapter)],
            n=params.n,
            echo=[self._echoed(messages)] if body.echo else None,
        )

    def _params(self, body: ChatRequest, max_tokens: int | None) -> SamplingParams:
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        max_logprobs = self._ctx.engine.max_logprobs
        check_num_logprobs("top_logprobs", body.top_logprobs, max_logprobs)
        check_num_logprobs("prompt_logprobs", body.prompt_logprobs, max_logprobs)
        return sampling_params(
            body,
            self._ctx.client.info,
            self._ctx.tokenizer,
            max_tokens=max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
        )

    def _echoed(self, messages: list[Message]) -> str:
        """With echo, the answer begins with the last message, which must be the assistant's."""
        role = messages[-1]["role"]
        if role != self._ctx.server.response_role:
            raise RequestError(
                f"echo repeats the last message when its role is {self._ctx.server.response_role!r}; it is {role!r}",
                param="echo",
            )
        return text_of(messages[-1])

    def _answer(self, body: ChatRequest, job: Job, choices: list[Collected]) -> ChatAnswer:
        echo = job.echo[0] if job.echo else ""
        role = self._ctx.server.response_role
        entries = choices[0].prompt_logprobs
        return ChatAnswer(
            id=job.id,
            created=job.created,
            model=job.model,
            choices=[
                ChatChoice(
                    index=index,
                    message=ChatMessage(role, echo + choice.text),
                    logprobs=self._logprobs(body, choice.logprobs),
                    finish_reason=choice.finish_reason.value,
                    stop_reason=choice.stop_reason,
                    token_ids=choice.token_ids if body.return_token_ids else UNSET,
                )
                for index, choice in enumerate(choices)
            ],
            usage=job.usage(),
            prompt_logprobs=UNSET
            if body.prompt_logprobs is None
            else prompt_logprobs(entries or (), body.prompt_logprobs, self._texts),
            prompt_token_ids=job.prompts[0].token_ids if body.return_token_ids else UNSET,
        )

    def _logprobs(self, body: ChatRequest, entries: Any) -> Any:
        return chat_logprobs(entries or (), body.top_logprobs or 0, self._texts) if body.logprobs else None

    def _shape(self, body: ChatRequest, job: Job) -> Shape:
        options = body.stream_options
        role = msgspec.json.encode(self._ctx.server.response_role)
        content = msgspec.json.encode(job.echo[0] if job.echo else "")

        def first(index: int, chunk: OutputChunk) -> tuple[bytes, Extras, Extras]:
            of_chunk: Extras = {}
            if index == 0 and body.return_token_ids:
                of_chunk["prompt_token_ids"] = job.prompts[0].token_ids
            if index == 0 and body.prompt_logprobs is not None:
                entries = chunk.prompt_logprobs or ()
                of_chunk["prompt_logprobs"] = prompt_logprobs(entries, body.prompt_logprobs, self._texts)
            return content + b',"role":' + role, {}, of_chunk

        return Shape(
            kind="chat.completion.chunk",
            open=b'"delta":{"content":',
            close=b"}",
            first=first,
            logprobs=(lambda _, chunk: self._logprobs(body, chunk.logprobs)) if body.logprobs else None,
            token_ids=bool(body.return_token_ids),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
        )
