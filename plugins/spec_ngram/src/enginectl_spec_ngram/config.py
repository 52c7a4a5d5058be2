"""The section `[plugins.ngram]`."""

from __future__ import annotations

import msgspec

MAX_DRAFTS = 64
"""Most tokens the speculator may be told to propose: what a request may ask for in `speculation`."""


class NgramConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """num_speculative_tokens: most tokens proposed for a row. prompt_lookup_min, prompt_lookup_max: shortest and longest
    run of last tokens that is looked up, longest first.
    """

    num_speculative_tokens: int = 4
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5

    def __post_init__(self) -> None:
        """Refuse what cannot be served; msgspec turns it into an error that names the section."""
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFTS:
            raise ValueError(f"num_speculative_tokens is {self.num_speculative_tokens}; allowed: 1 to {MAX_DRAFTS}")
        if self.prompt_lookup_min < 1:
            raise ValueError(f"prompt_lookup_min is {self.prompt_lookup_min}; allowed: 1 or more tokens")
        if self.prompt_lookup_max > 32:
            raise ValueError(f"prompt_lookup_max is {self.prompt_lookup_max}; allowed: at most 32 tokens")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min is {self.prompt_lookup_min}, more than prompt_lookup_max, "
                f"{self.prompt_lookup_max}; lower one or raise the other"
            )
