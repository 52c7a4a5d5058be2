"""Grammars are compiled beside the loop, and wait for each other no more than they must."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from enginectl.engine.grammar import _CACHE_SIZE, GrammarHost
from enginectl.errors import RequestError
from enginectl.interfaces.grammar import GrammarMatcher
from enginectl.testing.toys import CycleGrammar
from enginectl.types import StructuredOutputs

READY = StructuredOutputs(regex="cycle")


class Slow(CycleGrammar):
    """Compiles `cycle` at once, and others when the gate opens."""

    def __init__(self) -> None:
        super().__init__(16, [2])
        self.gate = threading.Event()
        self.seen: list[str | None] = []

    def refuses(self, spec: StructuredOutputs) -> str | None:
        return None

    def compile(self, spec: StructuredOutputs) -> object:
        self.seen.append(spec.regex)
        if spec != READY:
            assert self.gate.wait(30)
        return super().compile(spec)


@pytest.fixture
def slow() -> Iterator[tuple[Slow, GrammarHost]]:
    backend = Slow()
    host = GrammarHost({"slow": backend})
    yield backend, host
    backend.gate.set()
    host.close()


def test_a_compiled_grammar_waits_for_no_other(slow: tuple[Slow, GrammarHost]) -> None:
    """Law 22: behind 64 others that came at once it waited for all of them, 3.2 s at 50 ms each."""
    backend, host = slow
    host.start(READY).result(10)
    waiting = [host.start(StructuredOutputs(regex=f"other {i}")) for i in range(64)]
    first, second = host.start(READY), host.start(READY)
    assert first.done()
    assert first.result() is not second.result(), "each choice has a state of its own"
    assert not any(future.done() for future in waiting)
    backend.gate.set()
    for future in waiting:
        future.result(10)


def test_one_slow_grammar_does_not_hold_up_another(slow: tuple[Slow, GrammarHost]) -> None:
    _, host = slow
    stuck = host.start(StructuredOutputs(regex="stuck"))
    host.start(READY).result(10)
    assert not stuck.done()


def test_who_asks_for_the_same_waits_for_one_compilation(slow: tuple[Slow, GrammarHost]) -> None:
    """All get the error, if it is one."""
    backend, host = slow
    futures = [host.start(StructuredOutputs(regex="broken")) for _ in range(5)]
    backend.gate.set()
    for future in futures:
        with pytest.raises(RequestError, match="the expression is broken"):
            future.result(10)
    assert backend.seen == ["broken"]


def test_what_is_asked_for_often_stays_compiled(slow: tuple[Slow, GrammarHost]) -> None:
    """Law 14: the cache is bounded, and a flood of others does not push out what is in use."""
    backend, host = slow
    backend.gate.set()
    for i in range(2 * _CACHE_SIZE):
        host.start(StructuredOutputs(regex=f"other {i}")).result(10)
        host.start(READY).result(10)
    assert backend.seen.count("cycle") == 1
    assert len(host._compiled) == _CACHE_SIZE


def test_closing_ends_what_waits() -> None:
    """Nobody is left with a future that is never done."""
    backend = Slow()
    host = GrammarHost({"slow": backend})
    waiting = [host.start(StructuredOutputs(regex=f"other {i}")) for i in range(8)]
    host.close()
    backend.gate.set()
    assert sum(future.exception(10) is None for future in waiting) <= 2


class _Panic(BaseException):
    """What a compiled library raises when it gives up."""


class Panics(CycleGrammar):
    """Gives up while it compiles, or when a state is wanted."""

    def __init__(self, *, compiles: bool) -> None:
        super().__init__(16, [2])
        self.compiles = compiles

    def compile(self, spec: StructuredOutputs) -> object:
        if not self.compiles:
            raise _Panic("unreachable")
        return super().compile(spec)

    def matcher(self, compiled: object) -> GrammarMatcher:
        raise _Panic("unreachable")


@pytest.mark.parametrize("compiles", [False, True])
def test_a_panic_ends_those_who_wait_and_no_thread(compiles: bool) -> None:
    """Law 22: it took the compiling thread along, its request waited for ever, and the next one ended the loop."""
    host = GrammarHost({"panics": Panics(compiles=compiles)})
    for _ in range(3):
        assert isinstance(host.start(READY).exception(10), _Panic)
    host.close()
