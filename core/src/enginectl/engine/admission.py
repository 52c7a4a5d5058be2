"""What a waiting request needs before it may take a row: blocks, an adapter slot, a compiled grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from enginectl.engine.ledger import BlockPool
from enginectl.engine.request import Request
from enginectl.errors import RequestError, unknown
from enginectl.interfaces.adapter import AdapterBackend
from enginectl.interfaces.sampler import RowParts
from enginectl.types import SamplingParams
from enginectl.units import plural

if TYPE_CHECKING:
    from enginectl.engine.grammar import GrammarHost

_EMPTY = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Grant:
    """The request may run: num_cached tokens are in `blocks` already, and num_tokens advance in this step.

    blocks: [n] int32, all that it holds now, cached ones first.
    """

    num_cached: int
    num_tokens: int
    blocks: NDArray[np.int32]


class Admission:
    """Grants resources or says which one is missing; nothing is held unless everything is.

    watermark: blocks kept free for rows that run, so that a new row is not preempted at once; None is one in a hundred.
    A preempted request waits for more: a block for each row that runs, times how often it gave way, so that it does not
    come back only to give way again.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        chunked_prefill: bool = True,
        adapters: AdapterBackend | None = None,
        grammars: GrammarHost | None = None,
        max_drafts: int = 0,
        vocab_size: int = 0,
        checks: Sequence[RowParts] = (),
        watermark: int | None = None,
    ) -> None:
        self.pool = pool
        self.adapters = adapters
        self.grammars = grammars
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.error = ""
        self.is_refusal = False
        self._block_size = block_size
        self._chunked = chunked_prefill
        self._max_drafts = max_drafts
        self._vocab_size = vocab_size
        self._checks = tuple(checks)
        self._watermark = max(1, pool.num_usable // 100) if watermark is None else watermark

    def refuses(self, request: Request) -> str | None:
        """Why the request can never run here, or None."""
        needed = self._blocks_for(request.max_total_tokens)
        if needed > self.pool.num_usable:
            return (
                f"prompt and max_tokens are {request.max_total_tokens} tokens, {needed} KV {plural(needed, 'block')}; the pool has "
                f"{self.pool.num_usable} ({self.pool.num_usable * self._block_size} tokens). Ask for fewer tokens."
            )
        params = request.spec.params
        if params.structured_outputs is not None and self.grammars is None:
            return "structured outputs need a grammar plugin, and none is installed"
        if (name := request.spec.adapter) is not None:
            if self.adapters is None:
                return f"adapter {name!r} needs an adapter plugin, and none serves here"
            if name not in (known := [info.name for info in self.adapters.list()]):
                return unknown("adapter", name, known)
        try:
            for part in self._checks:
                part.validate(params, self._vocab_size)
        except RequestError as error:
            return str(error)
        return None

    def prepare(self, request: Request) -> None:
        """Start what takes time off the loop, the grammar, and count it among the users of its adapter."""
        self._compile(request)
        if request.spec.adapter is not None and self.adapters is not None:
            self.adapters.add_user(request.spec.adapter)

    def _compile(self, request: Request) -> None:
        spec = request.spec.params.structured_outputs
        if spec is not None and self.grammars is not None:
            request.grammar = self.grammars.start(spec)

    def try_acquire(self, request: Request, budget: int, num_running: int, owed: int = 0) -> Grant | str:
        """A grant, or the word for what is missing: "grammar", "blocks", "adapter", or "error".

        owed: blocks that rows which run still need for the tokens they have; they are not given away. After "error",
        `error` says why and `is_refusal` whether it is the request that is wrong.
        """
        if request.grammar is not None:
            if not request.grammar.done():
                return "grammar"
            if (failure := request.grammar.exception()) is not None:
                return self._fail(failure)
        if request.spec.adapter is not None and self.adapters is not None:
            version = self.adapters.version(request.spec.adapter)
            request.block_key = structs.replace(request.block_key, adapter_version=version)
        total = len(request.token_ids)
        cached, shared = self._match(request)
        num_tokens = min(budget, total - cached)
        if not self._chunked and num_tokens < total - cached:
            return "blocks"
        available = self.pool.num_available - self.pool.num_idle_among(shared)
        reserve = owed + self._watermark + num_running * request.num_preemptions if num_running else 0
        if self._blocks_for(min(total + 1, request.max_total_tokens)) - shared.size > available - reserve:
            return "blocks"
        if (missing := self._acquire_adapter(request)) is not None:
            return missing
        self.pool.share(shared)
        fresh = self.pool.take(self._blocks_for(cached + num_tokens) - shared.size)
        if self.pool.index is not None:
            self.prefix_queries += total
            self.prefix_hits += cached
        return Grant(cached, num_tokens, np.concatenate((shared, fresh)))

    def release(self, request: Request, *, preempted: bool) -> None:
        """The request left its row: its adapter slot is free, and so is its hash chain (a resumed one starts anew)."""
        if request.adapter_slot >= 0:
            assert self.adapters is not None, "a slot was acquired from the backend"
            self.adapters.release(request.adapter_slot)
            request.adapter_slot = -1
        if not preempted:
            self.forget(request)
            return
        self._end_chain(request)
        if request.grammar is not None:
            self._compile(request)  # a fresh matcher; it is advanced over the output when the row is added again

    def forget(self, request: Request) -> None:
        """The request is over and holds nothing: its hash chain ends, and its adapter has one user less."""
        self._end_chain(request)
        if request.spec.adapter is not None and self.adapters is not None:
            self.adapters.remove_user(request.spec.adapter)

    def _end_chain(self, request: Request) -> None:
        if self.pool.index is not None:
            self.pool.index.end(request.key)

    def draft_limit(self, params: SamplingParams) -> int:
        """Most drafts a step this request allows."""
        if params.speculation == "off":
            return 0
        wanted = params.speculation if isinstance(params.speculation, int) else self._max_drafts
        return min(wanted, self._max_drafts)

    def _match(self, request: Request) -> tuple[int, NDArray[np.int32]]:
        index = self.pool.index
        if index is None or request.spec.params.prompt_logprobs is not None:
            return 0, _EMPTY
        match = index.match(request.key, request.token_ids, request.block_key)
        most = (len(request.token_ids) - 1) // self._block_size  # the last token is computed, to sample from
        blocks = match.blocks[:most]
        return blocks.size * self._block_size, blocks

    def _acquire_adapter(self, request: Request) -> str | None:
        """None if it has its slot or needs none, else what is missing."""
        name = request.spec.adapter
        if name is None:
            return None
        assert self.adapters is not None, "refused at admission otherwise"
        try:
            slot = self.adapters.acquire(name)
        except Exception as failure:  # unloaded or damaged since the request came
            return self._fail(failure)
        if slot is None:
            return "adapter"
        request.adapter_slot = slot
        return None

    def _fail(self, failure: BaseException) -> str:
        self.is_refusal = isinstance(failure, RequestError)
        self.error = str(failure) if self.is_refusal else f"{type(failure).__name__}: {failure}"
        return "error"

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
