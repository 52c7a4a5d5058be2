"""The op set: weights packed once, a layer in two calls into C++, logits or their argmax in one.

Every product is accumulated in one order whatever the number of rows and threads, so that a row's bits are its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from ctypes import CDLL, byref

import torch
from torch import Tensor

from enginectl.context import BuildContext
from enginectl.errors import ConfigError
from enginectl.interfaces.ops import Block, BlockSpec, BlockWeights, Head, LowRankBlock, Op, OpSet
from enginectl_attention_cpu.library import DTYPES, Shape, Weights, check, load_library, made
from enginectl_attention_cpu.low_rank import CpuLowRank


class CpuOpSet(OpSet):
    """Packed linears, norms, fused blocks and the head on a CPU."""

    batch_invariant = True
    has_own_threads = True

    def __init__(self, num_threads: int | None = None, *, library: CDLL | None = None) -> None:
        self.library = library or load_library()
        self.handle = made(self.library.ectl_op_set(num_threads or torch.get_num_threads()), "the op set")
        weakref.finalize(self, self.library.ectl_op_set_free, self.handle)
        self._rooms: dict[tuple[int, int, int, torch.dtype], QkvRoom] = {}

    def room(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> QkvRoom:
        """Where every block of this shape puts q, k and v: one place, so that it stays in the cache."""
        return self._rooms.setdefault(
            (num_heads, num_kv_heads, head_dim, dtype), QkvRoom(num_heads, num_kv_heads, head_dim, dtype)
        )

    def linear(self, weight: Tensor, bias: Tensor | None) -> Op:
        """Packed in groups of 32 output columns."""
        return CpuLinear(self, weight, bias)

    def rms_norm(self, weight: Tensor, eps: float, *, plus_one: bool = False) -> Op:
        """Computed in fp32 and rounded once."""
        return CpuNorm(self, weight.float() + (1.0 if plus_one else 0.0), eps)

    def block(self, spec: BlockSpec, weights: BlockWeights) -> Block | None:
        """One for every dense layer with norms before its halves, or before and after them."""
        if spec.num_experts or spec.norm_order not in ("pre", "sandwich") or spec.qk_norm not in (None, "head"):
            return None
        if weights.attention_norm is None or weights.mlp_norm is None:
            return None
        return CpuBlock(self, spec, weights)

    def head(self, norm: Tensor | None, weight: Tensor, spec: BlockSpec) -> Head | None:
        """Packed, beside the weight itself, which a tied embedding keeps anyway."""
        return CpuHead(self, norm, weight, eps=spec.eps, plus_one=spec.norm == "rms_plus_one")


class CpuLinear:
    """A packed linear. Called with rows [num_tokens, in]."""

    def __init__(self, ops: CpuOpSet, weight: Tensor, bias: Tensor | None) -> None:
        self._ops = ops
        self._dtype = weight.dtype
        self._code = DTYPES[weight.dtype]
        self._run = ops.library.ectl_linear_run
        self._out_features, in_features = weight.shape
        held = (weight.contiguous(), None if bias is None else bias.to(weight.dtype).contiguous())
        packed = ops.library.ectl_linear(
            ops.handle, self._code, _address(held[0]), _address(held[1]), in_features, self._out_features
        )
        self._handle = made(packed, "packed weights")
        weakref.finalize(self, ops.library.ectl_linear_free, self._handle, self._code)

    def __call__(self, rows: Tensor) -> Tensor:
        rows = rows.contiguous()
        assert rows.dtype == self._dtype, f"rows are {rows.dtype}, the weight {self._dtype}"
        out = torch.empty((rows.shape[0], self._out_features), dtype=self._dtype)
        run, ops = self._run, self._ops
        check(run(ops.handle, self._handle, self._code, rows.data_ptr(), rows.shape[0], out.data_ptr()))
        return out


class CpuNorm:
    """RMSNorm. Called with rows [num_tokens, size]. weight: fp32."""

    def __init__(self, ops: CpuOpSet, weight: Tensor, eps: float) -> None:
        self._ops = ops
        self._weight = weight.contiguous()
        self._eps = eps
        self._run = ops.library.ectl_rms_norm

    def __call__(self, rows: Tensor) -> Tensor:
        rows = rows.contiguous()
        out = torch.empty_like(rows)
        code, size = DTYPES[rows.dtype], rows.shape[-1]
        count = rows.numel() // size if size else 0
        check(
            self._run(
                self._ops.handle, code, rows.data_ptr(), self._weight.data_ptr(), self._eps, count, size, out.data_ptr()
            )
        )
        return out


class QkvRoom:
    """q, k and v of as many rows as the last step had, one after another in each row."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._num_heads, self._num_qk = num_heads, num_heads + num_kv_heads
        self._shape = (num_heads + 2 * num_kv_heads, head_dim)
        self._dtype = dtype
        self.resize(0)

    def resize(self, num_rows: int) -> None:
        """Make room for this many rows, in place of the last."""
        qkv = torch.empty((num_rows, *self._shape), dtype=self._dtype)
        self.num_rows, self.address = num_rows, qkv.data_ptr()
        self.views = (qkv[:, : self._num_heads], qkv[:, self._num_heads : self._num_qk], qkv[:, self._num_qk :])


