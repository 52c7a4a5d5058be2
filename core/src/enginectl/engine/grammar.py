"""Grammars beside the loop: compile in a pool, mask at sampling, advance by accepted tokens, roll back over drafts."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from enginectl.errors import RequestError, unknown
from enginectl.interfaces.grammar import GrammarBackend, GrammarMatcher
from enginectl.transfer import to_device
from enginectl.types import StructuredOutputs

_CACHE_SIZE = 256
_FEWEST, _MOST, _THREADS_EACH = 2, 4, 4
"""Compiling threads: two, so that one slow grammar does not hold up all others, and one for every so many threads that
compute. A compiler that keeps Python's lock slows the loop, and several of them more."""

_Compiled = tuple[GrammarBackend, object]


class GrammarHost:
    """Every installed grammar backend, chosen per request: by name, else the first that does not refuse.

    A constraint is compiled once, whoever else waits for it; one that is compiled waits for nobody. What waits is bounded
    by the requests that may be queued. num_threads: of the engine. Used by the loop alone.
    """

    def __init__(self, backends: Mapping[str, GrammarBackend], *, num_threads: int = 1) -> None:
        self._backends = dict(backends)
        num_workers = min(max(num_threads // _THREADS_EACH, _FEWEST), _MOST)
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="grammar")
        self._compiled: dict[StructuredOutputs, Future[_Compiled]] = {}

    def choose(self, spec: StructuredOutputs) -> GrammarBackend:
        """The backend for this constraint. Raises RequestError with every backend's reason if none can honour it."""
        if spec.backend is not None and spec.backend not in self._backends:
            message = unknown("grammar backend", spec.backend, self._backends)
            raise RequestError(message, param="structured_outputs")
        names = [spec.backend] if spec.backend is not None else list(self._backends)
        reasons = []
        for name in names:
            reason = self._backends[name].refuses(spec)
            if reason is None:
                return self._backends[name]
            reasons.append(f"{name}: {reason}")
        raise RequestError(f"no grammar backend can honour this: {'; '.join(reasons)}", param="structured_outputs")

    def start(self, spec: StructuredOutputs) -> Future[GrammarMatcher]:
        """Compile off the loop, or find it compiled; the future gives a fresh matcher."""
        compiled = self._compiled.pop(spec, None) or self._pool.submit(self._compile, spec)
        self._compiled[spec] = compiled  # last: what was asked for longest ago is forgotten first
        if len(self._compiled) > _CACHE_SIZE:
            self._compiled.pop(next(iter(self._compiled)))
        matcher: Future[GrammarMatcher] = Future()
        compiled.add_done_callback(partial(_begin, matcher))
        return matcher

    def _compile(self, spec: StructuredOutputs) -> _Compiled:
        backend = self.choose(spec)
        return backend, backend.compile(spec)

    def close(self) -> None:
        """Stop the pool; compiles that run are not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _begin(matcher: Future[GrammarMatcher], compiled: Future[_Compiled]) -> None:
    """A fresh matcher of what was compiled, or why there is none."""
    try:
        backend, constraint = compiled.result()
        matcher.set_result(backend.matcher(constraint))
    except BaseException as error:  # panics of compiled libraries are no Exception; nobody may wait for ever
        matcher.set_exception(error)


class GrammarRows:
    """The matchers of the rows that have one."""

    def __init__(self, max_num_seqs: int) -> None:
        self._matchers: dict[int, GrammarMatcher] = {}
        self._ends: dict[int, tuple[int, ...]] = {}
        self._has = np.zeros(max_num_seqs, np.bool_)

    def add_row(
        self, row: int, matcher: GrammarMatcher, output_ids: NDArray[np.int32], eos_token_ids: tuple[int, ...]
    ) -> None:
        """A row with a fresh matcher, advanced over what it produced before it was preempted.

        eos_token_ids: what may follow a finished grammar, whether its matcher accepts it or not.
        """
        for token in output_ids.tolist():
            if not matcher.accept(token):
                raise RequestError(f"token {token} of a resumed request is not in its grammar")
        self._matchers[row] = matcher
        self._ends[row] = eos_token_ids
        self._has[row] = True

    def remove_row(self, row: int) -> None:
        """The row is empty."""
        if self._has[row]:
            del self._matchers[row], self._ends[row]
            self._has[row] = False

    @property
    def is_empty(self) -> bool:
        """Whether no row has a grammar."""
        return not self._matchers

    def constrained(self, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        """[n] bool: rows with a grammar."""
        return self._has[rows]

    def mask(
        self, logits: Tensor, rows: NDArray[np.int32], starts: NDArray[np.intp], drafts: list[NDArray[np.int32]]
    ) -> None:
        """Mask logits [k, vocab_size] in place, of rows with a grammar. Row i's positions start at starts[i], one more
        than its drafts.

        Each matcher walks its drafts and is rolled back; positions after a draft it refuses stay unmasked, they cannot
        be accepted.
        """
        allowed = np.zeros((sum(len(draft) + 1 for draft in drafts), logits.shape[1]), np.bool_)
        masked: list[int] = []
        for row, start, draft in zip(rows.tolist(), starts.tolist(), drafts, strict=True):
            matcher, walked = self._matchers[row], 0
            try:
                for offset in range(len(draft) + 1):
                    matcher.fill_mask(allowed[len(masked)])
                    masked.append(start + offset)
                    if offset == len(draft) or not matcher.accept(int(draft[offset])):
                        break
                    walked += 1
            finally:
                matcher.rollback(walked)
        # All of them in one copy, which the host does not wait for.
        forbidden = to_device(~allowed[: len(masked)], logits.device)
        for at, row_mask in zip(masked, forbidden.unbind(), strict=True):
            logits[at].masked_fill_(row_mask, float("-inf"))

    def accept(
        self, rows: NDArray[np.int32], token_ids: NDArray[np.int32], num_new: NDArray[np.int32]
    ) -> dict[int, str]:
        """Advance by the verified tokens, [n, width] of which num_new [n] count. Returns rows that failed, and why.

        Raises nothing: the step may not be run again once a matcher has advanced.
        """
        failed: dict[int, str] = {}
        if not self._matchers:
            return failed
        for i in np.nonzero(self._has[rows])[0].tolist():
            row = int(rows[i])
            try:
                self._advance(row, token_ids[i, : num_new[i]].tolist())
            except Exception as error:
                failed[row] = f"{type(error).__name__}: {error}"
        return failed

    def _advance(self, row: int, token_ids: list[int]) -> None:
        matcher, ends = self._matchers[row], self._ends[row]
        for token in token_ids:
            accepted = matcher.accept(token)
            if token in ends:
                return  # drafts accepted behind the end are dropped
            if not accepted:
                raise RequestError(f"the grammar and the other constraints leave no token; {token} was forced")
