"""What goes wrong for one request stays with that request, and the step calls no plugin hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from enginectl import Engine, RequestOutput, SamplingParams, StructuredOutputs
from enginectl.engine.deferred import DeferredExecutor
from enginectl.engine.runner import LocalRunner
from enginectl.errors import RequestError
from enginectl.interfaces.grammar import GrammarMatcher
from enginectl.interfaces.model import ForwardInput, Kept
from enginectl.interfaces.observer import Observer
from enginectl.interfaces.sampler import LogitsProcessor, SampleBatch
from enginectl.testing.tiny_models import EOS, VOCAB_SIZE
from enginectl.testing.toys import ConstantSpeculator, CycleGrammar, CycleMatcher
from enginectl.types import EngineStats, FinishedRequest

POISON = 251
GREEDY = SamplingParams(temperature=0.0, max_tokens=14)
SEEDED = SamplingParams(seed=3, max_tokens=14)
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def engine_of(model: Path, depth: int, **options: Any) -> Engine:
    fixed = {"max_num_seqs": 8, "block_size": 4, "dtype": "float32", "num_threads": 1, "only_plugins": True}
    return Engine(str(model), overlap_depth=depth, **{**fixed, **options})


def runner(engine: Engine) -> LocalRunner:
    executor = engine.core.executor
    inner = executor.inner if isinstance(executor, DeferredExecutor) else executor
    assert isinstance(inner, LocalRunner)
    return inner


def at_rest(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_blocks_in_use, stats.num_running, stats.num_waiting) == (0, 0, 0)
    engine.core.pool.check()


def ids(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    assert all(output.error is None for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


def some_prompts(num: int = 7) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(3, 250, random.integers(2, 14)).tolist() for _ in range(num)]


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> dict[str, list[tuple[int, ...]]]:
    with engine_of(model, 0) as engine:
        return {
            "greedy": ids(engine.generate(some_prompts(), GREEDY)),
            "seeded": ids(engine.generate(some_prompts(), SEEDED)),
        }


def forward_that_raises(forward: Callable[[ForwardInput], Kept]) -> Callable[[ForwardInput], Kept]:
    """The model, but for one token."""

    def raise_on_poison(step: ForwardInput) -> Kept:
        if (step.token_ids == POISON).any():
            raise ValueError("this token is not for me")
        return forward(step)

    return raise_on_poison


@DEPTHS
@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_a_row_that_makes_the_model_raise_ends_alone(
    kind: str, speculates: bool, depth: int, model: Path, undisturbed: dict[str, list[tuple[int, ...]]]
) -> None:
    """Law 14a: several poisonous prompts among others, at once and late; the others get the same tokens."""
    params = GREEDY if kind == "greedy" else SEEDED
    asked = some_prompts()
    late = [*range(40, 70), POISON]  # its poison is in the third chunk
    prompts = [asked[0], [POISON], *asked[1:4], [5, POISON, 6], *asked[4:], late]
    bad = {1, 5, 9}
    extra = {"speculator": ConstantSpeculator()} if speculates else {}
    with engine_of(model, depth, max_num_batched_tokens=16, **extra) as engine:
        local: Any = runner(engine)
        local._forward = forward_that_raises(local._forward)
        for _ in range(2):
            outputs = engine.generate(prompts, params)
            errors = {i: str(output.error) for i, output in enumerate(outputs) if output.error is not None}
            assert set(errors) == bad
            assert all("ValueError: this token is not for me" in error for error in errors.values())
            assert ids([o for i, o in enumerate(outputs) if i not in bad]) == undisturbed[kind]
            assert all(outputs[i].outputs[0].finish_reason.value == "error" for i in bad)
            at_rest(engine)


class Picky(LogitsProcessor):
    """Raises where it is told to, for requests with presence_penalty 0.125."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.num_raised = 0
        self.rows: set[int] = set()

    def _maybe(self, where: str) -> None:
        if where == self.where:
            self.num_raised += 1
            raise LookupError(f"{where} is broken")

    def validate(self, params: SamplingParams, vocab_size: int) -> None:
        if params.presence_penalty == 0.125:
            self._maybe("validate")

    def add_row(self, row: int, params: SamplingParams, seed: int, choice: int, prompt_len: int) -> None:
        if params.presence_penalty == 0.125:
            self._maybe("add_row")
            self.rows.add(row)

    def remove_row(self, row: int) -> None:
        if row in self.rows:
            self.rows.remove(row)
            self._maybe("remove_row")

    def is_active(self, rows: NDArray[np.int32]) -> bool:
        return bool(self.rows)

    def needs_logits(self, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        return np.isin(rows, list(self.rows))

    def apply(self, logits: Tensor, batch: SampleBatch) -> None:
        if self.rows.intersection(batch.rows.tolist()):
            self._maybe("apply")


@DEPTHS
@pytest.mark.parametrize("where", ["validate", "add_row", "remove_row", "apply"])
def test_a_processor_that_raises_ends_that_row_alone(
    where: str, depth: int, model: Path, undisturbed: dict[str, list[tuple[int, ...]]]
) -> None:
    """Law 14a: whichever method it is. Raising as the row leaves ends nobody."""
    toy = Picky(where)
    prompts = some_prompts()
    bad = SamplingParams(temperature=0.0, max_tokens=14, presence_penalty=0.125)
    with engine_of(model, depth, logits_processor=toy) as engine:
        outputs = engine.generate([prompts[0], [9, 9], *prompts[1:]], [GREEDY, bad, *[GREEDY] * 6])
        assert ids([outputs[0], *outputs[2:]]) == undisturbed["greedy"]
        error = outputs[1].error
        assert (error is None) if where == "remove_row" else (f"LookupError: {where} is broken" in str(error))
        assert ids(engine.generate(prompts, GREEDY)) == undisturbed["greedy"]  # rows are used again
        at_rest(engine)
    assert toy.num_raised >= 1


# -- grammars ----------------------------------------------------------------------------------------------------


def structured(expression: str = "cycle", **fields: Any) -> SamplingParams:
    asked = StructuredOutputs(regex=expression, backend=fields.pop("backend", None))
    return SamplingParams(**{"seed": 4, "max_tokens": 24, **fields}, structured_outputs=asked)


@DEPTHS
def test_output_is_what_the_grammar_can_produce(depth: int, model: Path) -> None:
    """Law 22: masked, ended by the grammar's end, beside rows without one; compiled once for all."""
    toy = CycleGrammar(VOCAB_SIZE, [EOS])
    with engine_of(model, depth, grammar=toy, speculator=ConstantSpeculator(3)) as engine:
        params = [structured(logit_bias={EOS: 6.0}), structured(temperature=0.0), GREEDY] * 4
        outputs = engine.generate(some_prompts(12), params)
        at_rest(engine)
    reasons = set()
    for output, one in zip(outputs, params, strict=True):
        (choice,) = output.outputs
        assert toy.allows(choice.token_ids) == (one.structured_outputs is not None)
        if one.structured_outputs is not None:
            reasons.add(choice.finish_reason.value)
            assert (choice.finish_reason.value == "stop") == (choice.token_ids[-1] == EOS)
    assert reasons == {"stop", "length"}
    assert toy.num_compiled == 1


@DEPTHS
@pytest.mark.parametrize(
    ("params", "words"),
    [
        (structured("other"), "it knows the expressions"),
        (structured("broken"), "the expression is broken"),
        (structured(backend="xgrammra"), "no grammar backend named 'xgrammra'"),
    ],
)
def test_a_constraint_that_cannot_be_honoured_is_refused(
    params: SamplingParams, words: str, depth: int, model: Path, undisturbed: dict[str, list[tuple[int, ...]]]
) -> None:
    """Laws 11 and 22: it never ran, so it is the request that is wrong; it was reported as a failure of the engine."""
    with engine_of(model, depth, grammar=CycleGrammar(VOCAB_SIZE, [EOS])) as engine:
        (ticket,) = engine._submit(engine._requests([[5, 6]], params, {}))
        while not ticket.is_done:
            engine._step()
        assert isinstance(ticket.failure, RequestError)
        assert words in str(ticket.failure)
        outputs = engine.generate([*some_prompts(), [5, 6]], [*[GREEDY] * 7, params])
        assert ids(outputs[:7]) == undisturbed["greedy"]
        assert words in str(outputs[7].error)
        at_rest(engine)


def test_structured_outputs_without_a_backend_are_refused(model: Path) -> None:
    with engine_of(model, 0) as engine:
        assert "need a grammar plugin" in str(engine.generate([[5]], structured())[0].error)


def test_ignoring_the_end_contradicts_a_grammar(model: Path) -> None:
    """What followed a finished grammar was token 0, for ever."""
    with engine_of(model, 0, grammar=CycleGrammar(VOCAB_SIZE, [EOS])) as engine, pytest.raises(RequestError) as caught:
        engine.generate([[5]], structured(ignore_eos=True))
    assert caught.value.param == "ignore_eos"


@DEPTHS
def test_constraints_that_leave_no_token_end_the_row_with_a_reason(
    depth: int, model: Path, undisturbed: dict[str, list[tuple[int, ...]]]
) -> None:
    """Law 22: a token outside the grammar was emitted instead."""
    params = structured(allowed_token_ids=(3, 6, 9))  # state 1 wants t % 3 == 1
    with engine_of(model, depth, grammar=CycleGrammar(VOCAB_SIZE, [EOS])) as engine:
        outputs = engine.generate([*some_prompts(), [5, 6]], [*[GREEDY] * 7, params])
        assert ids(outputs[:7]) == undisturbed["greedy"]
        assert "leave no token" in str(outputs[7].error)
        assert len(outputs[7].outputs[0].token_ids) == 1
        at_rest(engine)


class BreakingGrammar(CycleGrammar):
    """Its matchers raise in one method, at the fifth token."""

    def __init__(self, where: str) -> None:
        super().__init__(VOCAB_SIZE, [EOS])
        self.where = where

    def matcher(self, compiled: object) -> GrammarMatcher:
        return BreakingMatcher(self)


class BreakingMatcher(CycleMatcher):
    def fill_mask(self, mask: NDArray[np.bool_]) -> None:
        if isinstance(self._grammar, BreakingGrammar) and self._grammar.where == "mask" and len(self._accepted) >= 4:
            raise OSError("the mask is broken")
        super().fill_mask(mask)

    def accept(self, token_id: int) -> bool:
        if isinstance(self._grammar, BreakingGrammar) and self._grammar.where == "accept" and len(self._accepted) >= 4:
            raise OSError("the accept is broken")
        return super().accept(token_id)


@DEPTHS
@pytest.mark.parametrize("where", ["mask", "accept"])
def test_a_matcher_that_raises_ends_its_row_and_advances_no_other(where: str, depth: int, model: Path) -> None:
    """Law 14a: the step is run again for the others, whose matchers must not advance twice."""
    good, bad = CycleGrammar(VOCAB_SIZE, [EOS]), BreakingGrammar(where)
    params = structured(seed=8)
    with engine_of(model, depth, grammar=good) as engine:
        expected = ids(engine.generate(some_prompts(3), params))
    good.name, bad.name = "good", "bad"  # type: ignore[attr-defined]
    fine, broken = structured(seed=8, backend="good"), structured(seed=8, backend="bad")
    with engine_of(model, depth, grammar=[good, bad]) as engine:
        first, second, third = some_prompts(3)
        outputs = engine.generate([first, [7, 8], second, third], [fine, broken, fine, fine])
        assert ids([outputs[0], *outputs[2:]]) == expected
        assert f"the {where} is broken" in str(outputs[1].error)
        assert len(outputs[1].outputs[0].token_ids) == 4
        at_rest(engine)


def test_a_step_behind_one_that_raised_is_not_run(model: Path) -> None:
    """Law 14a at depth 1: its matchers would advance over tokens that are taken back."""
    params = structured(seed=8)
    late = [*range(40, 70), POISON]
    expected: list[tuple[int, ...]] = []
    for poisons in (False, True):
        with engine_of(model, 1, max_num_batched_tokens=12, grammar=CycleGrammar(VOCAB_SIZE, [EOS])) as engine:
            local: Any = runner(engine)
            local._forward = forward_that_raises(local._forward)
            outputs = engine.generate([*some_prompts(3), *[late] * poisons], [params] * 3 + [GREEDY] * poisons)
            if not poisons:
                expected = ids(outputs)
                continue
            assert "not for me" in str(outputs[3].error)
            assert ids(outputs[:3]) == expected
            assert engine.stats().num_generation_tokens > 30
            at_rest(engine)


class Broken(Observer):
    """Raises whenever it is told something."""

    num_told = 0

    def on_stats(self, stats: EngineStats) -> None:
        self.num_told += 1
        raise OSError("no room")

    def on_finished(self, finished: FinishedRequest) -> None:
        self.num_told += 1
        raise OSError("no room")


def test_an_observer_that_raises_changes_nothing(model: Path, undisturbed: dict[str, list[tuple[int, ...]]]) -> None:
    """It ended the call, and lost the tokens of every request in that message."""
    toy = Broken()
    with engine_of(model, 0, observer=toy) as engine:
        assert ids(engine.generate(some_prompts(), GREEDY)) == undisturbed["greedy"]
        at_rest(engine)
    assert toy.num_told > 7


# -- hooks -------------------------------------------------------------------------------------------------------


@DEPTHS
def test_no_hook_is_called_in_the_step(depth: int, model: Path) -> None:
    """Law 24: hooks run at admission and at the finish; 32 decode steps between them call none."""
    with engine_of(model, depth) as engine:
        calls: list[str] = []
        engine._host._manager.add_hookcall_monitoring(
            lambda name, impls, kwargs: calls.append(name), lambda outcome, name, impls, kwargs: None
        )
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        tickets = engine._submit(engine._requests([[5, 6], [7]], params, {}))
        assert calls == ["enginectl_request_admitted"] * 2
        engine._step()
        for _ in range(32):
            engine._step()
        assert engine.stats().num_generation_tokens == 66 - 2 * depth
        assert calls == ["enginectl_request_admitted"] * 2
        while not all(ticket.is_done for ticket in tickets):
            engine._step()
        assert calls[2:] == ["enginectl_request_finished"] * 2


def test_two_engines_in_one_process(model: Path, tiny: Callable[[str], Path]) -> None:
    """Law 24: different models, parts and plugins, stepped in turn; neither changes the other's tokens."""
    prompts = some_prompts(4)
    other = tiny("qwen3")
    with engine_of(model, 0) as one:
        first = ids(one.generate(prompts, SEEDED))
    with engine_of(other, 0) as one:
        second = ids(one.generate(prompts, SEEDED))
    assert first != second
    mine, theirs = engine_of(model, 1, speculator=ConstantSpeculator()), engine_of(other, 0, block_size=16)
    with mine, theirs:
        a = mine._submit(mine._requests(prompts, SEEDED, {}))
        b = theirs._submit(theirs._requests(prompts, SEEDED, {}))
        while not all(ticket.is_done for ticket in (*a, *b)):
            mine._step()
            theirs._step()
        for tickets, expected in ((a, first), (b, second)):
            found = [tuple(t for chunk in ticket.take() for t in chunk.token_ids) for ticket in tickets]
            assert found == expected
        assert mine._host is not theirs._host
