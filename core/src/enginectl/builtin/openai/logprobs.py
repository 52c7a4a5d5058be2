"""Log-probabilities in the three forms clients know: chat, text completions, and of the prompt."""

from __future__ import annotations

import codecs
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

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


class TokenTexts:
    """Token ids as text and raw bytes, remembered: there are at most vocabulary-size of them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}
        self.special_ids: frozenset[int] = frozenset() if tokenizer is None else tokenizer.special_ids

    def get(self, token_id: int) -> tuple[str, bytes]:
        r"""Text and bytes. A token that is not UTF-8 by itself reads `bytes:\xe2\x82`, so that no two look alike."""
        known = self._known.get(token_id)
        if known is None:
            raw = b"" if self._tokenizer is None else bytes(self._tokenizer.token_bytes(token_id))
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


class TextOffsets:
    """Where tokens begin in a choice's text: characters before them, counting from `start`.

    Depends on the tokens alone, not on how they come in chunks. unseen: ids that leave no text. num_unseen: the
    first tokens leave none either. starts_text: the tokenizer may have dropped a space before the first word.
    """

    def __init__(
        self,
        texts: TokenTexts,
        *,
        start: int = 0,
        unseen: frozenset[int] = frozenset(),
        num_unseen: int = 0,
        starts_text: bool = False,
    ) -> None:
        self._texts = texts
        self._next = self._end = start
        self._unseen = unseen
        self._num_unseen = num_unseen
        self._starts_text = starts_text
        self._decoder = _Utf8Decoder(errors="replace")

    def take(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Offsets of the next tokens, whose chunk has this text. A character of several tokens begins in each of them.

        No offset passes the end of the text, which a stop string may have cut.
        """
        self._end += len(text)
        offsets = []
        for token_id in token_ids:
            offsets.append(min(self._next, self._end))
            hidden = self._num_unseen > 0 or token_id in self._unseen
            self._num_unseen -= 1
            raw = b"" if hidden else self._texts.get(token_id)[1]
            if self._starts_text and raw:
                self._starts_text = False
                raw = raw if text.startswith(" ") else raw.removeprefix(b" ")
            self._next += len(self._decoder.decode(raw))
        return offsets
