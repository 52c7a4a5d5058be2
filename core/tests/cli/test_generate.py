"""`generate` and `chat` against an engine that follows a script."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from enginectl.cli import batch
from enginectl.cli.batch import run_batch, run_one
from enginectl.cli.conversation import Conversation, obey, talk
from enginectl.cli.generate import JsonWriter, TextWriter
from enginectl.cli.prompts import Prompt, parse_lines, read_prompts
from enginectl.cli.sampling import sampling_values, with_defaults
from enginectl.cli.session import Session
from enginectl.cli.startup import capacity_lines
from enginectl.engine.client import EngineInfo
from enginectl.errors import RequestError, UsageError
from enginectl.types import FinishReason, GenerateRequest, OutputChunk

INFO = EngineInfo(
    model="m",
    architecture="A",
    dtype="float32",
    device="cpu",
    max_model_len=64,
    vocab_size=256,
    eos_token_ids=(0,),
    sampling_defaults={"temperature": 0.6, "top_k": 20},
    num_kv_tokens=4096,
    kv_bytes_per_token=1024,
    max_num_seqs=2,
)


class Letters:
    """A tokenizer whose ids are code points and whose template is one line a message."""

    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_chat(self, text: str) -> list[int]:
        return self.encode(text)

    def apply_chat_template(self, messages: Sequence[dict[str, Any]]) -> str:
        return "".join(f"{message['role'][0]}:{message['content']}\n" for message in messages)

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self.encode(word)) for word in words)


class Echo:
    """An engine that answers with the prompt in upper case, two letters a chunk; `!` is refused, `?` breaks."""

    info = INFO

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.num_closed = 0
        self.was_closed = False

    async def generate(self, request: GenerateRequest) -> AsyncIterator[list[OutputChunk]]:
        self.requests.append(request)
        text = "".join(map(chr, request.prompt_token_ids)).upper()
        if "!" in text:
            raise RequestError("no shouting")
        # Later prompts finish first, so that order is somebody's work.
        await asyncio.sleep(0.01 / len(self.requests))
        try:
            for start in range(0, len(text), 2):
                piece = text[start : start + 2]
                last = start + 2 >= len(text)
                error = "the row failed" if "?" in piece else None
                reason = FinishReason.STOP if last else None
                chunks = [
                    OutputChunk(index=index, text=piece, token_ids=(1,), finish_reason=reason, error=error)
                    for index in range(request.params.n)
                ]
                yield chunks
        finally:
            self.num_closed += 1

    async def close(self) -> None:
        self.was_closed = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Echo:
    """What Session.start gives instead of an engine process."""
    echo = Echo()

    async def start(_resolved: Any) -> Session:
        return make_session(echo)

    monkeypatch.setattr(batch, "Session", SimpleNamespace(start=start))
    return echo


def make_session(echo: Echo) -> Session:
    return Session(cast(Any, echo), cast(Any, Letters()))


RESOLVED = cast(Any, None)


class TestBatch:
    def test_answers_come_in_the_order_of_the_prompts(self, engine: Echo) -> None:
        file = io.StringIO()
        prompts = [Prompt(text=text, id=f"id-{text}") for text in ("abc", "de", "f")]
        status = asyncio.run(run_batch(RESOLVED, prompts, {}, None, JsonWriter(file)))
        rows = [json.loads(line) for line in file.getvalue().splitlines()]
        assert status == 0
        assert [row["outputs"][0]["text"] for row in rows] == ["ABC", "DE", "F"]
        assert [row["id"] for row in rows] == ["id-abc", "id-de", "id-f"]
        assert rows[0]["usage"] == {"prompt_tokens": 3, "completion_tokens": 2}
        assert rows[0]["outputs"][0]["finish_reason"] == "stop"
        assert engine.was_closed
        assert engine.num_closed == 3

    @pytest.mark.parametrize(("bad", "reason"), [("b!", "no shouting"), ("b?", "the row failed")])
    def test_a_prompt_that_fails_ends_no_other(
        self, engine: Echo, bad: str, reason: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = io.StringIO()
        prompts = [Prompt(text=text) for text in ("aa", bad, "cc")]
        assert asyncio.run(run_batch(RESOLVED, prompts, {}, None, JsonWriter(file))) == 1
        rows = [json.loads(line) for line in file.getvalue().splitlines()]
        assert rows[1] == {"index": 1, "prompt": bad, "error": reason}
        assert [row.get("outputs", [{}])[0].get("text") for row in rows] == ["AA", None, "CC"]
        assert capsys.readouterr().err == f"error: prompt 2: {reason}\n"

    def test_text_says_whose_answer_it_is(self, engine: Echo) -> None:
        file = io.StringIO()
        prompts = [Prompt(text="ab"), Prompt(text="cd")]
        asyncio.run(run_batch(RESOLVED, prompts, {"n": 2}, None, TextWriter(file, num_prompts=2)))
        assert file.getvalue().splitlines() == [
            "==> prompt 1, choice 1 <==",
            "AB",
            "==> prompt 1, choice 2 <==",
            "AB",
            "==> prompt 2, choice 1 <==",
            "CD",
            "==> prompt 2, choice 2 <==",
            "CD",
        ]

    def test_one_answer_is_bare_text(self, engine: Echo) -> None:
        file = io.StringIO()
        assert asyncio.run(run_one(RESOLVED, Prompt(text="abc"), {}, None, file)) == 0
        assert file.getvalue() == "ABC\n"

    def test_sampling_of_the_prompt_over_the_command_over_the_model(self, engine: Echo) -> None:
        prompts = [Prompt(text="a" * 60), Prompt(text="b", sampling={"temperature": 0.1, "max_tokens": 3})]
        asyncio.run(run_batch(RESOLVED, prompts, {"temperature": 0.9}, None, TextWriter(io.StringIO(), num_prompts=2)))
        first, second = (request.params for request in engine.requests)
        assert (first.temperature, first.top_k) == (0.9, 20)
        assert first.max_tokens == 4, "the default is cut to what fits"
        assert (second.temperature, second.max_tokens) == (0.1, 3)


class TestPrompts:
    def test_json_lines(self) -> None:
        lines = ['{"prompt": "a", "id": 7, "max_tokens": 3}', "", '{"messages": [{"role": "user", "content": "b"}]}']
        first, second = parse_lines(lines, "f")
        assert first == Prompt("a", None, 7, {"max_tokens": 3})
        assert second.messages == ({"role": "user", "content": "b"},)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{", "f line 2: not JSON"),
            ("[]", 'f line 2: expected an object with either "prompt" or "messages"'),
            ('{"prompt": "a", "messages": []}', "either"),
            ('{"prompt": 3}', "prompt is 3; allowed: text"),
            ('{"messages": []}', "must be a list of objects"),
            ('{"prompt": "a", "temprature": 1}', "did you mean 'temperature'"),
            ('{"prompt": "a", "max_tokens": "3"}', "Expected `int | null`, got `str`"),
            ('{"prompt": "a", "id": []}', "id is []"),
        ],
    )
    def test_what_is_wrong_is_named_with_its_line(self, line: str, message: str) -> None:
        with pytest.raises(UsageError) as caught:
            list(parse_lines(['{"prompt": "fine"}', line], "f"))
        assert message in str(caught.value)
        assert "f line 2" in str(caught.value)

    def test_standard_input_is_one_prompt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
        assert read_prompts([], None) == [Prompt(text="two\nlines")]
        monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt": "a"}\n{"prompt": "b"}\n'))
        assert [prompt.text for prompt in read_prompts([], Path("-"))] == ["a", "b"]

    def test_a_prompt_can_be_a_message(self) -> None:
        (prompt,) = read_prompts(["hi"], None, system="be brief")
        assert prompt.messages == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"})
        assert prompt.token_ids(cast(Any, Letters())) == [ord(letter) for letter in "s:be brief\nu:hi\n"]

    def test_an_empty_standard_input_is_no_prompt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It was called an empty prompt, which nobody had given."""
        monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
        with pytest.raises(UsageError, match="standard input is empty; give them after MODEL"):
            read_prompts([], None)

    @pytest.mark.parametrize("texts", [[""], ["a", ""]])
    def test_an_empty_prompt_is_refused(self, texts: list[str]) -> None:
        with pytest.raises(UsageError, match="a prompt is empty"):
            read_prompts(texts, None)


