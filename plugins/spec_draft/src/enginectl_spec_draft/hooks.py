"""What this plugin registers. Plain data; the implementation is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Sequence

from enginectl.hookspecs import hookimpl
from enginectl.provider import Provider, Role
from enginectl_spec_draft.config import DraftConfig


@hookimpl
def enginectl_speculator() -> Sequence[Provider]:
    """A draft model."""
    return [
        Provider(
            Role.SPECULATOR,
            "draft",
            "enginectl_spec_draft.speculator:build",
            config=DraftConfig,
            summary="a smaller model of the same vocabulary drafts, its KV in the target's blocks",
        )
    ]
