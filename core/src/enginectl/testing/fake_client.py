"""An engine client without an engine, and a tokenizer of bytes: for tests of frontends and of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from enginectl.engine.client import EngineClient, EngineInfo, EngineState
from enginectl.errors import OverloadedError
from enginectl.types import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    OutputChunk,
    Timings,
    TokenLogprobs,
)

BOS, EOS, FIRST_BYTE = 1, 2, 3
SPECIAL = {0: "<pad>", BOS: "<s>", EOS: "</s>"}

Script = Callable[[GenerateRequest], Iterable[list[OutputChunk] | Exception]]
"""What `generate` yields for a request, list by list; an exception is raised in its place."""


class ByteTokenizer:
    """One token a byte, after three special tokens."""

    vocab_size = FIRST_BYTE + 256
    bos_token_id = BOS
    eos_token_id = EOS
    special_ids = frozenset(SPECIAL)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """BOS, if wanted, and the bytes."""
        ids = [byte + FIRST_BYTE for byte in text.encode()]
        return [BOS, *ids] if add_special_tokens else ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """As encode, for several texts."""
        return [self.encode(text, add_special_tokens) for text in texts]

    def encode_chat(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """A rendered chat with one BOS in front."""
        written = text.startswith("<s>")
        return self.encode(text.removeprefix("<s>"), written or add_special_tokens is not False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        kept = (token_id for token_id in ids if token_id >= FIRST_BYTE or not skip_special_tokens)
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token."""
        return SPECIAL[token_id].encode() if token_id < FIRST_BYTE else bytes([token_id - FIRST_BYTE])

    def id_to_token(self, token_id: int) -> str | None:
        """The token as text."""
        return SPECIAL.get(token_id) or f"<0x{token_id - FIRST_BYTE:02X}>"

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The bytes of each word."""
        return tuple(tuple(self.encode(word, False)) for word in words)

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """`role: content` lines after the template's text and the further variables in order of their names."""
        if any(message["content"] == "raise" for message in messages):
            raise ValueError("the template does not like this")
        head = (chat_template or "") + "".join(f"[{name}={kwargs[name]}]" for name in sorted(kwargs))
        head += f"[tools={len(tools)}]" if tools else ""
        head += f"[documents={len(documents)}]" if documents else ""
        lines = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
        return head + lines + ("\nassistant: " if add_generation_prompt else "" if continue_final_message else "\n")


class FakeClient(EngineClient):
    """Answers every request by a script, and remembers what it was asked.

    requests: every GenerateRequest. closed: ids whose iterator was closed before its end, as after a disconnect.
    controls: control messages; `answers` has their answers.
    """

    def __init__(self, script: Script | None = None, info: EngineInfo | None = None) -> None:
        self.info = info or fake_info()
        self.script = script or say("Hello, world!")
        self.requests: list[GenerateRequest] = []
        self.closed: list[str] = []
        self.num_open = 0
        self.controls: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}
        self.gate: asyncio.Event | None = None
        self.stats_now = EngineStats()
        self._state = EngineState.RUNNING
        self._reason = ""

    @property
    def state(self) -> EngineState:
        """As `set_state` left it."""
        return self._state

    @property
    def reason(self) -> str:
        """As `set_state` left it."""
        return self._reason

    def set_state(self, state: EngineState, reason: str) -> None:
        """Pretend."""
        self._state, self._reason = state, reason

    async def generate(self, request: GenerateRequest) -> AsyncIterator[list[OutputChunk]]:
        """The script's lists; with a gate set, each waits for it."""
        if self._state is EngineState.DRAINING:
            raise OverloadedError("the server is shutting down")
        self.requests.append(request)
        self.num_open += 1
        ended = False
        try:
            for item in self.script(request):
                if self.gate is not None:
                    await self.gate.wait()
                await asyncio.sleep(0)
                if isinstance(item, Exception):
                    ended = True
                    raise item
                yield item
            ended = True
        finally:
            self.num_open -= 1
            if not ended:
                self.closed.append(request.request_id)

    async def abort(self, request_id: str) -> None:
        """Remembered as closed."""
        self.closed.append(request_id)

    def stats(self) -> EngineStats:
        """`stats_now`."""
        return self.stats_now

    async def control(self, name: str, arguments: dict[str, Any] | None = None) -> Any:
        """The prepared answer; an exception is raised."""
        self.controls.append((name, arguments or {}))
        answer = self.answers.get(name)
        if isinstance(answer, Exception):
            raise answer
        return answer(arguments or {}) if callable(answer) else answer

    async def drain(self, timeout_s: float) -> None:
        """Refuse what is new and wait for what is open."""
        self.set_state(EngineState.DRAINING, "the server is shutting down")
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.num_open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        if self.gate is not None:
            self.gate.set()

    async def close(self) -> None:
        """Nothing to free."""


def fake_info(**changes: Any) -> EngineInfo:
    """What a small engine would report."""
    values: dict[str, Any] = {
        "model": "fake/model",
        "architecture": "FakeForCausalLM",
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 256,
        "vocab_size": ByteTokenizer.vocab_size,
        "eos_token_ids": (EOS,),
        "bos_token_id": BOS,
    }
    return EngineInfo(**(values | changes))


def say(text: str, *, tokens_a_chunk: int = 1, reason: FinishReason = FinishReason.STOP) -> Script:
    """A script that answers with a text, for every choice, as far as max_tokens lets it."""

    def script(request: GenerateRequest) -> Iterable[list[OutputChunk]]:
        ids = ByteTokenizer().encode(text, add_special_tokens=False)
        limit = request.params.max_tokens
        cut, end = (ids[:limit], FinishReason.LENGTH) if limit is not None and limit < len(ids) else (ids, reason)
        starts = range(0, max(1, len(cut)), tokens_a_chunk)
        emitted = 0
        for start in starts:
            new = cut[start : start + tokens_a_chunk]
            # Only whole characters are shown, as a detokenizer does.
            whole = _whole_characters(cut[: start + len(new)], last=start == starts[-1])
            piece, emitted = whole[emitted:], len(whole)
            yield [
                _chunk(request, index, piece, new, start == 0, end if start == starts[-1] else None)
                for index in range(request.params.n)
            ]

    return script


def _whole_characters(ids: list[int], *, last: bool) -> str:
    raw = bytes(token_id - FIRST_BYTE for token_id in ids)
    return raw.decode(errors="replace" if last else "ignore")


def _chunk(
    request: GenerateRequest, index: int, text: str, ids: list[int], first: bool, reason: FinishReason | None
) -> OutputChunk:
    params, prompt = request.params, request.prompt_token_ids
    return OutputChunk(
        index=index,
        text=text,
        token_ids=tuple(ids),
        logprobs=tuple(_logprobs(token_id, params.logprobs) for token_id in ids)
        if params.logprobs is not None
        else None,
        prompt_logprobs=(None, *(_logprobs(token_id, params.prompt_logprobs) for token_id in prompt[1:]))
        if first and params.prompt_logprobs is not None
        else None,
        finish_reason=reason,
        num_cached_tokens=len(prompt) // 2 if reason is not None else 0,
        timings=Timings(1.0, 1.25, 1.5, 2.5, 0) if reason is not None else None,
    )


def _logprobs(token_id: int, num_top: int | None) -> TokenLogprobs:
    tops = tuple((token_id + place) % ByteTokenizer.vocab_size for place in range(num_top or 0))
    return TokenLogprobs(token_id, -0.5, 1, tops, tuple(-0.5 - place for place in range(len(tops))))
