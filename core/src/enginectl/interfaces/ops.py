"""Op sets: the operations a native model is written in, per device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class OpSet(ABC):
    """Linears, norms, RoPE and activations on one device. Rows of one call must not influence each other's bits where
    the provider claims batch invariance.
    """

    batch_invariant: bool = False

    @abstractmethod
    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Any:
        """Lay out a weight [out, in] for this device once. Called: at load."""

    @abstractmethod
    def linear(self, x: Tensor, packed: Any) -> Tensor:
        """x [num_tokens, in] to [num_tokens, out]."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        """RMSNorm of x (+ residual, which is updated in place to the sum). [num_tokens, hidden]."""

    @abstractmethod
    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate q [num_tokens, heads, dim] and k in place by cos, sin [num_tokens, dim]."""

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up from [num_tokens, 2 * intermediate]."""