class TestSampling:
    def test_bad_words_become_token_ids(self) -> None:
        params = with_defaults({"bad_words": ["ab"]}, {}, cast(Any, Letters()))
        assert params.bad_word_ids == ((97, 98),)

    def test_max_tokens_0_is_what_fits(self) -> None:
        nothing = {"temperature": None, "top_p": None, "top_k": None, "stop": None}
        assert sampling_values(max_tokens=0, **nothing) == {"max_tokens": None}
        assert sampling_values(max_tokens=None, **nothing) == {}


class TestChat:
    @pytest.fixture
    def conversation(self) -> Conversation:
        return Conversation(make_session(Echo()), {})

    def talk(self, conversation: Conversation, lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        talk(conversation, lambda text: asyncio.run(conversation.answer(text)))

    def test_history_grows_and_answers_stream(
        self, conversation: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.talk(conversation, "ab\n\ncd\n/exit\nnever read\n", monkeypatch)
        assert capsys.readouterr().out == "U:AB\n\nU:AB\nA:U:AB\n\nU:CD\n\n"
        assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2

    def test_a_message_without_an_answer_is_forgotten(
        self, conversation: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.talk(conversation, "ab!\nab\n", monkeypatch)
        assert capsys.readouterr().err == "error: no shouting\n"
        assert [message["content"] for message in conversation.messages] == ["ab", "U:AB\n"]

    def test_ctrl_c_ends_an_answer_and_not_the_conversation(
        self, conversation: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def interrupted(_text: str) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("sys.stdin", io.StringIO("ab\n/help\n"))
        talk(conversation, interrupted)
        assert "[stopped]" in (out := capsys.readouterr().out)
        assert "/reset" in out

    def test_commands(self, conversation: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
        conversation.messages = [{"role": "user", "content": "x"}]
        assert obey(conversation, "/system be brief")
        assert (conversation.system, conversation.messages) == ("be brief", [])
        conversation.messages = [{"role": "user", "content": "x"}]
        assert obey(conversation, "/reset")
        assert conversation.messages == []
        assert obey(conversation, "/resett")
        assert "did you mean '/reset'?" in capsys.readouterr().err
        assert not obey(conversation, "/exit")


def test_the_start_up_log_says_how_many_sequences_fit() -> None:
    """The long sequence and a short one; once, when they are the same."""
    assert capacity_lines(INFO) == [
        "KV cache: 4,096 tokens in 4 MiB, 1,024 bytes per token",
        "fits 64 sequences of 64 tokens",
    ]
    one = msgspec.structs.replace(INFO, max_model_len=INFO.num_kv_tokens)
    assert capacity_lines(one)[1] == "fits 1 sequence of 4,096 tokens"
