"""From logits to token ids: the built-in logits processors and sampler, and the check of sampling parameters.

This module holds the factories that the providers name. It imports torch only when one of them is called.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginectl.context import BuildContext
    from enginectl.interfaces.sampler import LogitsProcessor, Sampler


def build_sampler(ctx: BuildContext) -> Sampler:
    """The sampler `torch`."""
    from enginectl.builtin.sampling.sampler import TorchSampler

    return TorchSampler(ctx.engine.max_num_seqs)


def build_penalties(ctx: BuildContext) -> LogitsProcessor:
    """Repetition, frequency and presence penalties."""
    from enginectl.builtin.sampling.penalties import Penalties

    return Penalties(ctx.engine.max_num_seqs)


def build_logit_bias(ctx: BuildContext) -> LogitsProcessor:
    """Numbers added to chosen logits."""
    from enginectl.builtin.sampling.masks import LogitBias

    return LogitBias(ctx.engine.max_num_seqs)


def build_bad_words(ctx: BuildContext) -> LogitsProcessor:
    """Token sequences that are never completed."""
    from enginectl.builtin.sampling.masks import BadWords

    return BadWords(ctx.engine.max_num_seqs)


def build_min_tokens(ctx: BuildContext) -> LogitsProcessor:
    """No end before so many output tokens."""
    from enginectl.builtin.sampling.masks import MinTokens

    return MinTokens(ctx.engine.max_num_seqs, eos_token_ids(ctx))


def build_allowed_token_ids(ctx: BuildContext) -> LogitsProcessor:
    """Nothing but the listed tokens."""
    from enginectl.builtin.sampling.masks import AllowedTokens

    return AllowedTokens(ctx.engine.max_num_seqs)


def eos_token_ids(ctx: BuildContext) -> tuple[int, ...]:
    """The model's EOS set: what core resolved (`ctx.parts["eos_token_ids"]`), else what the checkpoint declares."""
    resolved = ctx.parts.get("eos_token_ids")
    if resolved is not None:
        return tuple(sorted(set(resolved)))
    if ctx.checkpoint is None:
        return ()
    declared = (ctx.checkpoint.generation_config.get("eos_token_id"), ctx.checkpoint.config.get("eos_token_id"))
    return tuple(sorted({token for value in declared for token in _as_ids(value)}))


def _as_ids(value: Any) -> Iterable[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
