"""The Python API: its options are those of the command line, and a failed start leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from enginectl import Engine, SamplingParams
from enginectl.api_side import ApiSide
from enginectl.compose import Assembled
from enginectl.errors import ConfigError, EnginectlError, PluginError, RequestError
from enginectl.interfaces.observer import Observer
from enginectl.testing.tiny_models import save_tiny_model
from enginectl.types import EngineStats, FinishedRequest

TINY: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model("llama", tmp_path_factory.mktemp("api") / "llama"))


def test_options_are_spelt_as_on_the_command_line(tiny_llama: str) -> None:
    with Engine(tiny_llama, kv_cache_memory_bytes="1MiB", plugins=["FCFS"], max_model_len=64, **TINY) as engine:
        assert engine.config.kv_cache_memory_bytes == 1 << 20
        assert engine.config.plugins == ("fcfs",)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"kv_cache_memory_bytes": "4lb"}, ConfigError, "unknown unit 'lb'"),
        ({"block_size": 24}, ConfigError, "a power of two"),
        ({"max_num_seqs": "4"}, ConfigError, "max_num_seqs is '4'"),
        ({"max_seqs": 4}, ConfigError, "did you mean 'max_num_seqs'?"),
        ({"plugins": ["fcsf"]}, PluginError, "did you mean 'fcfs'?"),
        ({"scheduler": "fcsf"}, PluginError, "did you mean 'fcfs'?"),
        ({"scheduling_policy": "prioriti"}, PluginError, "no scheduler named 'prioriti'"),
        ({"speculative_config": {"method": "prophecy"}}, EnginectlError, "prophecy"),
        ({"frontend": object()}, ConfigError, "frontend=object(…): this role takes no object"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused_before_anything_is_loaded(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as error:
        Engine("no/such/model", **options)
    assert message in str(error.value)


def test_a_start_that_fails_half_way_closes_the_engine(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Assembled] = []

    def fail(*_: object) -> None:
        raise ValueError("no tokenizer today")

    monkeypatch.setattr(ApiSide, "load_tokenizer", fail)
    monkeypatch.setattr(Assembled, "close", lambda self: closed.append(self))
    with pytest.raises(ValueError, match="no tokenizer today"):
        Engine(tiny_llama, **TINY)
    assert len(closed) == 1


def test_observers_see_steps_and_ends(tiny_llama: str) -> None:
    class Witness(Observer):
        def __init__(self) -> None:
            self.num_steps: list[int] = []
            self.ended: list[FinishedRequest] = []

        def on_stats(self, stats: EngineStats) -> None:
            self.num_steps.append(stats.num_steps)

        def on_finished(self, finished: FinishedRequest) -> None:
            self.ended.append(finished)

    witness = Witness()
    with Engine(tiny_llama, observer=witness, **TINY) as engine:
        engine.generate([[1, 2], [3, 4]], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    assert witness.num_steps == sorted(witness.num_steps)
    assert len(witness.num_steps) >= 3
    assert [ended.usage.completion_tokens for ended in witness.ended] == [3, 3]


def test_two_batches_of_one_engine_may_be_read_in_turns(tiny_llama: str) -> None:
    """A step that one of them runs has news for the other; each result comes once."""
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    with Engine(tiny_llama, **TINY) as engine:
        batches = [engine.generate_as_completed([[5, 6 + i] for i in range(9)], params) for _ in range(2)]
        found: list[list[int]] = [[], []]
        for _ in range(9):
            for mine, batch in zip(found, batches, strict=True):
                index, output = next(batch)
                assert len(output.outputs[0].token_ids) == 3
                mine.append(index)
        assert [next(batch, None) for batch in batches] == [None, None]
    assert [sorted(mine) for mine in found] == [list(range(9))] * 2


CLOSED = r"^the engine is closed; make a new one$"


@pytest.mark.parametrize(
    "use",
    [
        lambda engine: engine.generate([1, 2]),
        lambda engine: engine.generate_as_completed([1, 2]),
        lambda engine: engine.stream([1, 2]),
        lambda engine: engine.chat([{"role": "user", "content": "hi"}]),
        lambda engine: engine.adapters,
        lambda engine: engine.load_adapter("a", "no/such/adapter"),
        lambda engine: engine.unload_adapter("a"),
        lambda engine: engine.__enter__(),
    ],
    ids=["generate", "generate_as_completed", "stream", "chat", "adapters", "load", "unload", "enter"],
)
def test_a_closed_engine_refuses_every_use(closed_engine: Engine, use: Callable[[Engine], object]) -> None:
    with pytest.raises(EnginectlError, match=CLOSED):
        use(closed_engine)


@pytest.fixture(scope="module")
def closed_engine(tiny_llama: str) -> Engine:
    engine = Engine(tiny_llama, **TINY)
    engine.close()
    return engine


def test_closing_again_tells_nobody(tiny_llama: str) -> None:
    class Witness(Observer):
        num_closed = 0

        def close(self) -> None:
            self.num_closed += 1

    witness = Witness()
    with Engine(tiny_llama, observer=witness, **TINY) as engine:
        engine.close()
    engine.close()
    assert witness.num_closed == 1


def test_a_stream_begun_before_the_engine_closed_runs_no_step_after_it(tiny_llama: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with Engine(tiny_llama, **TINY) as engine:
        streams = [engine.stream([1, 2], params) for _ in range(2)]
        for stream in streams:
            next(stream)
        left = engine.generate_as_completed([[1, 2]], params)
        num_steps = engine.stats().num_steps
    with pytest.raises(EnginectlError, match=CLOSED):
        list(streams[0])
    with pytest.raises(EnginectlError, match=CLOSED):
        next(left)
    del streams, stream  # leaving one aborts it, which needs no engine any more
    assert engine.core.stats().num_steps == num_steps


@pytest.fixture(scope="module")
def engine(tiny_llama: str) -> Iterator[Engine]:
    with Engine(tiny_llama, **TINY) as made:
        yield made


@pytest.mark.parametrize("call", ["generate", "generate_as_completed", "stream", "chat"])
def test_sampling_fields_given_to_a_call_are_refused_with_where_they_belong(engine: Engine, call: str) -> None:
    with pytest.raises(RequestError, match=r"pass SamplingParams\(max_tokens=…\)") as error:
        getattr(engine, call)([], max_tokens=4)
    assert error.value.param == "max_tokens"


def test_an_unknown_keyword_names_those_that_are_known(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"did you mean 'adapter'.* tenant"):
        engine.generate([1, 2], adaptor="x")


def test_chat_gives_request_fields_to_the_request_and_the_rest_to_the_template(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ChatTokenizer:
        variables: dict[str, Any]

        def apply_chat_template(self, messages: list[Any], **variables: Any) -> str:
            self.variables = variables
            return "1 2"

        def encode_chat(self, text: str) -> list[int]:
            return [int(word) for word in text.split()]

    tokenizer = ChatTokenizer()
    monkeypatch.setattr(engine, "_tokenizer", tokenizer)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    assert engine.chat([], params, enable_thinking=False, tenant="me").prompt_token_ids == [1, 2]
    assert tokenizer.variables == {"add_generation_prompt": True, "enable_thinking": False}
    with pytest.raises(RequestError, match="no model or adapter named 'nobody'"):
        engine.chat([], params, adapter="nobody")


@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority"])
def test_a_priority_that_the_scheduler_does_not_read_is_refused(tiny_llama: str, policy: str) -> None:
    """Over HTTP too, by the same check."""
    params = SamplingParams(temperature=0.0, max_tokens=1)
    with Engine(tiny_llama, scheduling_policy=policy, **TINY) as engine:
        engine.generate([1, 2], params, priority=0)
        if policy == "priority":
            engine.generate([1, 2], params, priority=3)
            return
        with pytest.raises(RequestError, match=f"the {policy} scheduler does not read it") as error:
            engine.generate([1, 2], params, priority=3)
    assert error.value.param == "priority"
