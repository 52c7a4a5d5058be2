"""A choice of a request inside the engine, from admission to its last token."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from enginectl.interfaces.grammar import GrammarMatcher
from enginectl.interfaces.kv import BlockKey
from enginectl.types import EngineRequest, Timings


class Request:
    """What the loop keeps of a choice. While it runs, its row's arrays are the truth; `token_ids` is brought up to
    date when it is preempted. row is -1 while it waits. num_prompt_logprobs: entries of its prompt that were sent.
    """

    __slots__ = (
        "adapter_slot",
        "block_key",
        "deadline_s",
        "first_token_s",
        "grammar",
        "key",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "prompt_len",
        "row",
        "scheduled_s",
        "spec",
        "token_ids",
    )

    def __init__(self, spec: EngineRequest) -> None:
        self.spec = spec
        self.key = spec.key
        self.token_ids: NDArray[np.int32] = np.frombuffer(spec.prompt, np.int32)
        self.prompt_len = len(self.token_ids)
        self.row = -1
        self.adapter_slot = -1
        self.grammar: Future[GrammarMatcher] | None = None
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_prompt_logprobs = 0
        self.scheduled_s = 0.0
        self.first_token_s = 0.0
        self.deadline_s = spec.arrival_s + spec.timeout_s if spec.timeout_s is not None else float("inf")
        self.block_key = BlockKey(adapter=spec.adapter, salt=spec.cache_salt)

    @property
    def max_total_tokens(self) -> int:
        """Prompt and the most output."""
        return self.prompt_len + self.spec.max_tokens

    @property
    def priority(self) -> int:
        """Lower runs first under the priority scheduler."""
        return self.spec.priority

    @property
    def arrival_s(self) -> float:
        """time.monotonic() at admission."""
        return self.spec.arrival_s

    @property
    def tenant(self) -> str:
        """Whom fairness is counted against."""
        return self.spec.tenant

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled, if nothing is cached."""
        return len(self.token_ids)

    def timings(self, now: float) -> Timings:
        """The times of its life, finished now."""
        return Timings(self.arrival_s, self.scheduled_s, self.first_token_s, now, self.num_preemptions)

    def __repr__(self) -> str:
        """Short, without contents."""
        return f"Request(key={self.key}, row={self.row}, prompt_len={self.prompt_len})"


def stop_ids(spec: EngineRequest) -> tuple[int, ...]:
    """Token ids that end this choice: EOS (a set) and the request's own."""
    return tuple(dict.fromkeys((*spec.eos_token_ids, *spec.params.stop_token_ids)))
