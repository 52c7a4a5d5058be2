"""Whoever is killed: open requests end with an error, the engine comes back, and no process is left behind."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import psutil
import pytest

NAME = "tiny"
COMPLETIONS = "/v1/completions"
GREEDY = {"model": NAME, "prompt": "hello", "max_tokens": 16, "temperature": 0}
LONG = {"model": NAME, "prompt": "go on", "max_tokens": 8000, "temperature": 0, "ignore_eos": True, "stream": True}
NUM_STREAMS = 8

Serve = Callable[..., Any]

DIES_AT_START = """
import os, sys
if os.path.exists({flag!r}) and "enginectl.engine.process" in " ".join(sys.orig_argv):
    os._exit(3)
"""


def start(serve: Serve, model: Path, *arguments: str, **options: Any) -> Any:
    return serve(str(model), "--served-model-name", NAME, "--dtype", "float32", *arguments, **options)


def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def complete(server: Any) -> Any:
    answer = httpx.post(server.url + COMPLETIONS, json=GREEDY, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def read_to_the_end(url: str, all_running: Barrier) -> list[str]:
    """The lines of a stream. Meets the others at the barrier once its first token is there."""
    with httpx.stream("POST", url + COMPLETIONS, json=LONG, timeout=30) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        read = [next(lines)]
        all_running.wait(30)
        return [*read, *(line for line in lines if line)]


@pytest.fixture
def streams() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        yield pool


def test_a_killed_engine_ends_its_streams_and_comes_back(
    serve: Serve, tiny_llama: Path, streams: ThreadPoolExecutor
) -> None:
    """Law 14a: an error event each, 503 and then 200, the same tokens as before, no orphan."""
    server = start(serve, tiny_llama)
    url, expected, engine = server.url, complete(server), server.engine()
    all_running = Barrier(NUM_STREAMS + 1)
    reading = [streams.submit(read_to_the_end, url, all_running) for _ in range(NUM_STREAMS)]
    all_running.wait(30)
    engine.kill()
    for future in reading:
        *_, last = future.result(30)
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "engine_unavailable"
        assert "may be sent again" in error["message"]
    status, body = server.health()
    assert status == 503
    assert body["status"] == "restarting"
    refused = httpx.post(url + COMPLETIONS, json=GREEDY)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert until(lambda: server.health()[0] == 200, 60.0)
    assert complete(server) == expected
    assert is_gone(engine)
    assert server.engine().pid != engine.pid
    assert server.stats()["num_blocks_in_use"] == 0
    second = server.engine()
    server.signal(signal.SIGINT)
    assert server.wait(10) == 0
    assert is_gone(second)
    assert "signal 9" in server.log
    assert "Traceback" not in server.log


def test_a_crash_loop_is_given_up_with_a_reason(serve: Serve, tiny_llama: Path, tmp_path: Path) -> None:
    flag = tmp_path / "broken"
    (tmp_path / "sitecustomize.py").write_text(DIES_AT_START.format(flag=str(flag)))
    server = start(serve, tiny_llama, env={"PYTHONPATH": str(tmp_path)})
    assert server.health()[0] == 200
    flag.touch()
    server.engine().kill()
    assert until(lambda: server.health()[1]["status"] == "dead", 120.0)
    status, body = server.health()
    assert status == 503
    assert "died 6 times in a row" in body["reason"]
    refused = httpx.post(server.url + COMPLETIONS, json=GREEDY)
    assert refused.status_code == 503
    assert "died 6 times in a row" in refused.json()["error"]["message"]
    assert not psutil.Process(server.process.pid).children()
    server.signal(signal.SIGTERM)
    assert server.wait(10) == 0


def test_the_engine_dies_with_the_api_process(serve: Serve, tiny_llama: Path, streams: ThreadPoolExecutor) -> None:
    """Even an engine that hangs, so that it notices nothing itself."""
    server = start(serve, tiny_llama)
    all_running = Barrier(2)
    reading = streams.submit(read_to_the_end, server.url, all_running)
    engine = server.engine()
    all_running.wait(30)
    engine.suspend()
    server.process.kill()
    assert until(lambda: is_gone(engine), 2.0)
    with pytest.raises(httpx.HTTPError):
        reading.result(10)


def test_a_hung_engine_does_not_hold_up_the_shutdown(
    serve: Serve, tiny_llama: Path, streams: ThreadPoolExecutor
) -> None:
    """Its streams end with an error event once the time to drain is over."""
    server = start(serve, tiny_llama, "--drain-timeout-s", "0.5")
    all_running = Barrier(2)
    reading = streams.submit(read_to_the_end, server.url, all_running)
    engine = server.engine()
    all_running.wait(30)
    engine.suspend()
    server.signal(signal.SIGTERM)
    assert server.wait(5) == 0
    assert is_gone(engine)
    *_, last = reading.result(10)
    assert "does not answer" in json.loads(last.removeprefix("data: "))["error"]["message"]


def test_a_hung_engine_is_ended_and_started_again(serve: Serve, tiny_llama: Path, streams: ThreadPoolExecutor) -> None:
    """It was reported and stayed: its clients waited for ever."""
    server = start(serve, tiny_llama, "--step-timeout-s", "2")
    expected = complete(server)
    all_running = Barrier(2)
    reading = streams.submit(read_to_the_end, server.url, all_running)
    hung = server.engine()
    all_running.wait(30)
    hung.suspend()
    *_, last = reading.result(15)
    assert "the engine hung" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert until(lambda: server.health()[0] == 200, 60.0)
    assert is_gone(hung)
    assert complete(server) == expected
    assert "the engine has said nothing for" in server.log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ending_it_while_the_model_loads_leaves_nothing(serve: Serve, tiny_llama: Path, number: int) -> None:
    server = start(serve, tiny_llama)
    server.wait_for_line("importing torch")
    engine = server.engine()
    server.signal(number)
    status = server.wait(2.0)
    assert status == (130 if number == signal.SIGINT else -number)
    assert until(lambda: is_gone(engine), 2.0)
    assert "Traceback" not in server.log
