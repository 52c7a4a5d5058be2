"""The OpenAI-compatible HTTP frontend."""

from __future__ import annotations

from enginectl.builtin.openai.app import OpenAIFrontend
from enginectl.context import BuildContext

__all__ = ["OpenAIFrontend", "build_frontend"]


def build_frontend(ctx: BuildContext) -> OpenAIFrontend:
    """The frontend `openai`."""
    return OpenAIFrontend()
