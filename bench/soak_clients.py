"""The clients of the soak: some check every token, some leave, some send garbage, some read slowly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from enginectl.loadtest.answers import Answer
from enginectl.loadtest.client import Client, Outcome
from enginectl.loadtest.target import Target

COMPLETIONS = "/v1/completions"
HANG_S = 90.0
"""No answer may take longer, restart of the engine included."""

_PAUSE_S = 0.2
_MAX_FAILURES = 50
_NUM_SEEDS = 40
_SLOW_BYTES, _SLOW_PAUSE_S, _SLOW_S = 512, 0.05, 40.0

GARBAGE = (
    b"",
    b"{",
    b"\x00\xff\xfe" * 50,
    b"[]",
    b'{"prompt": null}',
    b'{"prompt": [1, 2], "max_tokens": -5}',
    b'{"prompt": [99999999], "max_tokens": 4}',
    b'{"prompt": "x", "temperature": "hot"}',
    b'{"prompt": "x", "max_tokens": 1e400}',
    b'{"model": "nobody", "prompt": "x"}',
    b'{"prompt": "x", "logit_bias": {"a": 1}}',
    b'{"prompt": "x", "max_tokens": 1000000}',
    b'{"prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}",
)
NOT_HTTP = (
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"GET\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n",
)


@dataclass
class Record:
    """What happened. failures: what must not have; each a sentence."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def fail(self, sentence: str) -> None:
        """Note something that must not happen."""
        self.counts["failures"] += 1
        if len(self.failures) < _MAX_FAILURES:
            self.failures.append(sentence)


