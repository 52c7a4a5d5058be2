"""One choice's tokens to chunks of text, token ids and log-probabilities, cut at stop strings.

What is counted: a token that ended the choice (EOS or a stop token id) is in `token_ids` and in the count, and its text
is left out unless `include_stop_str_in_output`. A stop string cuts the text where it begins (where it ends, if it is
included), and keeps the tokens up to the one that completed it; later ones are dropped and not counted.

Which stop wins: the one complete at the earliest character; of several complete at the same one, the longest. The token
that completes it must be later than the first `min_tokens`. So the result depends neither on how tokens arrive in
pushes nor on the order of the stop strings.

Hold-back: the longest end of the text that could begin a stop string waits for what follows, and a token waits with
its text: it is emitted when all of its text has been.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from enginectl.types import FinishReason, OutputChunk

if TYPE_CHECKING:
    from enginectl.interfaces.detokenizer import TextStream
    from enginectl.types import Finished, SamplingParams, TokenLogprobs


@dataclass(slots=True, eq=False)
class _Node:
    """A prefix of some stop strings. num_held: characters at the end of the text that may still become one.
    stop: the longest stop string that ends here.
    """

    depth: int
    children: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node | None = None
    num_held: int = 0
    stop: str | None = None


class StopMatcher:
    """Finds stop strings in text that comes in pieces (Aho and Corasick 1975). One serves all choices of a request."""

    __slots__ = ("firsts", "root")

    def __init__(self, stops: Sequence[str]) -> None:
        assert stops, "no stop strings"
        assert all(stops), "an empty stop string; the API refuses those"
        self.root = _Node(0)
        self.firsts = frozenset(stop[0] for stop in stops)
        for stop in stops:
            node = self.root
            for char in stop:
                node = node.children.setdefault(char, _Node(node.depth + 1))
            node.stop = stop
        self._link()

    def _link(self) -> None:
        """Give every node the longest proper suffix that is a node too; parents come before children."""
        queue = [self.root]
        for node in queue:
            for char, child in node.children.items():
                child.fallback = self.root if node is self.root else self._next(node.fallback or self.root, char)
                child.num_held = child.depth if child.children else child.fallback.num_held
                child.stop = child.stop or child.fallback.stop
                queue.append(child)

    def _next(self, node: _Node, char: str) -> _Node:
        at: _Node | None = node
        while at is not None:
            if char in at.children:
                return at.children[char]
            at = at.fallback
        return self.root

    def scan(self, node: _Node, text: str, *, find: bool) -> tuple[_Node, int]:
        """Read text from a node. Returns the node reached and, if find, where the first stop ended, else -1."""
        if node is self.root and self.firsts.isdisjoint(text):
            return node, -1
        for i, char in enumerate(text):
            node = self._next(node, char)
            if find and node.stop is not None:
                return node, i + 1
        return node, -1


class ChoiceText:
    """Assembles one choice. When `stopped` is True the last chunk has been made: abort the choice in the engine."""

    __slots__ = (
        "_ending_ids",
        "_ends",
        "_finished",
        "_held",
        "_ids",
        "_include_stop",
        "_index",
        "_logprobs",
        "_matcher",
        "_min_tokens",
        "_node",
        "_num_chars",
        "_num_tokens",
        "_stream",
        "stopped",
    )

    def __init__(
        self,
        index: int,
        stream: TextStream,
        params: SamplingParams,
        *,
        eos_token_ids: Sequence[int] = (),
        matcher: StopMatcher | None = None,
    ) -> None:
        """index: which choice. eos_token_ids: the model's set. matcher: made from `params.stop`, to share among choices."""
        self.stopped = False
        self._index = index
        self._stream = stream
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._ending_ids = frozenset((*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids))
        self._matcher = matcher or (StopMatcher(params.stop) if params.stop else None)
        self._node = self._matcher.root if self._matcher else None
        self._num_tokens = 0
        self._finished = False
        self._held = ""  # text not emitted yet
        self._num_chars = 0  # length of all text so far, emitted and held
        self._ids: list[int] = []  # tokens not emitted yet
        self._ends: list[int] = []  # where the text of each of them ends
        self._logprobs: list[TokenLogprobs] | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens that count: emitted or waiting with their text, none after a stop."""
        return self._num_tokens

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None, finished: Finished | None
    ) -> OutputChunk | None:
        """Take what a step made for this choice; returns what is new, or None.

        logprobs: one entry per token, or None in every push. finished: with the choice's last tokens, or alone.
        After the last chunk everything is ignored. Called: once per step at most.
        """
        if self._finished:
            return None
        if self._matcher is not None:
            return self._push_with_stops(token_ids, logprobs, finished)
        self._num_tokens += len(token_ids)
        if finished is not None:
            return self._last(self._final_text(token_ids, finished), token_ids, logprobs, finished)
        if not token_ids:
            return None
        return OutputChunk(
            index=self._index,
            text=self._stream.push(token_ids),
            token_ids=tuple(token_ids),
            logprobs=None if logprobs is None else tuple(logprobs),
        )

    def _final_text(self, token_ids: Sequence[int], finished: Finished) -> str:
        spoken = token_ids[:-1] if self._ends_silently(token_ids, finished) else token_ids
        text = self._stream.push(spoken) if spoken else ""
        return text + self._stream.flush()

    def _ends_silently(self, token_ids: Sequence[int], finished: Finished) -> bool:
        """Whether the last token ended the choice and its text is to be left out."""
        if self._include_stop or not token_ids or finished.reason is not FinishReason.STOP:
            return False
        return token_ids[-1] in self._ending_ids or token_ids[-1] == finished.stop_token_id

    def _last(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        finished: Finished | None,
        stop: str | None = None,
    ) -> OutputChunk:
        self._finished = True
        reason = FinishReason.STOP if stop is not None or finished is None else finished.reason
        ended_by_engine = finished is not None and stop is None
        return OutputChunk(
            index=self._index,
            text=text,
            token_ids=tuple(token_ids),
            logprobs=None if logprobs is None else tuple(logprobs),
            finish_reason=reason,
            stop_reason=finished.stop_token_id if finished is not None and ended_by_engine else stop,
            error=finished.error if finished is not None and ended_by_engine else None,
            num_cached_tokens=finished.num_cached_tokens if finished is not None else 0,
            timings=finished.timings if finished is not None else None,
        )

    # With stop strings

    def _push_with_stops(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None, finished: Finished | None
    ) -> OutputChunk | None:
        silent = finished is not None and self._ends_silently(token_ids, finished)
        num_spoken = len(token_ids) - silent
        if logprobs is not None and self._logprobs is None:
            self._logprobs = []
        for i, token_id in enumerate(token_ids):
            self._num_tokens += 1
            self._ids.append(token_id)
            if logprobs is not None and self._logprobs is not None:
                self._logprobs.append(logprobs[i])
            text = self._stream.push((token_id,)) if i < num_spoken else ""
            stop = self._read(text)
            self._ends.append(self._num_chars)
            if stop is not None:
                return self._stop(stop, finished)
        if finished is None:
            return self._release()
        stop = self._read(self._stream.flush())
        if stop is not None:
            return self._stop(stop, finished)
        return self._last(self._held, self._ids, self._logprobs, finished)

    def _read(self, text: str) -> str | None:
        """Add a token's text; returns the stop string it completed, with the text cut after it."""
        assert self._matcher is not None, "no stop strings"
        assert self._node is not None, "no stop strings"
        if not text:
            return None
        self._node, end = self._matcher.scan(self._node, text, find=self._num_tokens > self._min_tokens)
        text = text if end < 0 else text[:end]
        self._held += text
        self._num_chars += len(text)
        return None if end < 0 else self._node.stop

    def _stop(self, stop: str, finished: Finished | None) -> OutputChunk:
        self.stopped = True
        text = self._held if self._include_stop else self._held[: len(self._held) - len(stop)]
        return self._last(text, self._ids, self._logprobs, finished, stop)

    def _release(self) -> OutputChunk | None:
        """Emit the text that can no longer begin a stop string, and the tokens whose text that completes."""
        assert self._node is not None, "no stop strings"
        cut = len(self._held) - self._node.num_held
        num_tokens = bisect_right(self._ends, self._num_chars - self._node.num_held)
        if not cut and not num_tokens:
            return None
        logprobs = self._logprobs
        chunk = OutputChunk(
            index=self._index,
            text=self._held[:cut],
            token_ids=tuple(self._ids[:num_tokens]),
            logprobs=None if logprobs is None else tuple(logprobs[:num_tokens]),
        )
        self._held = self._held[cut:]
        del self._ids[:num_tokens], self._ends[:num_tokens]
        if logprobs is not None:
            del logprobs[:num_tokens]
        return chunk
