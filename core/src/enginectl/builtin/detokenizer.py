"""Token ids to text, incrementally.

The text of a choice is what follows the prompt's characters when prompt and output are decoded together: a leading
space stays if the prompt has text before it, and goes where the decoder strips the start of a text. A character, or a
U+FFFD, is emitted when at least one of its bytes is output, so a character begun by the prompt appears once, whole.

Bytes that never become a character turn into U+FFFD as in the tokenizer's own decode: one for each malformed
sequence under a byte-level decoder, one for each byte under byte tokens (`<0xNN>`). One difference is deliberate: a
run of byte tokens with an error in it keeps its valid characters, which `tokenizers` would replace too. They have been
streamed by the time the error is seen.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from enginectl.builtin.token_pieces import DecoderShape, TokenPieces
from enginectl.interfaces.detokenizer import Detokenizer, TextStream

if TYPE_CHECKING:
    from enginectl.builtin.tokenizer import Tokenizer
    from enginectl.context import BuildContext
    from enginectl.types import SamplingParams

PROMPT_TAIL = 8
"""Prompt tokens looked at when a stream starts: three hold any incomplete character, the rest allow for skipped ones."""

MAX_WINDOW = 16
"""Tokens a windowed stream holds back for a character that does not come."""

REPLACEMENT = "\ufffd"


def build(ctx: BuildContext) -> TokenizerDetokenizer:
    """The provider's factory. `ctx.parts["tokenizer"]` is the API side's `Tokenizer`."""
    return TokenizerDetokenizer(ctx.parts["tokenizer"])


class TokenizerDetokenizer(Detokenizer):
    """Streams for a `Tokenizer`: by its pieces where its decoder works token by token, else by decoding a window."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces = {}
        if tokenizer.decoder_shape.kind != "whole":
            for skip in (False, True):
                skipped = tokenizer.special_ids if skip else frozenset[int]()
                self._pieces[skip] = TokenPieces(tokenizer.backend, tokenizer.decoder_shape, skipped)

    def start(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> TextStream:
        skip = params.skip_special_tokens
        if self._pieces:
            return PieceStream(self._pieces[skip], self._tokenizer.decoder_shape, prompt_token_ids)
        spaced = skip or params.spaces_between_special_tokens
        return WindowStream(self._tokenizer, prompt_token_ids, skip_special_tokens=skip, spaced=spaced)


class PieceStream(TextStream):
    """Joins pieces, completing characters whose bytes are spread over tokens."""

    __slots__ = (
        "_drops",
        "_each_byte",
        "_num_prompt_bytes",
        "_pending",
        "_pieces",
        "_settled",
        "_strip",
        "_strip_left",
    )

    def __init__(self, pieces: TokenPieces, shape: DecoderShape, prompt_token_ids: Sequence[int]) -> None:
        self._pieces = pieces
        self._each_byte = shape.kind == "pieces"
        tail = [piece for token_id in prompt_token_ids[-PROMPT_TAIL:] if (piece := pieces[token_id])]
        empty = not tail and len(prompt_token_ids) <= PROMPT_TAIL
        self._drops = shape.dropped_at_start if empty else ""
        self._strip, self._strip_left = shape.strip
        if self._strip_left and not empty:
            self._strip_left = _strips_left(tail, self._strip, self._strip_left)
        self._pending = _incomplete_end(tail)
        self._num_prompt_bytes = len(self._pending)
        self._settled = not (self._pending or self._drops or self._strip_left)

    def push(self, token_ids: Sequence[int]) -> str:
        if self._settled and len(token_ids) == 1:
            piece = self._pieces[token_ids[0]]
            if piece.__class__ is str:
                return piece
        return self._push(token_ids)

    def flush(self) -> str:
        return self._strip_start(self._give_up())

    def _push(self, token_ids: Sequence[int]) -> str:
        parts: list[str] = []
        for token_id in token_ids:
            piece = self._pieces[token_id]
            if not piece:
                continue
            if self._drops:
                piece = self._first(token_id, piece)
            if isinstance(piece, bytes):
                self._feed(piece, parts)
            else:
                if self._pending:
                    parts.append(self._give_up())
                parts.append(piece)
        text = self._strip_start("".join(parts))
        self._settled = not (self._pending or self._drops or self._strip_left)
        return text

    def _feed(self, data: bytes, parts: list[str]) -> None:
        """Decode what is complete; keep an incomplete character pending."""
        data = self._pending + data
        while data:
            text, num_bad, data = _decode_some(data)
            if text:
                self._num_prompt_bytes = 0
                parts.append(text)
            if not num_bad:
                break
            parts.append(self._replacements(num_bad))
        self._pending = data

    def _give_up(self) -> str:
        """The pending bytes never became a character."""
        text = self._replacements(len(self._pending)) if self._pending else ""
        self._pending = b""
        return text

    def _replacements(self, num_bad: int) -> str:
        """U+FFFD for a malformed sequence, less what the prompt's share of it accounts for."""
        num_output = num_bad - self._num_prompt_bytes
        self._num_prompt_bytes = 0
        return REPLACEMENT * (num_output if self._each_byte else min(1, num_output))

    def _first(self, token_id: int, piece: str | bytes) -> str | bytes:
        """The text's first token loses the mark that stands for a space."""
        mark, self._drops = self._drops, ""
        return piece if isinstance(piece, bytes) else self._pieces.token(token_id).replace(mark, "")

    def _strip_start(self, text: str) -> str:
        while self._strip_left and text.startswith(self._strip):
            text = text[len(self._strip) :]
            self._strip_left -= 1
        if text:
            self._strip_left = 0
        return text


def _decode_some(data: bytes) -> tuple[str, int, bytes]:
    """The characters up to the first error, the length of the malformed sequence there, and the bytes after it.

    Without an error the rest is the beginning of a character, or empty.
    """
    try:
        text, num_used = codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError as error:
        return data[: error.start].decode(), error.end - error.start, data[error.end :]
    rest = data[num_used:]
    if len(rest) >= 2 and rest[0] == 0xED and rest[1] >= 0xA0:  # a surrogate, which codecs waits for and never accepts
        return text, 1, rest[1:]
    return text, 0, rest


def _strips_left(tail: list[str | bytes], strip: str, most: int) -> int:
    """How many more `strip` would come off a text that begins with the prompt."""
    text = "".join(piece if isinstance(piece, str) else REPLACEMENT for piece in tail)
    num_leading = (len(text) - len(text.removeprefix(strip * (len(text) // len(strip))))) // len(strip)
    return max(0, most - num_leading) if text and text == strip * num_leading else 0


def _incomplete_end(tail: list[str | bytes]) -> bytes:
    """The bytes of a character that the prompt began and did not finish: at most three."""
    data = b""
    for piece in reversed(tail):
        if isinstance(piece, str) or len(data) >= 3:
            break
        data = piece + data
    for start in range(len(data) - 1, max(-1, len(data) - 4), -1):
        if data[start] & 0xC0 != 0x80:  # not a continuation byte: the last character starts here
            _, num_bad, rest = _decode_some(data[start:])
            return b"" if num_bad else rest
    return b""


class WindowStream(TextStream):
    """Decodes the last few tokens with and without the new ones; the difference is the new text.

    For decoders that look at neighbours. Exact when they look one token back; a character that needs more than
    MAX_WINDOW tokens is emitted as it stands.
    """

    __slots__ = ("_added", "_base", "_ids", "_num_read", "_skipped", "_spaced", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool, spaced: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._spaced = spaced
        self._added = tokenizer.added_tokens
        self._ids = [token_id for token_id in prompt_token_ids[-PROMPT_TAIL:] if self._visible(token_id)]
        self._num_read = len(self._ids)
        self._base = self._decode(self._ids)

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push(token_id) for token_id in token_ids if self._visible(token_id)])

    def flush(self) -> str:
        text = self._new_text()
        self._advance()
        return text

    def _visible(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.id_to_token(token_id) is not None

    def _push(self, token_id: int) -> str:
        if not self._spaced and token_id in self._added and self._ids and self._ids[-1] in self._added:
            text = self._new_text() + self._added[token_id]
            self._ids.append(token_id)
            self._advance()
            return text
        self._ids.append(token_id)
        text = self._new_text()
        if not text or (text.endswith(REPLACEMENT) and len(self._ids) - self._num_read < MAX_WINDOW):
            if not text and len(self._ids) - self._num_read >= MAX_WINDOW:
                self._advance()
            return ""
        self._advance()
        return text

    def _new_text(self) -> str:
        """Text of the window beyond what was read. A prompt that ended in an unfinished character may change its end."""
        text = self._decode(self._ids)
        if self._base.endswith(REPLACEMENT):
            return text[_num_common(self._base, text) :]
        return text[len(self._base) :]

    def _advance(self) -> None:
        self._ids = self._ids[self._num_read :] or self._ids
        self._num_read = len(self._ids)
        self._base = self._decode(self._ids)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


def _num_common(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
