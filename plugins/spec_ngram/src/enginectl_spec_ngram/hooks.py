"""What this plugin registers. Plain data; the implementation is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Sequence

from enginectl.hookspecs import hookimpl
from enginectl.provider import Provider, Role
from enginectl_spec_ngram.config import NgramConfig


@hookimpl
def enginectl_speculator() -> Sequence[Provider]:
    """Prompt lookup."""
    return [
        Provider(
            Role.SPECULATOR,
            "ngram",
            "enginectl_spec_ngram.speculator:build",
            config=NgramConfig,
            summary="what followed the last tokens when they came before, in prompt or output",
        )
    ]