class CpuBlock(LowRankBlock):
    """A layer in two calls. What `before` returns is valid until the next `before` of any block of this op set."""

    def __init__(self, ops: CpuOpSet, spec: BlockSpec, weights: BlockWeights) -> None:
        self.linears = {}
        self.ops = ops
        self.dtype = dtype = weights.qkv.dtype
        code = self.code = DTYPES[dtype]
        shape = Shape(
            hidden=spec.hidden_size,
            intermediate=spec.intermediate_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rotary_dim=0 if spec.no_rope else spec.rotary_dim,
            gelu=spec.activation == "gelu_tanh",
            plus_one=spec.norm == "rms_plus_one",
            eps=spec.eps,
            residual_scale=spec.residual_scale,
        )
        names = [field[0] for field in Weights._fields_]
        tensors = {name: getattr(weights, name) for name in names}
        held = {name: None if t is None else t.to(dtype).contiguous() for name, t in tensors.items()}
        addresses = Weights(**{name: _address(tensor) for name, tensor in held.items()})
        packed = ops.library.ectl_block(ops.handle, code, byref(shape), byref(addresses))
        self.handle = made(packed, "packed weights")
        weakref.finalize(self, ops.library.ectl_block_free, self.handle, code)
        self._before = ops.library.ectl_block_before
        self._after = ops.library.ectl_block_after
        self._room = ops.room(spec.num_heads, spec.num_kv_heads, spec.head_dim, dtype)

    def low_rank(self, linear: str, num_slots: int, max_rank: int, out_sizes: Sequence[int]) -> CpuLowRank:
        """Room in the op set's memory."""
        return CpuLowRank(self, linear, num_slots, max_rank, out_sizes)

    def before(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, slots: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm, projection, norms of q and k, RoPE. cos and sin are contiguous."""
        if not hidden.is_contiguous():
            hidden = hidden.contiguous()
        num_rows, room = hidden.shape[0], self._room
        if num_rows != room.num_rows:
            room.resize(num_rows)
        status = self._before(
            self.ops.handle,
            self.handle,
            self.code,
            hidden.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            num_rows,
            room.address,
            None if slots is None else slots.data_ptr(),
        )
        if status:
            check(status)
        return room.views

    def after(self, hidden: Tensor, attended: Tensor, slots: Tensor | None = None) -> Tensor:
        """Output projection and MLP, each added to `hidden` in place."""
        if not (hidden.is_contiguous() and attended.is_contiguous()):
            hidden, attended = hidden.contiguous(), attended.contiguous()
        status = self._after(
            self.ops.handle,
            self.handle,
            self.code,
            hidden.data_ptr(),
            attended.data_ptr(),
            hidden.shape[0],
            None if slots is None else slots.data_ptr(),
        )
        if status:
            check(status)
        return hidden


class CpuHead(Head):
    """Final norm and output projection, with logits in fp32 that are made only where they are wanted."""

    def __init__(self, ops: CpuOpSet, norm: Tensor | None, weight: Tensor, *, eps: float, plus_one: bool) -> None:
        self._ops = ops
        code = self._code = DTYPES[weight.dtype]
        self._vocab_size, hidden_size = weight.shape
        held = (None if norm is None else norm.to(weight.dtype).contiguous(), weight.contiguous())
        packed = ops.library.ectl_head(
            ops.handle, code, _address(held[0]), _address(held[1]), hidden_size, self._vocab_size, eps, int(plus_one)
        )
        self._handle = made(packed, "the packed head")
        weakref.finalize(self, ops.library.ectl_head_free, self._handle, code)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [n, vocab_size]."""
        hidden = hidden.contiguous()
        out = torch.empty((hidden.shape[0], self._vocab_size), dtype=torch.float32)
        run = self._ops.library.ectl_head_logits
        check(run(self._ops.handle, self._handle, self._code, hidden.data_ptr(), hidden.shape[0], out.data_ptr()))
        return out

    def greedy(self, hidden: Tensor) -> Tensor:
        """The lowest id among the largest logits of each row."""
        hidden = hidden.contiguous()
        ids = torch.empty(hidden.shape[0], dtype=torch.int64)
        run = self._ops.library.ectl_head_greedy
        check(run(self._ops.handle, self._handle, self._code, hidden.data_ptr(), hidden.shape[0], ids.data_ptr()))
        return ids


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def build(ctx: BuildContext) -> CpuOpSet:
    """The factory: needs ctx.dtype."""
    if getattr(torch, ctx.dtype, None) not in DTYPES:
        raise ConfigError(f"op set 'cpu' cannot compute in {ctx.dtype!r}; use float32, bfloat16 or float16")
    return CpuOpSet()
