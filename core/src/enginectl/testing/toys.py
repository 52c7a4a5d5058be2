"""Small parts for the seams a request can use, to compose by hand: `Engine(model, speculator=…, grammar=…, adapter=…)`.

They are exact and need no weights, so that a test of the engine says something about the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from enginectl.errors import NotFoundError, RequestError
from enginectl.interfaces.adapter import AdapterBackend, AdapterInfo
from enginectl.interfaces.grammar import GrammarBackend, GrammarMatcher
from enginectl.interfaces.speculator import DraftBatch, Speculator
from enginectl.types import SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from torch import Tensor

    from enginectl.interfaces.model import Model

Drafts = tuple[NDArray[np.int32], NDArray[np.int32]]


class ConstantSpeculator(Speculator):
    """Always proposes the same token. rows: those it knows."""

    is_adaptive = False

    def __init__(self, token: int = 7, max_drafts: int = 3) -> None:
        self.token = token
        self.max_drafts = max_drafts
        self.rows: set[int] = set()
        self.most_asked = 0

    def add_row(self, row: int, token_ids: NDArray[np.int32], params: SamplingParams) -> None:
        """Know it."""
        assert row not in self.rows, f"row {row} is added twice"
        self.rows.add(row)

    def remove_row(self, row: int) -> None:
        """Forget it."""
        self.rows.remove(row)

    def propose(self, batch: DraftBatch) -> Drafts:
        """As many as are wanted."""
        assert self.rows.issuperset(batch.rows.tolist()), "drafts are wanted for known rows"
        self.most_asked = max(self.most_asked, int(batch.limit.max(initial=0)))
        return np.full((batch.rows.size, self.max_drafts), self.token, np.int32), batch.limit


class AnswerSpeculator(Speculator):
    """Knows the answers, and spoils some: a draft for position p of the output is wrong where `spoil(p)` is true.

    answers: prompt to the output. Prompts it does not know get token 0.
    """

    is_adaptive = False

    def __init__(
        self,
        answers: Mapping[tuple[int, ...], Sequence[int]],
        *,
        max_drafts: int = 4,
        spoil: Callable[[int], bool] = lambda position: False,
    ) -> None:
        self.max_drafts = max_drafts
        self._answers = sorted(answers.items(), key=lambda item: -len(item[0]))
        self._spoil = spoil
        self._known: dict[int, tuple[int, Sequence[int]]] = {}

    def add_row(self, row: int, token_ids: NDArray[np.int32], params: SamplingParams) -> None:
        """Find the longest prompt that these tokens begin with."""
        ids = tuple(token_ids.tolist())
        found = ((len(p), a) for p, a in self._answers if ids[: len(p)] == p)
        self._known[row] = next(found, (len(ids), ()))

    def remove_row(self, row: int) -> None:
        """Forget it."""
        del self._known[row]

    def propose(self, batch: DraftBatch) -> Drafts:
        """The next tokens of the answer."""
        drafts = np.zeros((batch.rows.size, self.max_drafts), np.int32)
        for i, (row, length) in enumerate(zip(batch.rows.tolist(), batch.num_tokens.tolist(), strict=True)):
            start, answer = self._known[row]
            for at in range(self.max_drafts):
                position = length - start + at
                right = answer[position] if position < len(answer) else 0
                drafts[i, at] = (right + 1) % 250 if self._spoil(position) else right
        return drafts, batch.limit


class HiddenSpeculator(ConstantSpeculator):
    """Drafts from the hidden rows: the head's own next token once more, so that it is right where a token repeats.

    head: [vocab_size, hidden_size].
    """

    reads_hidden = True

    def __init__(self, head: Tensor, max_drafts: int = 2) -> None:
        super().__init__(0, max_drafts)
        self.head = head
        self.num_agreed = 0
        self.num_seen = 0

    def propose(self, batch: DraftBatch) -> Drafts:
        """The hidden row must be the one that predicted the last verified token: under greedy, the head says that one."""
        assert batch.hidden is not None, "this speculator reads hidden rows"
        assert batch.hidden.shape == (batch.rows.size, self.head.shape[1]), "one hidden row a batch row"
        best = (batch.hidden.float() @ self.head.T).argmax(-1).numpy().astype(np.int32)
        last = batch.token_ids[batch.rows, batch.num_tokens - 1]
        self.num_agreed += int((best == last).sum())
        self.num_seen += last.size
        return np.repeat(best[:, None], self.max_drafts, axis=1), batch.limit


class BrokenSpeculator(ConstantSpeculator):
    """Raises where it is told to: "add_row", "remove_row", "propose"; or proposes what is no token at all: "strange"."""

    def __init__(self, where: str) -> None:
        super().__init__(7, 3)
        self.where = where
        self.num_raised = 0

    def _maybe(self, where: str) -> None:
        if self.where == where:
            self.num_raised += 1
            raise ValueError(f"{where} is broken")

    def add_row(self, row: int, token_ids: NDArray[np.int32], params: SamplingParams) -> None:
        """Raise, or know it."""
        self._maybe("add_row")
        super().add_row(row, token_ids, params)

    def remove_row(self, row: int) -> None:
        """Forget it, and raise."""
        super().remove_row(row)
        self._maybe("remove_row")

    def propose(self, batch: DraftBatch) -> Drafts:
        """Raise, or propose nonsense."""
        self._maybe("propose")
        if self.where == "strange":
            self.num_raised += 1
            drafts = np.tile(np.array([[-1, 1 << 30, 7]], np.int64), (batch.rows.size, 1))
            return drafts, np.full(batch.rows.size, 99)  # type: ignore[return-value]
        return super().propose(batch)


class CycleGrammar(GrammarBackend):
    """An automaton of `period` states, each for `hold` tokens: in state s a token t may follow if t % period == s; in
    state 0, after at least `least` tokens, the end may. It honours `StructuredOutputs(regex="cycle")` alone.
    """

    def __init__(self, vocab_size: int, ends: Sequence[int], *, period: int = 3, hold: int = 1, least: int = 6) -> None:
        self.ends = np.array(ends)
        self.period = period
        self.hold = hold
        self.least = least
        self.num_compiled = 0
        ids = np.arange(vocab_size)
        self.states = [(ids % period == state) & ~np.isin(ids, self.ends) for state in range(period)]

    def refuses(self, spec: StructuredOutputs) -> str | None:
        """All but one expression, and a broken one that compile() meets."""
        return None if spec.regex in ("cycle", "broken") else "it knows the expressions 'cycle' and 'broken'"

    def compile(self, spec: StructuredOutputs) -> object:
        """Nothing to do."""
        self.num_compiled += 1
        if spec.regex == "broken":
            raise RequestError("the expression is broken", param="structured_outputs")
        return self

    def matcher(self, compiled: object) -> GrammarMatcher:
        """In state 0."""
        return CycleMatcher(self)

    def allows(self, token_ids: Sequence[int]) -> bool:
        """Whether an output, end included, is what the automaton can produce."""
        matcher = CycleMatcher(self)
        return all(matcher.accept(token) for token in token_ids)


class CycleMatcher(GrammarMatcher):
    """One choice's place in the automaton."""

    def __init__(self, grammar: CycleGrammar) -> None:
        self._grammar = grammar
        self._accepted: list[int] = []
        self._ended = False

    @property
    def _state(self) -> int:
        return len(self._accepted) // self._grammar.hold % self._grammar.period

    def fill_mask(self, mask: NDArray[np.bool_]) -> None:
        """The state's tokens, and the end where it may come; nothing after it."""
        if self._ended:
            return
        mask |= self._grammar.states[self._state]
        if self._may_end:
            mask[self._grammar.ends] = True

    @property
    def _may_end(self) -> bool:
        return self._state == 0 and len(self._accepted) >= self._grammar.least

    def accept(self, token_id: int) -> bool:
        """Advance if the state allows it."""
        if self._ended:
            return False
        if token_id in self._grammar.ends:
            self._ended = self._may_end
        elif not self._grammar.states[self._state][token_id]:
            return False
        if token_id in self._grammar.ends and not self._ended:
            return False
        self._accepted.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        """Undo. Raises IndexError for more than were accepted."""
        if num_tokens > len(self._accepted):
            raise IndexError(f"{num_tokens} tokens undone, {len(self._accepted)} accepted")
        if num_tokens:
            del self._accepted[-num_tokens:]
            self._ended = False

    @property
    def is_finished(self) -> bool:
        """Whether the end has come."""
        return self._ended


