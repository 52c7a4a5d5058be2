"""Every architecture that the transformers family is checked on: a tiny random model of each, and those it refuses.

`traits` says what a model is there to exercise, and the check compares it with what the loaded model does. Data only:
`enginectl.testing.tiny_models` makes them, `enginectl.testing.architecture_check` checks them.
"""

from __future__ import annotations

from enginectl.testing.architectures.attending import ATTENDING
from enginectl.testing.architectures.dense import DENSE
from enginectl.testing.architectures.experts import EXPERTS
from enginectl.testing.architectures.kinds import ONE_BY_ONE, PACKED, STATES, Architecture, Refusal
from enginectl.testing.architectures.recurrent import RECURRENT
from enginectl.testing.architectures.refused import REFUSALS
from enginectl.testing.architectures.shared_keys import SHARED_KEYS

__all__ = [
    "ARCHITECTURES",
    "FAST",
    "ONE_BY_ONE",
    "PACKED",
    "REFUSALS",
    "SOME_BY_ROUTE",
    "STATES",
    "Architecture",
    "Refusal",
]

ARCHITECTURES: dict[str, Architecture] = {**DENSE, **EXPERTS, **SHARED_KEYS, **RECURRENT, **ATTENDING}
"""Name to model. A type that is here must be exact; the table of the documentation lists exactly these."""

FAST = (
    "llama", "mistral", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "gpt_neox", "cohere2", "qwen3_moe", "llama4", "gpt_oss",
)  # fmt: skip
"""Those that `make test` checks."""

SOME_BY_ROUTE: dict[str, tuple[str, ...]] = {
    STATES: (
        "qwen3_next", "qwen3_5", "lfm2", "falcon_h1", "bamba", "granitemoe_hybrid", "mamba2", "mamba", "jamba",
    ),
    ONE_BY_ONE: ("falcon", "falcon_alibi", "bloom", "mpt", "gpt_neo", "xglm", "doge"),
}  # fmt: skip
"""Those on which a route is tested in detail: one of each kind of code."""
