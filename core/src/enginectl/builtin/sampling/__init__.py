"""From logits to token ids: the built-in logits processors and sampler, and the check of sampling parameters.

This module holds the factories that the providers name. It imports torch only when one of them is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    from enginectl.resolve import eos_token_ids

    return MinTokens(ctx.engine.max_num_seqs, eos_token_ids(ctx.checkpoint) if ctx.checkpoint else ())


def build_allowed_token_ids(ctx: BuildContext) -> LogitsProcessor:
    """Nothing but the listed tokens."""
    from enginectl.builtin.sampling.masks import AllowedTokens

    return AllowedTokens(ctx.engine.max_num_seqs)
