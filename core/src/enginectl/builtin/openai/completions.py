"""POST /v1/completions."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from enginectl.builtin.openai.answers import PromptLogprobs, TextAnswer, TextChoice, TextLogprobs
from enginectl.builtin.openai.features import refuse_unsupported
from enginectl.builtin.openai.generation import Collected, Job
from enginectl.builtin.openai.logprobs import TextOffsets, prompt_logprobs, text_logprobs
from enginectl.builtin.openai.params import check_num_logprobs, sampling_params
from enginectl.builtin.openai.prompts import Prompt, fit, with_text
from enginectl.builtin.openai.protocol import CompletionRequest
from enginectl.builtin.openai.route import GenerationRoute
from enginectl.builtin.openai.sse import Extras, Shape
from enginectl.errors import RequestError
from enginectl.http.record import RequestRecord
from enginectl.types import OutputChunk, SamplingParams, TokenLogprobs


class TextCompletions(GenerationRoute[CompletionRequest]):
    """The route's handler."""

    body_type = CompletionRequest
    operation = "text_completion"

    async def _job(self, body: CompletionRequest, record: RequestRecord) -> Job:
        info = self._ctx.client.info
        adapter = await self._names.resolve(body.model)
        refuse_unsupported(body, info)
        drop_output = self._wants_prompt_only(body)
        asked = 1 if drop_output else body.max_tokens
        params = self._params(body, asked)
        prompts = [
            fit(prompt, info, truncate=body.truncate_prompt_tokens, max_tokens=asked)
            for prompt in await self._read_prompts(body)
        ]
        if body.request_id is not None:
            record.name(body.request_id)
        answer_id = f"cmpl-{record.request_id}"
        engine_id = f"{answer_id}{record.suffix}"
        engine_ids = [f"{engine_id}-{place}" for place in range(len(prompts))] if len(prompts) > 1 else [engine_id]
        requests = [
            self._request(body, record, request_id, prompt, params, adapter, choice_offset=place * params.n)
            for place, (prompt, request_id) in enumerate(zip(prompts, engine_ids, strict=True))
        ]
        return Job(
            id=answer_id,
            model=body.model or self._names.base[0],
            record=record,
            prompts=prompts,
            requests=requests,
            n=params.n,
            echo=[self._echoed(prompt, params) for prompt in prompts] if body.echo else None,
            drop_output=drop_output,
        )

    def _wants_prompt_only(self, body: CompletionRequest) -> bool:
        if body.max_tokens != 0:
            return False
        if not body.echo:
            raise RequestError("max_tokens may be 0 only with echo: true", param="max_tokens")
        return True

    def _params(self, body: CompletionRequest, max_tokens: int | None) -> SamplingParams:
        max_logprobs = self._ctx.engine.max_logprobs
        check_num_logprobs("logprobs", body.logprobs, max_logprobs)
        check_num_logprobs("prompt_logprobs", body.prompt_logprobs, max_logprobs)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise RequestError(
                f"best_of ({body.best_of}) must equal n ({body.n or 1}): every choice is returned", param="best_of"
            )
        of_prompt = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            of_prompt = max(body.logprobs, of_prompt or 0)
        return sampling_params(
            body,
            self._ctx.client.info,
            self._ctx.tokenizer,
            max_tokens=max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=of_prompt,
        )

    async def _read_prompts(self, body: CompletionRequest) -> list[Prompt]:
        """Prompts in the order they were sent; texts and lists of ids may be mixed."""
        given: list[str | int | list[int]] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        if given and all(isinstance(item, int) for item in given):
            given = [[item for item in given if isinstance(item, int)]]
        if not given:
            raise RequestError("the prompt is empty", param="prompt", code="empty_prompt")
        most = max(1, self._ctx.engine.max_num_queued_requests)
        if len(given) * (body.n or 1) > most:
            raise RequestError(
                f"{len(given)} prompts with n {body.n or 1} are more than the server queues at once, {most}; "
                "send them in several requests",
                param="prompt",
            )
        add_special_tokens = True if body.add_special_tokens is None else body.add_special_tokens
        texts = [item for item in given if isinstance(item, str)]
        from_texts = iter(await self._prompts.from_texts(texts, add_special_tokens=add_special_tokens) if texts else ())
        return [next(from_texts) if isinstance(item, str) else self._from_ids(item) for item in given]

    def _from_ids(self, item: int | list[int]) -> Prompt:
        if isinstance(item, int):
            raise RequestError("prompt mixes token ids with prompts; put the ids into a list", param="prompt")
        vocab_size = self._ctx.client.info.vocab_size
        if item and max(item) >= vocab_size:
            raise RequestError(
                f"the prompt has token {max(item)}; this model's tokens are 0 to {vocab_size - 1}", param="prompt"
            )
        return Prompt(item)

    def _echoed(self, prompt: Prompt, params: SamplingParams) -> str:
        if prompt.text is not None:
            return prompt.text
        text = with_text(self._ctx.tokenizer).decode(prompt.token_ids, skip_special_tokens=params.skip_special_tokens)
        assert isinstance(text, str), "decoding gives text"
        return text

    # Whole answers

    def _answer(self, body: CompletionRequest, job: Job, choices: list[Collected]) -> TextAnswer:
        answers = []
        for index, choice in enumerate(choices):
            place = index // job.n
            prompt, echo = job.prompts[place], job.echo[place] if job.echo else ""
            answers.append(
                TextChoice(
                    index=index,
                    text=echo + choice.text,
                    logprobs=self._whole_logprobs(body, job, place, choice),
                    finish_reason=choice.finish_reason.value,
                    stop_reason=choice.stop_reason,
                    token_ids=choice.token_ids if body.return_token_ids else UNSET,
                    prompt_token_ids=prompt.token_ids if body.return_token_ids else UNSET,
                    prompt_logprobs=self._of_prompt(body, choice.prompt_logprobs)
                    if body.prompt_logprobs is not None
                    else UNSET,
                )
            )
        return TextAnswer(id=job.id, created=job.created, model=job.model, choices=answers, usage=job.usage())

    def _whole_logprobs(self, body: CompletionRequest, job: Job, place: int, choice: Collected) -> TextLogprobs | None:
        if body.logprobs is None:
            return None
        pieces = [self._echo_logprobs(body, job, place, choice.prompt_logprobs)] if job.echo else []
        offsets = self._offsets(job, place)
        pieces.append(
            text_logprobs(
                choice.logprobs,
                choice.token_ids,
                offsets.take(choice.token_ids, choice.text),
                body.logprobs,
                self._texts,
            )
        )
        return TextLogprobs(
            [offset for piece in pieces for offset in piece.text_offset],
            [logprob for piece in pieces for logprob in piece.token_logprobs],
            [token for piece in pieces for token in piece.tokens],
            [top for piece in pieces for top in piece.top_logprobs],
        )

    def _echo_logprobs(
        self, body: CompletionRequest, job: Job, place: int, entries: tuple[TokenLogprobs | None, ...] | None
    ) -> TextLogprobs:
        assert job.echo is not None, "only called with echo"
        prompt, text = job.prompts[place], job.echo[place]
        offsets = self._echo_offsets(job, place)
        places = offsets.take(prompt.token_ids, text)
        values = entries or (None,) * len(prompt.token_ids)
        return text_logprobs(values, prompt.token_ids, places, body.logprobs or 0, self._texts)

    def _echo_offsets(self, job: Job, place: int) -> TextOffsets:
        """The echoed text lacks what was put in front of a prompt's text, and what decoding skips of token ids."""
        prompt, params = job.prompts[place], job.requests[place].params
        if prompt.text is None:
            unseen = self._texts.special_ids if params.skip_special_tokens else frozenset()
            return TextOffsets(self._texts, unseen=unseen, starts_text=True)
        first = prompt.token_ids[0]
        added = first in self._texts.special_ids and not prompt.text.startswith(self._texts.get(first)[0])
        return TextOffsets(self._texts, num_unseen=int(added), starts_text=True)

    def _offsets(self, job: Job, place: int) -> TextOffsets:
        params = job.requests[place].params
        return TextOffsets(
            self._texts,
            start=len(job.echo[place]) if job.echo else 0,
            unseen=self._texts.special_ids if params.skip_special_tokens else frozenset(),
        )

    def _of_prompt(self, body: CompletionRequest, entries: tuple[TokenLogprobs | None, ...] | None) -> PromptLogprobs:
        return prompt_logprobs(entries or (), body.prompt_logprobs or 0, self._texts)

    # Streams

    def _shape(self, body: CompletionRequest, job: Job) -> Shape:
        options = body.stream_options
        offsets = [self._offsets(job, index // job.n) for index in range(job.num_choices)]

        def first(index: int, chunk: OutputChunk) -> tuple[bytes, Extras, Extras] | None:
            place = index // job.n
            members: Extras = {}
            if body.return_token_ids:
                members["prompt_token_ids"] = job.prompts[place].token_ids
            if body.prompt_logprobs is not None:
                members["prompt_logprobs"] = self._of_prompt(body, chunk.prompt_logprobs)
            if job.echo is None:
                return (b'""', members, {}) if members else None
            if body.logprobs is not None:
                members["logprobs"] = self._echo_logprobs(body, job, place, chunk.prompt_logprobs)
            return msgspec.json.encode(job.echo[place]), members, {}

        def logprobs(index: int, chunk: OutputChunk) -> TextLogprobs:
            places = offsets[index].take(chunk.token_ids, chunk.text)
            return text_logprobs(chunk.logprobs or (), chunk.token_ids, places, body.logprobs or 0, self._texts)

        return Shape(
            kind="text_completion",
            open=b'"text":',
            close=b"",
            first=first,
            logprobs=logprobs if body.logprobs is not None else None,
            token_ids=bool(body.return_token_ids),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
        )