class ConstantAdapters(AdapterBackend):
    """Adds a constant vector to the output of one linear for every token of a slot. path: the seed of the vector.

    target: the name of the linear inside the model's `module`. references: by slot, 0 at rest.
    """

    graph_capture = True

    def __init__(self, hidden_size: int, target: str, *, num_slots: int = 2, scale: float = 1.0) -> None:
        self.references = [0] * num_slots
        self._names: list[str | None] = [None] * num_slots
        self._known: dict[str, AdapterInfo] = {}
        self._hidden_size = hidden_size
        self._target = target
        self._scale = scale
        self._slots: Tensor | None = None
        self.max_at_once = 0

    def vector(self, name: str) -> NDArray[np.float32]:
        """What the adapter adds, [hidden_size]."""
        seed = int(self._known[name].path)
        numbers: NDArray[np.float32] = (
            np.random.default_rng(seed).normal(0, self._scale, self._hidden_size).astype(np.float32)
        )
        return numbers

    def attach(self, model: Model) -> None:
        """A hook on the linear."""
        import torch

        module: Any = model.module  # type: ignore[attr-defined]

        def add(_module: Any, _inputs: Any, out: Tensor) -> Tensor:
            if self._slots is None:
                return out
            table = torch.zeros(len(self._names) + 1, self._hidden_size)
            for slot, name in enumerate(self._names):
                if name is not None:
                    table[slot] = torch.from_numpy(self.vector(name))
            assert out.numel() == self._slots.numel() * self._hidden_size, "one slot a token"
            return out + table[self._slots.long()].view(out.shape)

        module.get_submodule(self._target).register_forward_hook(add)

    def load(self, name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        """Remember the seed."""
        if not path.isdigit():
            raise RequestError(f"adapter {name!r}: {path!r} is no seed")
        if name in self._known and not replace:
            raise RequestError(f"adapter {name!r} is loaded")
        self._known[name] = AdapterInfo(name, path, 1, f"{name}-{path}")
        return self._known[name]

    def unload(self, name: str) -> None:
        """Forget it."""
        if name not in self._known:
            raise NotFoundError(f"no adapter named {name!r}")
        del self._known[name]

    def list(self) -> tuple[AdapterInfo, ...]:
        """Those that are loaded."""
        return tuple(self._known.values())

    def acquire(self, name: str) -> int | None:
        """The slot that holds it, or one nobody uses."""
        if name not in self._known:
            raise NotFoundError(f"no adapter named {name!r}")
        if name in self._names:
            slot = self._names.index(name)
        elif 0 in self.references:
            slot = self.references.index(0)
            self._names[slot] = name
        else:
            return None
        self.references[slot] += 1
        self.max_at_once = max(self.max_at_once, sum(count > 0 for count in self.references))
        return slot

    def release(self, slot: int) -> None:
        """One less."""
        assert self.references[slot] > 0, f"slot {slot} is released twice"
        self.references[slot] -= 1

    def begin_step(self, slots: Tensor | None) -> None:
        """Keep the slots for the hook."""
        self._slots = slots
