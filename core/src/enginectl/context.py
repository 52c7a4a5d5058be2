"""What a factory is told: the machine, the configuration and what has been decided so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from enginectl.config import EngineConfig
    from enginectl.interfaces.attention import AttentionBackend
    from enginectl.interfaces.kv import KVLayout
    from enginectl.interfaces.model import Model, ModelSpec
    from enginectl.interfaces.weights import Checkpoint


class Gpu(msgspec.Struct, frozen=True):
    """One CUDA device: name, compute capability (9, 0), memory in bytes."""

    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What this process may use: cores and memory within its cgroup, CPU features, GPUs, and installed versions.

    cpu_flags: as /proc/cpuinfo spells them. versions: distribution name to version for torch, triton, flashinfer …
    Found without importing torch.
    """

    num_cores: int
    memory_bytes: int
    cpu_flags: frozenset[str]
    gpus: tuple[Gpu, ...] = ()
    versions: dict[str, str] = {}
    has_compiler: bool = False

    @property
    def device(self) -> str:
        """`cuda` when there is an NVIDIA GPU, else `cpu`."""
        return "cuda" if self.gpus else "cpu"


@dataclass(frozen=True)
class LoadedModel:
    """A second model, with attention of its own, not bound to pages yet."""

    checkpoint: Checkpoint
    model: Model
    attention: AttentionBackend


@dataclass(frozen=True)
class BuildContext:
    """Handed to every factory. Fields still None have not been decided when that role is built.

    engine: the resolved configuration. options: the plugin's own section, typed, or None if it declared none.
    device: "cpu", "cuda:0". dtype: "float32", "bfloat16", "float16". checkpoint: the opened weights source (model
    families). model_spec: layers, heads, vocabulary (from attention on). kv_layout: blocks and groups (KV roles, after
    the pool is sized). model: the loaded model (speculators, adapters). parts: objects already built, by role.
    load_model: path to a second model, through the same weights sources, families and attention (speculators).
    """

    engine: EngineConfig
    machine: Machine
    options: Any = None
    device: str = "cpu"
    dtype: str = "float32"
    checkpoint: Checkpoint | None = None
    model_spec: ModelSpec | None = None
    kv_layout: KVLayout | None = None
    model: Model | None = None
    parts: dict[str, Any] = field(default_factory=dict)
    load_model: Callable[[str], LoadedModel] | None = None

    def with_(self, **changes: Any) -> BuildContext:
        """A copy with some fields decided."""
        return replace(self, **changes)
