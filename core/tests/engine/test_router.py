"""The API side of the stream: what is unread stays small, every end is accounted for, one fault ends one choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from enginectl.engine.router import OutputRouter, Ticket
from enginectl.errors import EngineDeadError
from enginectl.interfaces.detokenizer import Detokenizer, TextStream
from enginectl.testing.fake_client import fake_info
from enginectl.types import (
    Finished,
    FinishedRequest,
    FinishReason,
    GenerateRequest,
    OutputChunk,
    SamplingParams,
    StepOutputs,
    Timings,
)

BROKEN = 13


class Letters(Detokenizer, TextStream):
    """Token 0 is `a`; the token BROKEN cannot be shown."""

    left = -1
    """How many choices can be started, if not any number."""

    def start(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> TextStream:
        if self.left == 0:
            raise ValueError("cannot start")
        self.left -= 1
        return self

    def push(self, token_ids: Sequence[int]) -> str:
        if BROKEN in token_ids:
            raise ValueError("no such token")
        return "".join(chr(97 + token % 26) for token in token_ids)

    def flush(self) -> str:
        return ""


class Router:
    """A router, and what it reported."""

    def __init__(self) -> None:
        self.ended: list[FinishedRequest] = []
        self.letters = Letters()
        self.router = OutputRouter(self.letters, fake_info(), on_finished=self._on_finished)

    def _on_finished(self, ticket: Ticket, error: str | None) -> None:
        self.ended.append(ticket.finished(error))

    def open(self, name: str = "r", **params: Any) -> tuple[Ticket, list[int]]:
        request = GenerateRequest(request_id=name, prompt_token_ids=[1], params=SamplingParams(**params))
        ticket, specs = self.router.open(request, lambda: None)
        return ticket, [spec.key for spec in specs]

    def step(self, tokens: dict[int, int], *finished: Finished) -> list[int]:
        """One token a key. Returns the keys to abort."""
        keys, ids = np.array(list(tokens), np.int64), np.array(list(tokens.values()), np.int32)
        return self.router.dispatch(StepOutputs(keys.tobytes(), b"", ids.tobytes(), finished, (), (), None))


def whole(chunks: Sequence[OutputChunk], index: int = 0) -> tuple[str, list[int]]:
    mine = [chunk for chunk in chunks if chunk.index == index]
    return "".join(chunk.text for chunk in mine), [token for chunk in mine for token in chunk.token_ids]


@pytest.mark.parametrize("n", [1, 3])
def test_what_nobody_reads_is_merged_and_loses_nothing(n: int) -> None:
    """A slow reader holds its own tokens, not an object for each; the engine ends its request all the same."""
    router = Router()
    ticket, keys = router.open(n=n, max_tokens=20_000)
    tokens = [i % 12 for i in range(10_000)]
    for token in tokens:
        router.step({key: (token + place) % 12 for place, key in enumerate(keys)})
    assert len(ticket.pending) < 400 * n
    timings = Timings(0.1, 0.2, 0.3, 0.4, 0)
    router.step({}, *(Finished(key, FinishReason.LENGTH, None, None, 0, timings) for key in keys))
    assert router.router.num_open == 0
    assert [ended.usage.completion_tokens for ended in router.ended] == [n * 10_000]
    chunks = ticket.take()
    for index in range(n):
        expected = [(token + index) % 12 for token in tokens]
        assert whole(chunks, index) == ("".join(chr(97 + token) for token in expected), expected)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [FinishReason.LENGTH] * n
    assert ticket.take() == []


def test_a_choice_cut_by_a_stop_string_is_accounted_for_by_the_engine() -> None:
    """Its text goes out at once; that it was the last waits for the engine, which knows times and cached tokens."""
    router = Router()
    ticket, (key,) = router.open(stop=("cd",))
    assert [router.step({key: token}) for token in (0, 2, 3)] == [[], [], [key]]
    chunks = ticket.take()
    assert whole(chunks) == ("a", [0, 2, 3])
    assert not ticket.is_done
    assert router.step({key: 4}) == [], "the engine's tokens on the way are dropped"
    timings = Timings(0.1, 0.2, 0.3, 0.4, 1)
    router.step({}, Finished(key, FinishReason.ABORT, None, None, 32, timings))
    (last,) = ticket.take()
    assert (last.text, last.token_ids, last.finish_reason, last.stop_reason) == ("", (), FinishReason.STOP, "cd")
    assert (last.timings, last.num_cached_tokens) == (timings, 32)
    (ended,) = router.ended
    assert (ended.timings, ended.reasons) == ((timings,), (FinishReason.STOP,))
    assert (ended.usage.completion_tokens, ended.usage.cached_tokens) == (3, 32)
    assert router.router.num_open == 0


def test_a_choice_that_was_cut_is_whole_though_the_engine_dies() -> None:
    router = Router()
    ticket, (key,) = router.open(stop=("cd",))
    for token in (2, 3):
        router.step({key: token})
    router.router.fail_all(EngineDeadError("gone"))
    *_, last = ticket.take()
    assert last.finish_reason is FinishReason.STOP
    assert ticket.failure is None
    assert [ended.reasons for ended in router.ended] == [(FinishReason.STOP,)]
    assert router.ended[0].timings[0].first_token_s > 0


def test_a_reader_that_left_and_a_dead_engine_are_accounted_for() -> None:
    """Tokens, reason and times of every choice, also of one that never had a token."""
    router = Router()
    left, (key, silent) = router.open("left", n=2)
    _, (other,) = router.open("other")
    for _ in range(3):
        router.step({key: 1, other: 1})
    assert sorted(router.router.close(left)) == [key, silent]
    router.router.fail_all(EngineDeadError("gone"))
    first, second = router.ended
    assert first.reasons == (FinishReason.ABORT, FinishReason.ABORT)
    assert (first.usage.completion_tokens, second.usage.completion_tokens) == (3, 3)
    assert sorted(timings.first_token_s > 0 for timings in first.timings) == [False, True]
    assert second.reasons == (FinishReason.ERROR,)
    assert second.error == "gone"
    assert second.timings[0].first_token_s > 0
    assert router.router.num_open == 0


def test_text_that_cannot_be_made_ends_its_choice_alone() -> None:
    """Law 14a, on this side: the tokens of the others are in the same message."""
    router = Router()
    bad, (culprit,) = router.open("bad")
    good, (other,) = router.open("good")
    assert router.step({culprit: BROKEN, other: 1}) == [culprit]
    router.step({}, Finished(culprit, FinishReason.ABORT, None, None, 0, Timings(0.1, 0.2, 0.3, 0.4, 0)))
    (chunk,) = bad.take()
    assert chunk.finish_reason is FinishReason.ERROR
    assert "no such token" in (chunk.error or "")
    assert whole(good.take()) == ("b", [1])
    assert [ended.request_id for ended in router.ended] == ["bad"]
    assert router.router.num_open == 1


def test_a_request_whose_text_cannot_begin_leaves_nothing_open() -> None:
    """The choices started before the fault stayed in the count, and the queue filled up with them."""
    router = Router()
    router.letters.left = 2
    with pytest.raises(ValueError, match="cannot start"):
        router.open("bad", n=3)
    assert (router.router.num_open, router.router.num_queued_tokens, router.router.tickets) == (0, 0, {})
    router.letters.left = -1
    ticket, keys = router.open("good", n=2)
    assert ticket.keys == set(keys)
    assert router.router.num_open == 2
