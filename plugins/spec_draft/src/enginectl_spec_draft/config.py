"""The section `[plugins.draft]`."""

from __future__ import annotations

import msgspec

MAX_DRAFTS = 64
"""Most tokens the speculator may be told to propose: what a request may ask for in `speculation`."""


class DraftConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """model: directory or file of the draft model, with the target's tokenizer. num_speculative_tokens: most tokens
    proposed for a row. coupled: sampled rows draft with the noise the target will be sampled with, so that drafts are
    right more often; off drafts the likeliest token.
    """

    model: str
    num_speculative_tokens: int = 4
    coupled: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot be served; msgspec turns it into an error that names the section."""
        if not self.model:
            raise ValueError("model is empty; give the draft model's directory or file")
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFTS:
            raise ValueError(f"num_speculative_tokens is {self.num_speculative_tokens}; allowed: 1 to {MAX_DRAFTS}")
