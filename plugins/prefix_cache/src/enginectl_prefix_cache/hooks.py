"""What this distribution registers. Plain data; the index is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Iterable

from enginectl.hookspecs import hookimpl
from enginectl.provider import Provider, Role


@hookimpl
def enginectl_prefix_index() -> Iterable[Provider]:
    """Offer the prefix index over chained block hashes."""
    return [
        Provider(
            Role.PREFIX_INDEX,
            "prefix-cache",
            "enginectl_prefix_cache.index:build",
            summary="chained block hashes, checked by comparison",
        )
    ]
