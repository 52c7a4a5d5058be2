"""The load client against a real server, and against sockets that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from enginectl.cli import main
from enginectl.errors import EngineDeadError, UsageError
from enginectl.loadtest.answers import Answer
from enginectl.loadtest.arrivals import Level, Workload
from enginectl.loadtest.client import Client, Outcome
from enginectl.loadtest.report import report, summarize
from enginectl.loadtest.run import Plan, Run, load_test
from enginectl.loadtest.target import parse_target
from enginectl.testing.fake_client import FakeClient, say
from enginectl.types import GenerateRequest, OutputChunk

WORKLOAD = Workload(model="fake/model", input_len=12, output_len=5, token_range=(10, 200), max_model_len=256)
LETTERS = "abcdefghijklmnop"


def test_every_request_is_counted(serve: Callable[..., str]) -> None:
    client = FakeClient(say(LETTERS))
    target = parse_target(serve(client))
    levels = (Level(concurrency=1), Level(concurrency=3), Level(rate=200.0))
    plan = Plan(workload=WORKLOAD, levels=levels, num_requests=8, warmup=2, repeats=2)
    found = report(load_test(target, plan))
    assert len(client.requests) == 3 * (2 + 2 * 8)
    assert len({tuple(request.prompt_token_ids) for request in client.requests}) == len(client.requests)
    for one in found:
        assert (one["requests"], one["finished"], one["errors"]) == (8, 8, {})
        assert (one["prompt_tokens"], one["output_tokens"], one["events"]) == (8 * 12, 8 * 5, 8 * 5)
        assert 0 < one["ttft_ms"]["p50"] <= one["e2e_ms"]["p50"] <= one["duration_s"] * 1e3
        assert one["output_tokens_per_s"] == pytest.approx(40 / one["duration_s"], rel=0.5)
    assert found[2]["late_ms"]["p99"] is not None


def test_chat_counts_the_same_tokens(serve: Callable[..., str]) -> None:
    target = parse_target(serve(FakeClient(say(LETTERS))))
    workload = Workload(model="fake/model", input_len=6, output_len=5, api="chat")
    plan = Plan(workload=workload, levels=(Level(concurrency=2),), num_requests=4, warmup=0, repeats=1)
    (one,) = report(load_test(target, plan))
    assert (one["finished"], one["output_tokens"], one["events"]) == (4, 20, 20)
    assert one["prompt_tokens"] > 4 * 6


def test_a_closed_loop_has_no_more_open_than_clients(serve: Callable[..., str]) -> None:
    most = 0

    def script(request: GenerateRequest) -> Iterable[list[OutputChunk] | Exception]:
        nonlocal most
        most = max(most, client.num_open)
        yield from say(LETTERS)(request)

    client = FakeClient(script)
    plan = Plan(workload=WORKLOAD, levels=(Level(concurrency=3),), num_requests=20, warmup=0, repeats=1)
    load_test(parse_target(serve(client)), plan)
    assert most == 3


def test_errors_are_counted_by_kind(serve: Callable[..., str]) -> None:
    def script(request: GenerateRequest) -> Iterable[list[OutputChunk] | Exception]:
        place = len(client.requests) % 3
        if place == 0:
            yield EngineDeadError("the engine process died")  # before the first token: a status
            return
        chunks = list(say(LETTERS)(request))
        yield chunks[0]
        if place == 1:
            yield EngineDeadError("the engine process died")  # after it: an event
            return
        yield from chunks[1:]

    client = FakeClient(script)
    plan = Plan(workload=WORKLOAD, levels=(Level(concurrency=1),), num_requests=9, warmup=0, repeats=1)
    (one,) = report(load_test(parse_target(serve(client)), plan))
    assert one["errors"] == {"http 503": 3, "stream error": 3}
    assert (one["requests"], one["finished"], one["output_tokens"]) == (9, 3, 15)


def test_percentiles_are_of_the_times_that_were_measured() -> None:
    outcomes = [
        Outcome(start_s=0.0, end_s=0.1 * place, event_s=[0.01 * place, 0.03 * place, 0.1 * place], output_tokens=3)
        for place in range(1, 102)
    ]
    failed = Outcome(start_s=0.0, end_s=99.0, error="timeout")
    one = summarize(Run(level=Level(concurrency=1), outcomes=[*outcomes, failed], duration_s=10.0, cpu_s=1.0))
    assert one["ttft_ms"]["p50"] == pytest.approx(510)
    assert one["e2e_ms"]["p99"] == pytest.approx(10_000)
    assert one["tpot_ms"]["p50"] == pytest.approx(51 * 45)
    assert one["itl_ms"]["mean"] == pytest.approx(51 * 45)
    assert one["output_tokens_per_s"] == pytest.approx(30.3)
    assert (one["errors"], one["finished"], one["client_cpu"]) == ({"timeout": 1}, 101, 0.1)


def test_repeats_give_medians() -> None:
    level = Level(concurrency=1)
    runs = [
        Run(level=level, outcomes=[Outcome(start_s=0, end_s=seconds, output_tokens=6)], duration_s=seconds, cpu_s=0)
        for seconds in (1.0, 2.0, 60.0)
    ]
    (one,) = report([runs])
    assert one["output_tokens_per_s"] == 3.0
    assert [repeat["duration_s"] for repeat in one["repeats"]] == [1.0, 2.0, 60.0]


# -- servers that misbehave --------------------------------------------------------------------------------------------

Answering = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(answer: Answering) -> AsyncIterator[Client]:
    """A client of a server that answers each connection by a function."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await answer(reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    client = Client(parse_target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), timeout_s=0.5)
    try:
        yield client
    finally:
        await client.close()
        server.close()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'


