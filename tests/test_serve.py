"""`enginectl serve` as users meet it: a process, spoken to over HTTP and with the `openai` client."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from enginectl import Engine, SamplingParams

NAME = "tiny"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LONG = {"model": NAME, "prompt": "go on", "max_tokens": 8000, "temperature": 0, "ignore_eos": True}
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
EXIT_S = 10.0

Serve = Callable[..., Any]


@pytest.fixture(scope="module")
def server(serve_module: Serve, tiny_llama: Path) -> Any:
    """A server of the tiny model that the tests of this module share."""
    return serve_module(str(tiny_llama), "--served-model-name", NAME, "--dtype", "float32")


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def events(lines: Iterator[str]) -> Iterator[dict[str, Any] | None]:
    """The events of a stream; None is its end."""
    for line in lines:
        if line:
            assert line.startswith("data: "), line
            data = line.removeprefix("data: ")
            yield None if data == "[DONE]" else json.loads(data)


def messages(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class TestAnswers:
    def test_raw_http(self, server: Any) -> None:
        """Law 6 and 9: the streamed text is the whole one, and usage comes once, in a last chunk without choices."""
        body = {"model": NAME, "messages": messages("hello"), "max_tokens": 12, "temperature": 0}
        whole = httpx.post(server.url + CHAT, json=body).json()
        assert whole["object"] == "chat.completion"
        assert whole["usage"]["completion_tokens"] == 12
        assert whole["choices"][0]["finish_reason"] == "length"
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", server.url + CHAT, json=body) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            *chunks, usage, done = events(answer.iter_lines())
        assert done is None
        assert usage is not None
        assert usage["choices"] == []
        assert [usage["usage"][name] for name in COUNTS] == [whole["usage"][name] for name in COUNTS]
        assert all(chunk is not None and chunk["usage"] is None for chunk in chunks)
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk)
        assert text == whole["choices"][0]["message"]["content"] != ""

    def test_the_openai_client_streams_what_it_gets_whole(self, client: openai.OpenAI) -> None:
        """Law 6: text and finish reason, greedy and sampled, with several choices and with stop strings."""
        asked: list[dict[str, Any]] = [
            {"temperature": 0},
            {"temperature": 1, "seed": 7, "n": 3},
            {"temperature": 0, "extra_body": {"ignore_eos": True, "min_tokens": 4}, "stop": ["a", "e", "\x00", "ĉ"]},
        ]
        for fields in asked:
            whole = client.chat.completions.create(model=NAME, messages=messages("hi"), max_tokens=40, **fields)
            texts = [""] * len(whole.choices)
            reasons: list[str | None] = [None] * len(whole.choices)
            stream = client.chat.completions.create(
                model=NAME, messages=messages("hi"), max_tokens=40, stream=True, **fields
            )
            for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                    reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            assert texts == [choice.message.content for choice in whole.choices]
            assert reasons == [choice.finish_reason for choice in whole.choices]
            assert len(set(texts)) == len(texts), "choices of one request differ"

    def test_completions_and_the_python_api_agree(self, client: openai.OpenAI, tiny_llama: Path) -> None:
        """The engine process and the one in this process give the same tokens; prompts of a call stay in order."""
        prompts = ["one", "two words", "three"]
        with Engine(str(tiny_llama), dtype="float32", num_threads=1, max_num_seqs=4) as engine:
            outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20))
            expected = [output.outputs[0].text for output in outputs]
        whole = client.completions.create(model=NAME, prompt=prompts, max_tokens=20, temperature=0)
        assert [choice.text for choice in whole.choices] == expected
        texts = [""] * 3
        for chunk in client.completions.create(model=NAME, prompt=prompts, max_tokens=20, temperature=0, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == expected

    def test_tokens_logprobs_and_models(self, server: Any, client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == [NAME]
        ids = httpx.post(f"{server.url}/tokenize", json={"model": NAME, "prompt": "abc"}).json()["tokens"]
        text = httpx.post(f"{server.url}/detokenize", json={"model": NAME, "tokens": ids}).json()["prompt"]
        assert text == "abc"
        answer = client.chat.completions.create(
            model=NAME, messages=messages("x"), max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
        )
        assert answer.choices[0].logprobs is not None
        entries = answer.choices[0].logprobs.content or []
        assert [len(entry.top_logprobs) for entry in entries] == [2, 2, 2]
        assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)

    def test_a_wrong_request_is_a_400_and_touches_no_other(self, client: openai.OpenAI) -> None:
        """Law 11."""
        for fields in ({"temperature": -1}, {"max_tokens": 10**6}, {"logit_bias": {"99999": 1}}, {"n": 0}):
            with pytest.raises(openai.BadRequestError) as error:
                client.chat.completions.create(model=NAME, messages=messages("x"), **fields)  # type: ignore[call-overload]
            assert error.value.param in (*fields, "messages")
        with pytest.raises(openai.NotFoundError, match="tiny"):
            client.chat.completions.create(model="tinny", messages=messages("x"))

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            (b'{"messages": [', "JSON"),
            (b'{"messages": "hello"}', "messages"),
            (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": "ten"}', "max_tokens"),
            (b"[]", "object"),
            (b"", ""),
        ],
    )
    def test_a_malformed_body_is_a_400(self, server: Any, body: bytes, message: str) -> None:
        answer = httpx.post(server.url + CHAT, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert message in error["message"] + (error["param"] or "")
        assert "Traceback" not in answer.text


class TestDeadlines:
    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_request_whose_time_is_over_ends_with_504(self, server: Any, path: str, stream: bool) -> None:
        """It was answered with 500. One that has begun to stream ends with an error event."""
        prompt = {"messages": messages("go on")} if path == CHAT else {}
        body = {name: value for name, value in LONG.items() if path == COMPLETIONS or name != "prompt"} | prompt
        answer = httpx.post(server.url + path, json={**body, "stream": stream, "timeout": 0.4}, timeout=30)
        if stream:
            *_, last = events(iter(answer.text.splitlines()))
            error = last["error"] if last is not None else {}
        else:
            assert (answer.status_code, answer.headers["x-should-retry"]) == (504, "false")
            error = answer.json()["error"]
        assert (error["code"], error["param"], error["type"]) == ("timeout", "timeout", "server_error")
        assert "0.4 s exceeded" in error["message"]
        assert until(lambda: server.stats()["num_blocks_in_use"] == 0, 2.0)


class TestDisconnects:
    """Law 13: a client that goes away frees what it held within a step, and is counted as aborted."""

    @pytest.mark.parametrize(
        "fields", [{"stream": True}, {"stream": True, "n": 3, "temperature": 1}, {"n": 2}], ids=str
    )
    def test_blocks_come_back(self, server: Any, fields: dict[str, Any]) -> None:
        aborted, generated = self.count(server), server.stats()["num_generation_tokens"]
        with httpx.Client() as http:
            if fields.get("stream"):
                with http.stream("POST", server.url + COMPLETIONS, json={**LONG, **fields}) as answer:
                    lines = answer.iter_lines()
                    next(lines)
                    assert server.stats()["num_blocks_in_use"] > 0
            else:
                with pytest.raises(httpx.ReadTimeout):
                    http.post(server.url + COMPLETIONS, json={**LONG, **fields}, timeout=0.5)
        assert until(lambda: server.stats()["num_blocks_in_use"] == 0, 2.0)
        stats = server.stats()
        assert stats["num_running"] == stats["num_waiting"] == 0
        assert stats["num_generation_tokens"] - generated < 8000, "it was not left to run to its end"
        assert until(lambda: self.count(server) == aborted + fields.get("n", 1), 2.0)

    @staticmethod
    def count(server: Any) -> float:
        for line in httpx.get(f"{server.url}/metrics").text.splitlines():
            if line.startswith("enginectl:request_success_total") and 'finished_reason="abort"' in line:
                return float(line.rpartition(" ")[2])
        return 0.0

    def test_a_client_that_does_not_read_holds_up_nobody(self, server: Any, client: openai.OpenAI) -> None:
        """The engine runs the request to its end whoever reads; what is unread is bounded by its own max_tokens."""
        body = {**LONG, "max_tokens": 1500, "stream": True, "stream_options": {"include_usage": True}}
        before = server.stats()["num_generation_tokens"]
        with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert until(lambda: server.stats()["num_generation_tokens"] >= before + 1500, 20.0)
            assert until(lambda: server.stats()["num_blocks_in_use"] == 0, 2.0)
            client.completions.create(model=NAME, prompt="x", max_tokens=2)
            *_, usage, done = events(lines)
        assert done is None
        assert usage is not None
        assert usage["usage"]["completion_tokens"] == 1500


class TestShutdown:
    def test_a_signal_drains(self, serve: Serve, tiny_llama: Path) -> None:
        """What runs may finish, what comes is refused with 503, and nothing is left behind."""
        server = serve(str(tiny_llama), "--served-model-name", NAME)
        url, engine = server.url, server.engine()
        with httpx.stream("POST", url + COMPLETIONS, json={**LONG, "max_tokens": 800, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.signal(signal.SIGTERM)
            assert until(lambda: httpx.get(f"{url}/health").status_code == 503, 2.0)
            refused = httpx.post(url + COMPLETIONS, json={"model": NAME, "prompt": "x", "max_tokens": 1})
            assert refused.status_code == 503
            assert "shutting down" in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) > 0
            *_, last, done = events(lines)
        assert done is None
        assert last is not None
        assert last["choices"][0]["finish_reason"] == "length"
        assert server.wait(EXIT_S) == 0
        assert not engine.is_running()
        assert "Traceback" not in server.log

    def test_the_second_signal_ends_it_at_once(self, serve: Serve, tiny_llama: Path) -> None:
        """Whichever two they are."""
        server = serve(str(tiny_llama), "--served-model-name", NAME)
        url, engine = server.url, server.engine()
        with httpx.stream("POST", url + COMPLETIONS, json={**LONG, "stream": True}, timeout=5) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.signal(signal.SIGTERM)
            assert until(lambda: httpx.get(f"{url}/health").status_code == 503, 2.0)
            start = time.monotonic()
            server.signal(signal.SIGINT)
            server.wait(EXIT_S)
            assert time.monotonic() - start < 2.0
        assert not engine.is_running()
        assert "Traceback" not in server.log


@pytest.mark.model
def test_the_demo_model_names_paris(serve: Serve, demo_model: Path) -> None:
    """The promise of the README: over HTTP, with the `openai` client, streamed, and in this process."""
    server = serve(str(demo_model), "--served-model-name", "demo", "--max-model-len", "512")
    question = messages("What is the capital of France?")
    body = {"model": "demo", "messages": question, "temperature": 0, "max_tokens": 32}
    raw = httpx.post(server.url + CHAT, json=body, timeout=60).json()
    text = raw["choices"][0]["message"]["content"]
    assert "Paris" in text
    assert raw["choices"][0]["finish_reason"] == "stop"
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model="demo", messages=question, temperature=0, max_tokens=32, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    server.stop()
    with Engine(str(demo_model), max_model_len=512, num_threads=1) as engine:
        output = engine.chat(question, SamplingParams(temperature=0.0, max_tokens=32))
    assert output.outputs[0].text == text
