"""Models: what a checkpoint becomes, and the one call a step makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from enginectl.context import BuildContext
    from enginectl.interfaces.attention import AttentionBackend, AttentionBatch
    from enginectl.interfaces.ops import LowRankSlots
    from enginectl.interfaces.weights import Checkpoint


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One attention call of the model. scale multiplies q·k; window: tokens looked back, itself included, None for all;
    chunk: attention within aligned chunks of this many tokens; soft_cap: tanh cap on the scores; group: KV group.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    group: int = 0


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the rest of the engine must know of a model. max_model_len: the longest context it was made for.

    state_bytes_per_row: recurrent state that the model keeps for each row outside the pages, 0 for none. Such a state
    cannot be shared between requests or rolled back, so there is no prefix cache and no speculation. takes_chunks: a
    prompt may be read over several steps.
    """

    architecture: str
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    hidden_size: int
    max_model_len: int
    num_parameters: int = 0
    weight_bytes: int = 0
    state_bytes_per_row: int = 0
    takes_chunks: bool = True


@dataclass(slots=True)
class ForwardInput:
    """One step for the model, packed. token_ids, positions: [num_tokens] int64. keep: [num_kept] int64, the tokens
    whose next-token logits are wanted. plan: the attention backend's. adapter_slots: [num_tokens] int32 or None when
    no token uses an adapter.

    For models whose `reads_rows` is true: batch is what the plan was prepared from, keep_host is keep on the host, and rows
    [num_seqs] int32 are the places its sequences hold in the persistent batch. A sequence keeps its row until it ends or is
    preempted, and is computed from position 0 again whenever it gets one. begin_adapters: for a model that takes the step
    apart: `begin_adapters(first, last)` before a forward of the tokens [first, last) alone says whether any has an adapter.
    It is None where adapter_slots is.
    """

    token_ids: Tensor
    positions: Tensor
    keep: Tensor
    plan: Any
    adapter_slots: Tensor | None = None
    batch: AttentionBatch | None = None
    rows: NDArray[np.int32] | None = None
    keep_host: NDArray[np.int64] | None = None
    begin_adapters: Callable[[int, int], bool] | None = None


@dataclass(slots=True)
class Kept:
    """What the forward leaves for sampling: hidden rows before the head, [num_kept, hidden_size], or logits fp32
    [num_kept, vocab_size] where the model computes them at once; at least one of the two.
    """

    hidden: Tensor | None = None
    logits: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LinearSite:
    """A linear of a loaded model that an adapter may add to.

    modules: the checkpoint's names of what it computes, such as `model.layers.0.self_attn.q_proj`; several where the
    model has fused them, and then out_sizes are the widths of their parts of the output, in order. in_size: width of a row.
    connect: `connect(add)`: in steps whose adapter_slots is not None the output becomes `add(rows, out)`, called with
    rows [num_tokens, in_size] and out [num_tokens, sum(out_sizes)], which it may change in place and return. Other steps
    run as if nothing were connected.
    low_rank: `low_rank(num_slots, max_rank)`, where the model adds low-rank products itself, faster: what is written to
    the slots is added in steps whose adapter_slots name them. Otherwise None, and `connect` is the way.
    """

    modules: tuple[str, ...]
    in_size: int
    out_sizes: tuple[int, ...]
    connect: Callable[[Callable[[Tensor, Tensor], Tensor]], None]
    low_rank: Callable[[int, int], LowRankSlots] | None = None


class Model(ABC):
    """A loaded model on its device. Stateless between steps except for its KV pages, and the state of its rows.

    keeps_hidden: `Kept.hidden` is always there, for speculators that read it. reads_rows: `forward` reads
    `ForwardInput.batch` and `rows`, so that its steps are not replayed from graphs and it cannot draft.
    """

    spec: ModelSpec
    keeps_hidden: bool = True
    reads_rows: bool = False

    @abstractmethod
    def use_attention(self, attention: AttentionBackend) -> None:
        """Call this backend in every layer from now on. Called: once, before the first forward."""

    def bind(self, kv: Sequence[tuple[Tensor, Tensor]], num_rows: int) -> None:
        """The store its attention backend was bound to, and how many rows there are: for models that keep state a row.

        Called: after the pool is allocated; on a GPU, for models that read rows, also before, with a store of one block,
        to measure a step. Raises OutOfMemoryError.
        """

    def linear_sites(self) -> Sequence[LinearSite]:
        """The linears of attention and MLP that adapters may add to; none where the model cannot offer them.

        Called: once, by an adapter backend's `attach`.
        """
        return ()

    @abstractmethod
    def forward(self, step: ForwardInput) -> Kept:
        """Run one step. Called: once per step, under torch.inference_mode."""

    @abstractmethod
    def logits(self, kept: Kept, rows: Tensor | None = None) -> Tensor:
        """fp32 next-token logits, [num_kept or len(rows), vocab_size]; the caller may change them.

        rows: [n] int64 into kept. Called: once or twice per step.
        """

    def greedy(self, kept: Kept, rows: Tensor | None = None) -> Tensor | None:
        """Token ids [n] int64 of the largest logits without making them, or None where that is not faster."""
        return None


class ModelFamily(ABC):
    """Loads the architectures it knows.

    needs_op_set: its models are written in the ops of an op set, which `load` finds in ctx.parts["op_set"].
    """

    needs_op_set: bool = False

    @abstractmethod
    def refuses(self, checkpoint: Checkpoint) -> str | None:
        """Why this family cannot run the checkpoint exactly, or None if it can. Reads the config only."""

    @abstractmethod
    def spec(self, checkpoint: Checkpoint, ctx: BuildContext) -> ModelSpec:
        """The specification from the config alone, before a weight is loaded (capacity, negotiation)."""

    @abstractmethod
    def load(self, checkpoint: Checkpoint, ctx: BuildContext) -> Model:
        """Load weights to ctx.device in ctx.dtype. Raises ModelError with the reason."""
