"""The section `[plugins.sgmv]`."""

from __future__ import annotations

import msgspec


class SgmvConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """roots: directories that adapters may be loaded from at run time; none, and nothing is loaded at run time. Adapters
    named by --lora-modules may lie anywhere. pinned: names whose weights stay in host memory. max_wait_s: when an adapter
    has waited this long for a slot, one that is in use takes no more rows, and goes to it when its rows are done.
    kernels: auto (triton on a GPU, torch on a CPU), torch, triton; of no matter where the model adds low-rank products
    itself.
    """

    roots: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()
    max_wait_s: float = 1.0
    kernels: str = "auto"

    def __post_init__(self) -> None:
        """Refuse what cannot be served; msgspec turns it into an error that names the section."""
        if self.max_wait_s < 0:
            raise ValueError(f"max_wait_s is {self.max_wait_s}; allowed: 0 seconds or more")
        if self.kernels not in ("auto", "torch", "triton"):
            raise ValueError(f"kernels is {self.kernels!r}; allowed: auto, torch, triton")
