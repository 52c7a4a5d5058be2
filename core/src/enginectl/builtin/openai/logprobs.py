"""Log-probabilities in the three forms clients know: chat, text completions, and of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from enginectl.builtin.openai.answers import (
    ChatLogprob,
    ChatLogprobs,
    ChatTopLogprob,
    PromptLogprobs,
    TextLogprobs,
)
from enginectl.types import TokenLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


class TokenTexts:
    """Token ids as text and raw bytes, remembered: there are at most vocabulary-size of them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def get(self, token_id: int) -> tuple[str, bytes]:
        r"""Text and bytes. A token that is not UTF-8 by itself reads `bytes:\xe2\x82`, so that no two look alike."""
        known = self._known.get(token_id)
        if known is None:
            raw: bytes = self._tokenizer.token_bytes(token_id)
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            known = self._known[token_id] = (text, raw)
        return known


def chat_logprobs(entries: Sequence[TokenLogprobs], num_top: int, texts: TokenTexts) -> ChatLogprobs:
    """One entry an output token; the chosen token is always there, alternatives only when asked for."""
    return ChatLogprobs([_chat_entry(entry, num_top, texts) for entry in entries])


def _chat_entry(entry: TokenLogprobs, num_top: int, texts: TokenTexts) -> ChatLogprob:
    text, raw = texts.get(entry.token_id)
    tops = []
    for token_id, logprob in zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True):
        top_text, top_raw = texts.get(token_id)
        tops.append(ChatTopLogprob(top_text, finite(logprob), list(top_raw)))
    return ChatLogprob(text, finite(entry.logprob), list(raw), tops)


def text_logprobs(
    entries: Sequence[TokenLogprobs | None],
    token_ids: Sequence[int],
    offsets: list[int],
    num_top: int,
    texts: TokenTexts,
) -> TextLogprobs:
    """One entry a token: output tokens, or with echo those of the prompt, whose first has no log-probability."""
    return TextLogprobs(
        text_offset=offsets,
        token_logprobs=[None if entry is None else finite(entry.logprob) for entry in entries],
        tokens=[texts.get(token_id)[0] for token_id in token_ids],
        top_logprobs=[None if entry is None else _top_by_text(entry, num_top, texts) for entry in entries],
    )


def _top_by_text(entry: TokenLogprobs, num_top: int, texts: TokenTexts) -> dict[str, float]:
    tops = {
        texts.get(token_id)[0]: finite(logprob)
        for token_id, logprob in zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
    }
    tops.setdefault(texts.get(entry.token_id)[0], finite(entry.logprob))
    return tops


def prompt_logprobs(entries: Sequence[TokenLogprobs | None], num_top: int, texts: TokenTexts) -> PromptLogprobs:
    """One mapping a prompt token from token id to its values; None for the first."""
    return [None if entry is None else _prompt_entry(entry, num_top, texts) for entry in entries]


def _prompt_entry(entry: TokenLogprobs, num_top: int, texts: TokenTexts) -> dict[str, Any]:
    found = {str(entry.token_id): _ranked(entry.token_id, entry.logprob, entry.rank, texts)}
    for place in range(min(num_top, len(entry.top_ids))):
        token_id = entry.top_ids[place]
        found.setdefault(str(token_id), _ranked(token_id, entry.top_logprobs[place], place + 1, texts))
    return found


def _ranked(token_id: int, logprob: float, rank: int, texts: TokenTexts) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": texts.get(token_id)[0]}


def finite(logprob: float) -> float:
    """The number, or LOWEST for minus infinity and NaN."""
    return logprob if logprob > LOWEST else LOWEST


def text_offsets(
    token_ids: Sequence[int], text: str, start: int, texts: TokenTexts, unseen: frozenset[int] = frozenset()
) -> list[int]:
    """Where each token begins in the text: characters before it, counting from `start`.

    text: what the tokens became. unseen: ids that leave no text. A character of several tokens begins in each of them;
    offsets never pass the end, which a stop string may have cut.
    """
    offsets = []
    end = start + len(text)
    position = start
    strip_space = bool(text) and not text.startswith(" ")
    for token_id in token_ids:
        raw = b"" if token_id in unseen else texts.get(token_id)[1]
        if strip_space and raw:
            # Tokenizers that mark words by a leading space drop it at the start of a text.
            raw, strip_space = raw.removeprefix(b" "), False
        inside = bool(raw) and raw[0] & 0xC0 == 0x80 and position > start
        offsets.append(min(position - inside, end))
        position += sum(byte & 0xC0 != 0x80 for byte in raw)
    return offsets
