"""The `transformers` model family: any decoder whose module code takes our attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enginectl.context import BuildContext
    from enginectl.interfaces.model import ModelFamily


def build(ctx: BuildContext) -> ModelFamily:
    """The factory. transformers is imported here, not before."""
    from enginectl.builtin.transformers_family.family import TransformersFamily

    return TransformersFamily()