@pytest.mark.parametrize(
    ("sent", "error", "tokens"),
    [
        (b"", "disconnected", 0),
        (b"what is this\r\n\r\n", "disconnected", 0),
        (HEAD + b"content-length: 1000\r\n\r\n" + EVENT, "disconnected", 1),
        (HEAD + b"\r\n" + EVENT + EVENT, "cut short", 2),
        (HEAD + b"\r\n" + EVENT + b"data: [DONE]\n\n", "", 1),
        (HEAD + b"\r\n" + EVENT + b"data: {{{\n\ndata: [DONE]\n\n", "", 2),
        (HEAD + b"\r\ndata: {{{\n\ndata: [DONE]\n\n", "unreadable", 0),
        (b"HTTP/1.1 418 Teapot\r\ncontent-length: 5\r\n\r\nshort", "http 418", 0),
    ],
)
async def test_each_failure_has_its_kind(sent: bytes, error: str, tokens: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        await writer.drain()

    async with listening(answer) as client:
        outcome = await client.send("POST", "/v1/completions", b"", Answer())
    assert (outcome.error, outcome.output_tokens) == (error, tokens), outcome


async def test_silence_is_a_timeout_and_nobody_a_failed_connection() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(answer) as client:
        outcome = await client.send("POST", "/", b"{}", Answer())
        assert outcome.error == "timeout"
    outcome = await client.send("POST", "/", b"{}", Answer())
    assert outcome.error == "connect"


async def test_connections_are_kept_and_a_stale_one_is_replaced() -> None:
    num_connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        for _ in range(2):  # then closes without a word
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
            event = EVENT + b"data: [DONE]\n\n"
            writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event))
        await reader.readuntil(b"\r\n\r\n")

    async with listening(answer) as client:
        errors = [(await client.send("POST", "/", b"", Answer())).error for _ in range(5)]
    assert errors == [""] * 5
    assert num_connections == 3


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["http://10.1.2.3:80", "https://example.org/v1", "http://[2001:db8::1]:8000"])
def test_other_machines_are_refused_unless_allowed(url: str) -> None:
    with pytest.raises(UsageError, match="--allow-remote"):
        parse_target(url)
    assert parse_target(url, allow_remote=True).url.startswith(url.split("://")[0])


def test_loopback_in_every_form_is_allowed() -> None:
    for url in ("localhost:8000", "http://127.0.0.1:8000/v1/", "http://127.9.9.9:1", "http://[::1]:8000"):
        assert parse_target(url).prefix == ""
    assert parse_target("http://127.0.0.1:8000/behind/v1").head("GET", "/x").startswith(b"GET /behind/x HTTP/1.1\r\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--concurrency 1 --rate 2", "give one of them"),
        ("--concurrency 0", "--concurrency is '0'"),
        ("--rate -1", "--rate is '-1'"),
        ("--token-range 9", "--token-range is '9'"),
        ("--extra-body [1]", "not a JSON object"),
        ("--model fak/model", "did you mean 'fake/model'?"),
        ("--input-len 255", "more than the 256"),
    ],
)
def test_wrong_options_are_named(
    serve: Callable[..., str], capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    assert main(f"bench serve {serve(FakeClient())} {options}".split()) == 2
    assert message in capsys.readouterr().err


def test_the_command_writes_all_its_forms(
    serve: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = serve(FakeClient(say(LETTERS)), api_key=("k",))
    page, picture = tmp_path / "load.html", tmp_path / "load.png"
    line = f"bench serve {url}/v1 --api-key k --concurrency 1,2 --num-requests 6 --repeats 2 --input-len 9"
    line += " --output-len 4 --token-range 10-100"
    if _has_matplotlib():
        line += f" --plot {picture}"
    assert main([*line.split(), "--html", str(page)]) == 0
    printed = capsys.readouterr()
    assert re.search(r"requests finished +6 of 6 +6 of 6", printed.out)
    assert "1 client, repeat 2: " in printed.err
    assert not _has_matplotlib() or picture.read_bytes().startswith(b"\x89PNG")
    assert main([*line.partition(" --plot")[0].split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["level"] for one in found["levels"]] == ["1 client", "2 clients"]
    assert found["levels"][0]["output_tokens"] == 24
    _check_self_contained(page.read_text(encoding="utf-8"))


def _has_matplotlib() -> bool:
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def _check_self_contained(text: str) -> None:
    """Nothing is fetched, and the numbers are in it."""
    assert not re.search(r"(?i)\b(src|href|srcset|data)\s*=|@import|url\(|<link|<iframe", text)
    assert re.findall(r"<script([^>]*)>", text) == [' type="application/json" id="data"']
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert data["levels"][1]["finished"] == 6
    assert text.count("<svg") == 4


def test_a_server_that_answers_nothing_is_a_failure(
    serve: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    def script(request: GenerateRequest) -> Iterable[list[OutputChunk] | Exception]:
        yield EngineDeadError("the engine process died")

    line = f"bench serve {serve(FakeClient(script))} --concurrency 1 --num-requests 2 --repeats 1 --input-len 9"
    assert main([*line.split(), "--token-range", "10-100"]) == 1
    printed = capsys.readouterr()
    assert "error: http 503" in printed.out
    assert "no request was answered; http 503: the engine process died" in printed.err
    assert main(["bench", "serve", "http://127.0.0.1:9"]) == 1
    assert "connect" in capsys.readouterr().err
