"""Chunks of one choice that came in several pieces, as one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from enginectl.types import OutputChunk


def coalesce(chunks: list[OutputChunk]) -> list[OutputChunk]:
    """One chunk a choice, in order of first appearance."""
    by_choice: dict[int, list[OutputChunk]] = {}
    for chunk in chunks:
        by_choice.setdefault(chunk.index, []).append(chunk)
    if len(by_choice) == len(chunks):
        return chunks
    return [parts[0] if len(parts) == 1 else _joined(parts) for parts in by_choice.values()]


def _joined(parts: Sequence[OutputChunk]) -> OutputChunk:
    """Consecutive chunks of one choice as one; what ends a choice is on the last."""
    logprobs = [entry for part in parts for entry in part.logprobs or ()]
    prompt_logprobs = next((part.prompt_logprobs for part in parts if part.prompt_logprobs is not None), None)
    return msgspec.structs.replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        logprobs=tuple(logprobs) if any(part.logprobs is not None for part in parts) else None,
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=max(part.num_cached_tokens for part in parts),
    )
