"""Nothing grows with the number of requests served, with aborts and failures among them."""

from __future__ import annotations

import gc
import logging
from collections import Counter

import pytest

from enginectl.api_side import NoText
from enginectl.engine.client import EngineInfo
from enginectl.engine.router import OutputRouter, Ticket
from enginectl.testing.dict_index import DictPrefixIndex
from enginectl.testing.free_executor import FreeLoop, free_core
from enginectl.types import FinishedRequest, GenerateRequest, SamplingParams

VOCAB, EOS, POISON, BLOCK = 64, 0, 65, 4
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def live_objects() -> Counter[str]:
    gc.collect()
    return Counter(type(thing).__qualname__ for thing in gc.get_objects())


def serve(router: OutputRouter, loop: FreeLoop, start: int, count: int) -> None:
    """Requests through the API side and the loop: some abort, some fail, two choices each."""
    open_tickets: list[Ticket] = []
    for number in range(start, start + count):
        prompt = [number % 60 + 1, 2, *([POISON] if number % 50 == 0 else [])]
        params = SamplingParams(max_tokens=3, n=2)
        ticket, specs = router.open(
            GenerateRequest(request_id=str(number), prompt_token_ids=prompt, params=params), lambda: None
        )
        for spec in specs:
            loop.core.add(spec)
        open_tickets.append(ticket)
        if number % 31 == 0:
            loop.core.abort(router.close(ticket))
        if len(open_tickets) == 32 or number == start + count - 1:
            while loop.core.has_work:
                for outputs in loop.core.step():
                    loop.core.abort(router.dispatch(outputs))
            assert all(ticket.is_done for ticket in open_tickets)
            open_tickets = []


def leaks(count: int, depth: int) -> dict[str, int]:
    """How many more objects of each type live after `count` requests than after a tenth of them."""
    finished: Counter[str] = Counter()

    def on_finished(ticket: Ticket, error: str | None) -> None:
        account: FinishedRequest = ticket.finished(error)
        finished.update(reason.value for reason in account.reasons)

    info = EngineInfo(
        model="m", architecture="A", dtype="float32", device="cpu", max_model_len=16, vocab_size=VOCAB, eos_token_ids=(EOS,)
    )  # fmt: skip
    router = OutputRouter(NoText(), info, seed=1, on_finished=on_finished)
    index = DictPrefixIndex(BLOCK)
    loop = free_core(
        max_num_seqs=64,
        max_model_len=16,
        num_blocks=200,
        max_num_batched_tokens=256,
        poison=POISON,
        index=index,
        overlap_depth=depth,
    )
    serve(router, loop, 0, count // 10)
    before = live_objects()
    serve(router, loop, count // 10, count - count // 10)
    after = live_objects()
    assert finished.total() == 2 * count
    assert {"abort", "error", "length"} <= set(finished)
    assert router.num_open == 0
    assert not router.tickets
    stats = loop.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_in_use) == (0, 0, 0)
    loop.core.pool.check()
    loop.close()
    return {name: after[name] - before[name] for name in after if after[name] - before[name] > 20}


@DEPTHS
def test_live_objects_do_not_grow(depth: int, caplog: pytest.LogCaptureFixture) -> None:
    """Law 14, in short."""
    caplog.set_level(logging.ERROR, "enginectl.engine")  # pytest keeps log records, and they the exceptions
    assert leaks(2000, depth) == {}


@pytest.mark.slow
@DEPTHS
def test_live_objects_do_not_grow_over_many_requests(depth: int, caplog: pytest.LogCaptureFixture) -> None:
    """Law 14: 100,000 requests of two choices; between the 10,000th and the last."""
    caplog.set_level(logging.ERROR, "enginectl.engine")
    assert leaks(100_000, depth) == {}
