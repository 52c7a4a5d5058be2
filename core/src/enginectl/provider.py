"""What a plugin registers: plain data that says which part it offers, for which role, and how to build it."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from enginectl.context import BuildContext, Machine

API_VERSION = 1
"""Version of the contracts in `enginectl.interfaces`. A provider written for another is refused with both numbers."""


class Cardinality(enum.Enum):
    """How many providers of a role serve at once."""

    ONE = "one"
    PER_PHASE = "per phase"
    BY_REQUEST = "by request"
    MANY = "many"


class Role(enum.StrEnum):
    """The seams of the engine. The value is the word used in flags, tables and hook names."""

    SCHEDULER = "scheduler"
    KV_ALLOCATOR = "kv_allocator"
    PREFIX_INDEX = "prefix_index"
    ATTENTION = "attention"
    LOGITS_PROCESSOR = "logits_processor"
    SAMPLER = "sampler"
    SPECULATOR = "speculator"
    ADAPTER = "adapter"
    GRAMMAR = "grammar"
    MODEL_FAMILY = "model_family"
    OP_SET = "op_set"
    WEIGHTS = "weights"
    DETOKENIZER = "detokenizer"
    EXECUTOR = "executor"
    FRONTEND = "frontend"
    PARSER = "parser"
    OBSERVER = "observer"


CARDINALITY: dict[Role, Cardinality] = {
    Role.SCHEDULER: Cardinality.ONE,
    Role.KV_ALLOCATOR: Cardinality.ONE,
    Role.PREFIX_INDEX: Cardinality.ONE,
    Role.ATTENTION: Cardinality.PER_PHASE,
    Role.LOGITS_PROCESSOR: Cardinality.MANY,
    Role.SAMPLER: Cardinality.ONE,
    Role.SPECULATOR: Cardinality.ONE,
    Role.ADAPTER: Cardinality.ONE,
    Role.GRAMMAR: Cardinality.BY_REQUEST,
    Role.MODEL_FAMILY: Cardinality.ONE,
    Role.OP_SET: Cardinality.ONE,
    Role.WEIGHTS: Cardinality.ONE,
    Role.DETOKENIZER: Cardinality.ONE,
    Role.EXECUTOR: Cardinality.ONE,
    Role.FRONTEND: Cardinality.MANY,
    Role.PARSER: Cardinality.BY_REQUEST,
    Role.OBSERVER: Cardinality.MANY,
}

OPTIONAL_ROLES = frozenset({Role.PREFIX_INDEX, Role.SPECULATOR, Role.ADAPTER, Role.OP_SET})
"""Roles of cardinality one that an engine can do without."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a part can do, read by `compose` before anything is built. `None` means no limit.

    devices: "cpu", "cuda". dtypes: "float32", "bfloat16", "float16". head_dims, block_sizes: sets of sizes in tokens
    and elements. queries_per_seq: most query tokens of one sequence in a decode-shaped step (speculation needs > 1).
    sliding_window: windows, and attention within chunks. phases: "prefill", "decode". The rest are features a model or an option may ask for.
    """

    devices: frozenset[str] | None = None
    dtypes: frozenset[str] | None = None
    head_dims: frozenset[int] | None = None
    block_sizes: frozenset[int] | None = None
    phases: frozenset[str] = frozenset({"prefill", "decode"})
    queries_per_seq: int | None = None
    sliding_window: bool = True
    soft_cap: bool = True
    sinks: bool = True
    graph_capture: bool = False
    host_lengths: bool = False
    kv_dtypes: frozenset[str] | None = None
    hidden_states: bool = False
    """The part reads the hidden rows before the head (speculators such as EAGLE)."""


@dataclass(frozen=True, slots=True)
class Provider:
    """One implementation of one role.

    role: which seam. name: unique within the role. factory: `factory(ctx) -> object`, or `"module:attribute"` naming
    one, imported only when chosen. rank: the highest rank whose `unsupported` is None serves when nothing is named;
    below 0 never serves unasked. unsupported: `unsupported(machine) -> reason | None`, without importing the
    implementation. api: the API_VERSION it was written for. config: a frozen, `forbid_unknown_fields` msgspec.Struct
    read from `[plugins.<plugin>]`; all providers of a plugin share one class.
    """

    role: Role
    name: str
    factory: Callable[[BuildContext], Any] | str
    rank: int = 0
    unsupported: Callable[[Machine], str | None] | None = None
    capabilities: Capabilities = field(default_factory=Capabilities)
    api: int = API_VERSION
    config: type[msgspec.Struct] | None = None
    summary: str = ""

    def load_factory(self) -> Callable[[BuildContext], Any]:
        """The factory, imported if it is given by name. Raises what the import raises, TypeError if it is not callable."""
        factory = self.factory
        if isinstance(factory, str):
            module, _, attribute = factory.partition(":")
            factory = getattr(importlib.import_module(module), attribute)
        if not callable(factory):
            raise TypeError(f"the factory of {self.role.value} {self.name!r} is not callable: {factory!r}")
        return factory

    def build(self, ctx: BuildContext) -> Any:
        """Import what is needed and make the object. Called once per engine and role."""
        return self.load_factory()(ctx)
