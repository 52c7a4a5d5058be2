"""Whether a draft model fits a target. All of it is checked at start."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from enginectl.errors import ConfigError
from enginectl.interfaces.model import ModelSpec
from enginectl.interfaces.weights import Checkpoint

log = logging.getLogger("enginectl.spec_draft")


def check_draft(name: str, draft: ModelSpec, target: ModelSpec, max_model_len: int, num_drafts: int) -> None:
    """Raise ConfigError if the draft model counts other tokens than the target, or cannot follow it to its end, or if
    drafts are longer than sequences.
    """
    if num_drafts >= max_model_len:
        raise ConfigError(
            f"draft: num_speculative_tokens is {num_drafts}, and sequences have at most {max_model_len} tokens; lower it"
        )
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"draft model {name}: its vocabulary has {draft.vocab_size} tokens, the target's {target.vocab_size}; "
            "choose a draft model of the same family"
        )
    if draft.max_model_len < max_model_len:
        raise ConfigError(
            f"draft model {name}: it was made for {draft.max_model_len} tokens, and sequences may have "
            f"{max_model_len}; lower --max-model-len or choose a draft model with a longer context"
        )


def check_tokenizers(name: str, draft: Checkpoint, target: Checkpoint) -> None:
    """Raise ConfigError if both have a tokenizer and these number tokens differently."""
    mine, theirs = _vocabulary(draft), _vocabulary(target)
    if mine is None or theirs is None:
        log.warning("draft model %s: no tokenizer.json beside it or the target, so only vocabulary sizes agree", name)
        return
    if mine != theirs:
        token = min((set(mine.items()) ^ set(theirs.items())), key=lambda pair: pair[1])[0]
        raise ConfigError(
            f"draft model {name}: its tokenizer differs from the target's: token {token!r} is "
            f"{mine.get(token, 'unknown')} there and {theirs.get(token, 'unknown')} here; a draft model must share the "
            "target's tokenizer"
        )


def _vocabulary(checkpoint: Checkpoint) -> dict[str, int] | None:
    """Token text to id, added tokens included."""
    directory = checkpoint.tokenizer_dir()
    path = None if directory is None else Path(directory) / "tokenizer.json"
    if path is None or not path.is_file():
        return None
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    vocab = content.get("model", {}).get("vocab", {})
    if isinstance(vocab, list):  # Unigram: pieces with scores, in the order of their ids
        vocab = {piece[0]: i for i, piece in enumerate(vocab)}
    return {**vocab, **{token["content"]: token["id"] for token in content.get("added_tokens", [])}}
