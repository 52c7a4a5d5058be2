"""The loop over an executor without a model: what each fixed bug did, and the rules that need no randomness."""

from __future__ import annotations

import numpy as np
import pytest

from enginectl.errors import EngineDeadError
from enginectl.testing.dict_index import DictPrefixIndex
from enginectl.testing.free_executor import free_core, free_request, free_tokens
from enginectl.testing.toys import ConstantAdapters
from enginectl.types import FinishReason

VOCAB = 64


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1, VOCAB, length)]


def test_a_preempted_sequence_begins_its_hash_chain_anew() -> None:
    """The index was told to go on at block 0 of a sequence whose chain stood at block 5."""
    index = DictPrefixIndex(4)
    loop = free_core(num_blocks=12, max_model_len=44, index=index)
    for key in range(6):
        loop.core.add(free_request(key, prompt(10, key), 30))
    loop.run()
    assert loop.core.stats().num_preemptions > 0
    assert index.num_sequences == 0
    for key in range(6):
        assert loop.answers.tokens[key] == free_tokens(prompt(10, key), 30, vocab_size=VOCAB)


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_that_break_every_step_do_not_end_the_loop(depth: int) -> None:
    """Law 14a. Three poisonous requests in a row, each alone in its step, were taken for a broken device."""
    loop = free_core(poison=7, overlap_depth=depth)
    for key in range(5):
        loop.core.add(free_request(key, [1, 7, 2], 4))
        loop.run()
        assert loop.answers.finished[key].reason is FinishReason.ERROR
    loop.core.add(free_request(9, [1, 2], 4))
    loop.run()
    assert len(loop.answers.tokens[9]) == 4
    loop.close()


def test_a_lost_device_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row fails, and the executor says that it is the device."""
    loop = free_core(poison=7)
    monkeypatch.setattr(loop.executor, "is_healthy", lambda: False)
    loop.core.add(free_request(1, [7], 4))
    with pytest.raises(EngineDeadError, match="device is lost"):
        loop.run()


@pytest.mark.parametrize("depth", [0, 1])
def test_what_a_drain_made_known_is_work(depth: int) -> None:
    """A control message drained the last step; the loop slept on its answer for ever."""
    loop = free_core(overlap_depth=depth)
    loop.core.add(free_request(1, [1], 2))
    while 1 not in loop.answers.finished and loop.core.has_work:
        loop.core.drain()
        loop.step()
    assert loop.answers.finished[1].reason is FinishReason.LENGTH
    loop.close()


def test_a_step_says_how_many_tokens_it_computed() -> None:
    """`step_tokens` was always 0."""
    loop = free_core()
    loop.core.add(free_request(1, [1, 2, 3], 2))
    assert [message.stats.step_tokens for _ in range(2) for message in loop.core.step() if message.stats] == [3, 1]


def test_retiring_what_stands_in_the_way_is_progress() -> None:
    """With drafts, planning retires the step in flight; the loop took it for a stall and waited."""
    loop = free_core(num_drafts=3, overlap_depth=1)
    loop.core.add(free_request(1, [1], 1))
    loop.step()
    assert loop.core.made_progress
    loop.step()
    assert 1 in loop.answers.finished
    assert loop.core.made_progress
    loop.close()


def test_a_prompt_that_is_being_read_keeps_the_blocks_it_needs() -> None:
    """Law 15. Blocks of a long prompt were given to the next one before it was read; one of them had to give way."""
    loop = free_core(num_blocks=30, max_model_len=100, max_num_batched_tokens=8)
    for key in range(3):
        loop.core.add(free_request(key, prompt(90, key), 4))
    loop.run()
    assert len(loop.answers.finished) == 3
    assert loop.core.stats().num_preemptions == 0


def test_an_adapter_without_a_slot_is_asked_for_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request that waited for the same slot cost a prefix match in every step."""
    toy = ConstantAdapters(1, "", num_slots=1)
    toy.load("one", "0")
    toy.load("two", "1")
    loop = free_core(adapters=toy)
    for key in range(40):
        loop.core.add(free_request(key, prompt(4, key), 3, adapter="one" if key == 0 else "two"))
    asked: list[str] = []
    acquire = toy.acquire

    def counted(name: str) -> int | None:
        asked.append(name)
        return acquire(name)

    monkeypatch.setattr(toy, "acquire", counted)
    loop.step()
    assert asked == ["one", "two"]
    loop.run()
    assert all(loop.answers.finished[key].reason is FinishReason.LENGTH for key in range(40))


def test_a_check_that_breaks_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 14a. An exception other than RequestError in a plugin's `validate` ended the loop."""
    loop = free_core()
    monkeypatch.setattr(loop.core.admission, "refuses", lambda request: 1 / 0 if request.key == 1 else None)
    for key in range(2):
        loop.core.add(free_request(key, [1], 3))
    loop.run()
    assert loop.answers.finished[0].reason is FinishReason.LENGTH
    end = loop.answers.finished[1]
    assert (end.reason, end.refused) == (FinishReason.ERROR, False)
    assert "ZeroDivisionError" in str(end.error)
