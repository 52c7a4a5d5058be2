"""The op set that works everywhere: plain torch, with linears prepacked by oneDNN on a CPU.

Packing and the packed product are private operators of torch, so that they are tried once, when the op set is built,
and plain linears serve where they are missing. Packed rows have the same bits whatever shares the call only up to about
1,000 input elements: beyond, oneDNN cuts the sum differently for few and for many rows. So this set does not claim to
be batch-invariant.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from enginectl.builtin.native.head import fp32_logits
from enginectl.context import BuildContext
from enginectl.errors import ConfigError
from enginectl.interfaces.ops import BlockSpec, Head, Op, OpSet

log = logging.getLogger("enginectl.ops")

Packer = Callable[[Tensor, "Tensor | None"], Op]

CHUNKS = 64
"""The vocabulary is searched in this many interleaved parts."""

INFINITE_BITS = 0x7F80
"""bf16 infinity as an integer; NaN is above it."""

MAX_CANDIDATES = 16
"""Most tokens a row, on average, whose logits are computed again in fp32."""


class TorchOpSet(OpSet):
    """Linears and norms in torch on any device."""

    batch_invariant = False

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._pack = packer(dtype) if torch.device(device).type == "cpu" else None

    @property
    def is_packed(self) -> bool:
        """Whether linears are prepacked."""
        return self._pack is not None

    def linear(self, weight: Tensor, bias: Tensor | None) -> Op:
        """Packed once where that is possible."""
        if self._pack is not None:
            return self._pack(weight, bias)
        return lambda rows: linear(rows, weight, bias)

    def rms_norm(self, weight: Tensor, eps: float, *, plus_one: bool = False) -> Op:
        """Computed in fp32 and rounded once."""
        shape = weight.shape
        if not plus_one:
            return lambda rows: rms_norm(rows, shape, weight, eps)
        wide = weight.float() + 1.0
        return lambda rows: rms_norm(rows.float(), shape, wide, eps).to(rows.dtype)

    def head(self, norm: Tensor | None, weight: Tensor, spec: BlockSpec) -> Head | None:
        """A packed one for bf16 on a CPU, beside the plain weight, which a tied embedding keeps anyway."""
        if self._pack is None or weight.dtype != torch.bfloat16 or norm is None:
            return None
        normalise = self.rms_norm(norm, spec.eps, plus_one=spec.norm == "rms_plus_one")
        return PackedHead(normalise, weight, self._pack)


def packer(dtype: torch.dtype) -> Packer | None:
    """What packs weights of this dtype, or None where torch, oneDNN or the CPU cannot."""
    try:
        reorder = torch.ops.mkldnn._reorder_linear_weight.default
        product = torch.ops.mkldnn._linear_pointwise.default
    except (AttributeError, RuntimeError) as error:
        log.info("linears are not prepacked: this torch has no oneDNN operators (%s)", error)
        return None

    def pack(weight: Tensor, bias: Tensor | None) -> Op:
        # No batch size: packing for one makes the bits of a row depend on how many there are.
        packed = reorder(weight.contiguous(), None)
        bias = None if bias is None else bias.contiguous()
        return lambda rows: product(rows, packed, bias, "none", [], "")

    sample = torch.linspace(-1, 1, 32 * 16).view(32, 16).to(dtype)
    try:
        with torch.inference_mode():
            found = pack(sample, sample[:, 0])(sample[:3])
            expected = linear(sample[:3], sample, sample[:, 0])
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    except (RuntimeError, TypeError, AssertionError) as error:
        log.info("linears are not prepacked: oneDNN cannot with %s here (%s)", dtype, str(error).partition("\n")[0])
        return None
    return pack


class PackedHead(Head):
    """Final norm and output projection with bf16 weights on a CPU.

    The packed product rounds its sums to bf16, which ties tokens that are not equal, so logits are computed from the
    plain weight with fp32 sums. Rounding keeps order, though: the likeliest token is among those whose rounded logits
    are at most one step below the largest, and only for these few is the sum done again.
    """

    def __init__(self, normalise: Op, weight: Tensor, pack: Packer) -> None:
        self._normalise = normalise
        self._weight = weight
        self._vocab_size, hidden_size = weight.shape
        padding = -self._vocab_size % CHUNKS
        padded = torch.cat((weight, weight.new_zeros(padding, hidden_size))) if padding else weight
        self._product = pack(padded, None)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [n, vocab_size]."""
        return fp32_logits(self._normalise(hidden), self._weight)

    def greedy(self, hidden: Tensor) -> Tensor | None:
        """The largest of the fp32 logits, which are computed for candidates only."""
        rows = self._normalise(hidden)
        if not rows.shape[0]:
            return rows.new_empty(0, dtype=torch.int64)
        # Positive bf16 numbers are ordered like their bits, and negative ones are negative as integers.
        bits = self._product(rows).view(torch.int16).view(rows.shape[0], CHUNKS, -1)
        largest = bits.amax(1)  # [n, vocabulary / CHUNKS]: of the tokens c, c + width, c + 2 * width …
        lowest = largest.amax(1, keepdim=True) - 1
        row, column = torch.nonzero(largest >= lowest, as_tuple=True)
        smallest, greatest = (int(bound) for bound in lowest.aminmax())
        if smallest < 1 or greatest >= INFINITE_BITS - 1 or row.shape[0] > MAX_CANDIDATES * rows.shape[0]:
            return fp32_logits(rows, self._weight).argmax(-1)
        which, chunk = torch.nonzero(bits[row, :, column] >= lowest[row], as_tuple=True)
        if which.shape[0] > MAX_CANDIDATES * rows.shape[0]:
            return fp32_logits(rows, self._weight).argmax(-1)
        row, token = row[which], chunk * bits.shape[2] + column[which]
        return best_of(row, token, self._exact(rows, row, token), rows.shape[0])

    def _exact(self, rows: Tensor, row: Tensor, token: Tensor) -> Tensor:
        """fp32 logits [m] of these (row, token) pairs."""
        return (rows[row].float() * self._weight[token].float()).sum(-1)


def best_of(row: Tensor, token: Tensor, logit: Tensor, num_rows: int) -> Tensor:
    """[num_rows] the token with the largest logit of each row, the lowest on ties; every row has one."""
    largest = logit.new_full((num_rows,), float("-inf")).scatter_reduce_(0, row, logit, "amax")
    is_largest = logit == largest[row]
    best = torch.full((num_rows,), torch.iinfo(torch.int64).max, dtype=torch.int64, device=row.device)
    return best.scatter_reduce_(0, row[is_largest], token[is_largest], "amin")


def build(ctx: BuildContext) -> TorchOpSet:
    """Provider factory: needs ctx.device and ctx.dtype."""
    if not isinstance(dtype := getattr(torch, ctx.dtype, None), torch.dtype):
        raise ConfigError(f"op set 'torch' cannot compute in {ctx.dtype!r}; use float32, bfloat16 or float16")
    return TorchOpSet(ctx.device, dtype)
