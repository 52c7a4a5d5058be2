"""The `native` model family: one decoder driven by the configuration, written in the ops of an op set."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enginectl.context import BuildContext
    from enginectl.interfaces.model import ModelFamily


def build(ctx: BuildContext) -> ModelFamily:
    """The factory. Neither torch nor transformers is imported before."""
    from enginectl.builtin.native.family import NativeFamily

    return NativeFamily()