@dataclass
class Soak:
    """What all clients share. answers: for each prompt its greedy continuation. seeded: answers seen by seed."""

    client: Client
    answers: Sequence[tuple[list[int], list[int]]]
    record: Record
    until_s: float
    random: random.Random
    seeded: dict[int, list[int]] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether to ask no more."""
        return time.monotonic() > self.until_s

    async def ask(self, kind: str, body: dict[str, Any], *, is_stream: bool) -> list[int] | None:
        """The tokens of an answer, or None if the engine died meanwhile; anything else is a failure."""
        answer = Answer(is_stream=is_stream, keep_events=True)
        outcome = await self.client.send("POST", COMPLETIONS, json.dumps(body | {"stream": is_stream}).encode(), answer)
        if outcome.error:
            self._refused(kind, outcome)
            await asyncio.sleep(_PAUSE_S)
            return None
        self.record.counts[f"{kind}: finished"] += 1
        if not is_stream:
            value = json.loads(answer.body)
            return list(value["choices"][0]["token_ids"])
        assert answer.events is not None, "they are kept"
        events = [json.loads(event) for event in answer.events if event != b"[DONE]"]
        return [token for event in events for choice in event["choices"] for token in choice.get("token_ids", ())]

    def _refused(self, kind: str, outcome: Outcome) -> None:
        self.record.counts[f"{kind}: {outcome.error}"] += 1
        if outcome.error not in ("http 503", "stream error"):
            self.record.fail(f"{kind}: {outcome.error}: {outcome.detail}")


async def greedy(soak: Soak) -> None:
    """Greedy answers, streamed or whole, equal the reference token for token."""
    while not soak.is_over:
        prompt, expected = soak.random.choice(soak.answers)
        count = soak.random.randint(1, len(expected))
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        found = await soak.ask("greedy", body, is_stream=soak.random.random() < 0.7)
        if found is not None and found != expected[:count]:
            soak.record.fail(f"greedy: a wrong answer of {count} tokens: {found[:20]} instead of {expected[:20]}")


async def sampled(soak: Soak) -> None:
    """Seeded answers are the same each time, whoever shares the batch and however often the engine died."""
    while not soak.is_over:
        seed = soak.random.randrange(_NUM_SEEDS)
        prompt, expected = soak.answers[seed % len(soak.answers)]
        body = {"prompt": prompt, "max_tokens": len(expected), "temperature": 1.0, "top_p": 0.95, "seed": seed}
        found = await soak.ask("sampled", body | {"ignore_eos": True, "return_token_ids": True}, is_stream=True)
        if found is not None and found != soak.seeded.setdefault(seed, found):
            soak.record.fail(f"sampled: seed {seed} gave {found[:20]} and before {soak.seeded[seed][:20]}")


async def leaver(soak: Soak) -> None:
    """Asks for much, reads a little and goes."""
    while not soak.is_over:
        prompt, _ = soak.random.choice(soak.answers)
        body = {"prompt": prompt, "max_tokens": 1000, "stream": soak.random.random() < 0.7, "ignore_eos": True}
        async with _connection(soak) as (reader, writer):
            writer.write(_post(soak.client.target, json.dumps(body | {"n": soak.random.choice((1, 3))}).encode()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(soak.random.random()):
                    await reader.read(soak.random.randint(1, 4000))
            soak.record.counts["leaver: left"] += 1
        await asyncio.sleep(_PAUSE_S * soak.random.random())


async def vandal(soak: Soak) -> None:
    """Garbage in JSON and HTTP is answered with a 4xx or a closed connection, soon, and never with an internal error."""
    while not soak.is_over:
        if soak.random.random() < 0.3:
            await _not_http(soak)
        else:
            body = soak.random.choice(GARBAGE)
            answer = Answer(is_stream=False)
            outcome = await soak.client.send("POST", COMPLETIONS, body, answer)
            soak.record.counts[f"vandal: {outcome.error or 'accepted'}"] += 1
            if not (400 <= answer.status < 500 or answer.status == 503):
                soak.record.fail(f"vandal: {body[:60]!r} was answered with {outcome.error or 200}: {outcome.detail}")
        await asyncio.sleep(_PAUSE_S)


async def _not_http(soak: Soak) -> None:
    """No HTTP, or half a request and then nothing: the connection is closed by one side without harm."""
    head = soak.client.target.head("POST", COMPLETIONS)
    half = head + b"100\r\n\r\n" + b'{"prompt": '
    data = soak.random.choice((*NOT_HTTP, half))
    async with _connection(soak) as (reader, writer):
        writer.write(data)
        try:
            async with asyncio.timeout(HANG_S if data is not half else _PAUSE_S):
                answer = await reader.read(4000)
        except TimeoutError:
            if data is not half:
                soak.record.fail(f"vandal: {data[:40]!r} got no answer in {HANG_S:g} s")
            answer = b""
        if answer[9:12].startswith(b"5"):
            soak.record.fail(f"vandal: {data[:40]!r} was answered with {answer[:60]!r}")
        soak.record.counts["vandal: not HTTP"] += 1


async def dawdler(soak: Soak) -> None:
    """Reads so slowly that the server has to hold back, then goes."""
    while not soak.is_over:
        prompt, _ = soak.random.choice(soak.answers)
        body = {"prompt": prompt, "max_tokens": 1000, "ignore_eos": True, "stream": True, "logprobs": 5}
        end_s = time.monotonic() + _SLOW_S
        async with _connection(soak, receive_bytes=4096) as (reader, writer):
            writer.write(_post(soak.client.target, json.dumps(body).encode()))
            num_bytes = 0
            while time.monotonic() < end_s and not soak.is_over:
                async with asyncio.timeout(HANG_S):
                    data = await reader.read(_SLOW_BYTES)
                if not data:
                    break
                num_bytes += len(data)
                await asyncio.sleep(_SLOW_PAUSE_S)
            soak.record.counts["dawdler: kilobytes read"] += num_bytes >> 10
        soak.record.counts["dawdler: streams"] += 1
        await asyncio.sleep(_PAUSE_S)


def _post(target: Target, body: bytes) -> bytes:
    return b"%s%d\r\n\r\n%s" % (target.head("POST", COMPLETIONS), len(body), body)


@contextlib.asynccontextmanager
async def _connection(soak: Soak, *, receive_bytes: int | None = None) -> Any:
    """A connection of streams, closed without ceremony. receive_bytes: the kernel's buffer, and ours."""
    target = soak.client.target
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (target.host, target.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=receive_bytes or 1 << 16)
    try:
        yield reader, writer
    except ConnectionError:
        soak.record.counts["connections that the server cut"] += 1
    finally:
        writer.transport.abort()


CLIENTS: tuple[tuple[Callable[[Soak], Awaitable[None]], int], ...] = (
    (greedy, 8), (sampled, 3), (leaver, 3), (vandal, 2), (dawdler, 2),
)  # fmt: skip
"""Who, and how many of them."""
