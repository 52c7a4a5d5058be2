"""What this distribution registers. Plain data; the backend is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Iterable

from enginectl.hookspecs import hookimpl
from enginectl.provider import Capabilities, Provider, Role
from enginectl_lora_sgmv.config import SgmvConfig


@hookimpl
def enginectl_adapter() -> Iterable[Provider]:
    """Offer the LoRA backend."""
    return [
        Provider(
            Role.ADAPTER,
            "sgmv",
            "enginectl_lora_sgmv.backend:build",
            capabilities=Capabilities(
                devices=frozenset({"cpu", "cuda"}), dtypes=frozenset({"float32", "bfloat16", "float16"})
            ),
            config=SgmvConfig,
            summary="LoRA adapters of any rank mixed in one batch",
        )
    ]
