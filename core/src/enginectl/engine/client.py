"""The engine as its callers see it: the same interface whether it runs in this process or in one of its own."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from enginectl.types import EngineStats, GenerateRequest, OutputChunk


class EngineState(enum.StrEnum):
    """starting and restarting: try again soon. draining: no new requests. dead: gave up, see the reason."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    DRAINING = "draining"
    DEAD = "dead"


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the assembled engine reports once it is ready.

    model: the path served. max_model_len in tokens. eos_token_ids: the model's set. sampling_defaults: from the model's
    generation_config. num_kv_tokens: capacity of the KV pool. kv_bytes_per_token. table: the assembled providers as
    rows of (role, provider, plugin, distribution, version). tokenizer_dir: where the API side loads it from, or None.
    """

    model: str
    architecture: str
    dtype: str
    device: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    sampling_defaults: dict[str, Any] = {}
    num_kv_tokens: int = 0
    kv_bytes_per_token: int = 0
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 256
    table: tuple[tuple[str, str, str, str, str], ...] = ()
    skipped: tuple[tuple[str, str, str], ...] = ()
    tokenizer_dir: str | None = None
    adapters: tuple[str, ...] = ()


class EngineClient(ABC):
    """Submit prompts, read chunks, abort, ask for state. Safe to use from one event loop."""

    info: EngineInfo
    """Available once the engine is ready; refreshed after a restart."""

    @property
    @abstractmethod
    def state(self) -> EngineState:
        """What the engine process is doing now."""

    @property
    @abstractmethod
    def reason(self) -> str:
        """Why the state is not RUNNING; "" when it is."""

    @abstractmethod
    def generate(self, request: GenerateRequest) -> AsyncIterator[list[OutputChunk]]:
        """Run a request; yields what is new, for all its choices, each time there is something new.

        Several steps are merged into one list when the reader is slow. The last chunk of each choice carries its
        finish_reason; the iterator ends after the last choice ended. Closing the iterator early aborts the request
        and frees what it held within one step.

        Raises RequestError before the first chunk if the request cannot be served (too long, queue full …), and
        EngineDeadError if the engine dies on the way.
        """

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End a request as soon as possible; its choices finish with reason `abort`. Unknown ids are ignored."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """The newest statistics the engine sent. Never waits."""

    def open_adapters(self) -> tuple[frozenset[str], frozenset[str]]:
        """Adapters of open requests: of those that have had a token, and of those that have not. Never waits."""
        return frozenset(), frozenset()

    @abstractmethod
    async def control(self, name: str, arguments: dict[str, Any] | None = None) -> Any:
        """Send a typed control message to the engine and wait for its answer.

        Built-in names: "reset_prefix_cache", "load_adapter", "unload_adapter", "list_adapters", "ping". Plugins add
        their own.
        Raises RequestError for an unknown name or bad arguments.
        """

    @abstractmethod
    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, wait for running ones at most timeout_s, then abort the rest."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine and free everything. No process is left behind."""
