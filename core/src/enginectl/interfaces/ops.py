"""Op sets: what a native model is written in, per device.

A native decoder layer is two calls around attention: `Block.before` (norm, fused QKV, biases, q/k norms, RoPE) and
`Block.after` (output projection, residual, norms, MLP, residual). An op set may build whole blocks of its own (fused,
in native code) for the structures it knows, and otherwise offers linears and norms from which core builds them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

Op = Callable[["Tensor"], "Tensor"]
"""Rows in, rows out: [num_tokens, in] to [num_tokens, out], same dtype."""


class BlockSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The structure of one decoder layer.

    Sizes in elements. norm: "rms" (weight), "rms_plus_one" (1 + weight, Gemma). activation: "silu", "gelu_tanh".
    rotary_dim: first elements of a head that RoPE turns (half-split pairs). qk_norm: RMSNorm on each head of q and k
    before RoPE ("head"), or on the whole projection ("flat", OLMo 2). norm_order: "pre" (before each half), "post"
    (after each half, OLMo 2), "sandwich" (both, Gemma 2). residual_scale multiplies what each half adds (Granite).
    num_experts: 0 for a dense MLP; top_k of them per token, weights normalised over the chosen ones if norm_topk.
    shared_size: intermediate size of the gated expert that every token visits besides (Qwen2-MoE), 0 for none.
    no_rope: the layer turns nothing (SmolLM3).
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    norm: str = "rms"
    norm_order: str = "pre"
    activation: str = "silu"
    rotary_dim: int = 0
    no_rope: bool = False
    qk_norm: str | None = None
    residual_scale: float = 1.0
    num_experts: int = 0
    top_k: int = 0
    norm_topk: bool = True
    shared_size: int = 0


@dataclass(slots=True)
class BlockWeights:
    """One layer's tensors, on the CPU or the device, in the compute dtype; None where the structure has none.

    qkv: [(num_heads + 2 * num_kv_heads) * head_dim, hidden] rows q, k, v. gate_up: [2 * intermediate, hidden] rows
    gate, up (with experts: [num_experts, ...]). router: [num_experts, hidden]. Norm weights are [hidden], q and k norms
    [head_dim], or [num_heads * head_dim] and [num_kv_heads * head_dim] where they are flat. The shared expert has
    shared_gate_up [2 * shared_size, hidden], shared_down [hidden, shared_size] and shared_gate [1, hidden].
    """

    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    router: Tensor | None = None
    attention_norm: Tensor | None = None
    attention_post_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    shared_gate_up: Tensor | None = None
    shared_down: Tensor | None = None
    shared_gate: Tensor | None = None


class LowRankSlots(ABC):
    """What adapters add to one linear of a block, by slot: up @ (down @ row), for each row with that slot."""

    def prepare(self, parts: Sequence[tuple[Tensor, Tensor] | None] | None) -> Any:
        """An adapter's weights laid out for `write`, which may wait in host memory; None, or a None in it, adds nothing.

        parts: (down [rank, in], up [out, rank]) of each part of the output. Called: when an adapter is read, beside
        steps, from any thread.
        """
        return parts

    @abstractmethod
    def write(self, slot: int, prepared: Any) -> None:
        """Replace what a slot holds by what `prepare` returned. No row of a step in flight uses the slot.

        Called: between steps, which wait for it: it should be one copy.
        """


class Block(ABC):
    """One decoder layer without its attention.

    linears: qkv, output and, in a dense MLP, gate_up and down, looked up at each call: for adapters, core makes shallow
    copies of blocks that have other linears. A block that does its linears in one piece has none; where
    adapters serve, it is a LowRankBlock, or core builds blocks that have linears.
    """

    linears: dict[str, Op]

    @abstractmethod
    def before(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim], after RoPE.

        hidden: [num_tokens, hidden_size], unchanged. cos, sin: [num_tokens, rotary_dim], fp32, both halves alike:
        element i < rotary_dim / 2 becomes x[i] * cos[i] - x[i + half] * sin[i], its partner x[i + half] * cos[i] +
        x[i] * sin[i].
        Called: once per layer per step.
        """

    @abstractmethod
    def after(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The hidden rows after this layer; `hidden` may be updated in place and returned.

        attended: [num_tokens, num_heads * head_dim]. Called: once per layer per step.
        """


class LowRankBlock(Block):
    """A block in one piece that takes adapters all the same.

    In steps with adapters `before` and `after` are given `slots`, the slot of each row: int32 [num_tokens], contiguous,
    -1 for none.
    """

    @abstractmethod
    def low_rank(self, linear: str, num_slots: int, max_rank: int, out_sizes: Sequence[int]) -> LowRankSlots:
        """Room for adapters of one linear, named as in `Block.linears`; out_sizes: of its parts.

        Called: once per linear, after loading.
        """

    @abstractmethod
    def before(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, slots: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Block.before`."""

    @abstractmethod
    def after(self, hidden: Tensor, attended: Tensor, slots: Tensor | None = None) -> Tensor:
        """See `Block.after`."""


class Head(ABC):
    """Final norm and output projection over the rows that need logits."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [n, vocab_size] from hidden rows [n, hidden_size] before the final norm."""

    def greedy(self, hidden: Tensor) -> Tensor | None:
        """Ids [n] int64 of the largest logits, lowest id on ties, without making the logits; None if not offered."""
        return None


class OpSet(ABC):
    """Operations on one device.

    batch_invariant: a row's bits do not depend on the other rows of a call, nor on their number, nor on threads.
    """

    batch_invariant: bool = False
    has_own_threads: bool = False
    """It computes on threads of its own, sized when it is built; torch keeps one."""

    @abstractmethod
    def linear(self, weight: Tensor, bias: Tensor | None) -> Op:
        """Lay out weight [out, in] for this device, once, and return the op. The caller drops the weight.

        Called: at load.
        """

    @abstractmethod
    def rms_norm(self, weight: Tensor, eps: float, *, plus_one: bool = False) -> Op:
        """RMSNorm over the last dimension, computed in fp32. Called: at load."""

    def block(self, spec: BlockSpec, weights: BlockWeights) -> Block | None:
        """A fused block for this structure, or None: then core builds it from linears and norms. Called: at load."""
        return None

    def head(self, norm: Tensor | None, weight: Tensor, spec: BlockSpec) -> Head | None:
        """A fused head, or None. weight: [vocab_size, hidden]. Of spec, the kind of norm and eps count.

        The model scales and caps the logits afterwards. Called: at load.
        """
        return None
