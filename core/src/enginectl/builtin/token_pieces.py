"""What each token adds to the text, for the decoders where that can be said token by token."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import tokenizers

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The characters byte-level BPE writes for the 256 bytes: printable Latin-1 for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


BYTE_ALPHABET = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A tokenizer's decoder, as far as one token can be decoded without its neighbours.

    kind: `byte_level` (tokens spell bytes), `pieces` (tokens are text, perhaps with byte tokens like `<0x0A>`), or
    `whole` (a decoder that must see neighbours: WordPiece, CTC, BPE suffixes, none at all). replacements: applied to
    each token in order, `("▁", " ")`. byte_tokens: `<0xNN>` is a byte. strip: at most this many of this string come off
    the start of the whole text. dropped_at_start: removed from the first token.
    """

    kind: Literal["byte_level", "pieces", "whole"]
    replacements: tuple[tuple[str, str], ...] = ()
    byte_tokens: bool = False
    strip: tuple[str, int] = ("", 0)
    dropped_at_start: str = ""


WHOLE = DecoderShape("whole")


def decoder_shape(backend: tokenizers.Tokenizer) -> DecoderShape:
    """Read the decoder's stages; anything not understood exactly is `whole`."""
    if backend.decoder is None:
        return WHOLE
    stages = _flat(json.loads(backend.decoder.__getstate__()))
    kinds = [stage["type"] for stage in stages]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return DecoderShape("byte_level")
    return _pieces_shape(stages)


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [stage for inner in decoder["decoders"] for stage in _flat(inner)]


def _pieces_shape(stages: list[dict[str, Any]]) -> DecoderShape:
    """Accepts (Metaspace | Replace*) ByteFallback? (Fuse Strip?)?, the forms SentencePiece tokenizers are saved in."""
    replacements: list[tuple[str, str]] = []
    dropped, byte_tokens, fused, strip = "", False, False, ("", 0)
    for i, stage in enumerate(stages):
        match stage:
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if not (byte_tokens or fused):
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": mark} if i == 0:
                replacements.append((mark, " "))
                dropped = "" if stage.get("prepend_scheme") == "never" else mark
            case {"type": "ByteFallback"} if not fused:
                byte_tokens = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": content, "start": start, "stop": 0} if fused and not strip[1]:
                strip = (content, start)
            case _:
                return WHOLE
    return DecoderShape("pieces", tuple(replacements), byte_tokens, strip, dropped)


def byte_level_bytes(token: str) -> bytes:
    """The bytes a byte-level token spells. A token with a character outside the alphabet stands for itself."""
    try:
        return bytes([BYTE_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()


def piece_bytes(token: str, shape: DecoderShape) -> bytes:
    """The bytes of one token under a `pieces` decoder."""
    for old, new in shape.replacements:
        token = token.replace(old, new)
    if shape.byte_tokens and (byte := BYTE_TOKEN.fullmatch(token)):
        return bytes([int(byte[1], 16)])
    return token.encode()


class TokenPieces(dict[int, "str | bytes"]):
    """Token id to what it adds: `str` when that is whole characters, `bytes` when not, "" when it is skipped.

    Filled as ids are met, so making one costs nothing; look up with `pieces[token_id]`.
    """

    def __init__(self, backend: tokenizers.Tokenizer, shape: DecoderShape, skipped: frozenset[int]) -> None:
        super().__init__()
        assert shape.kind != "whole", "a whole-text decoder has no pieces"
        self._backend = backend
        self._shape = shape
        self._skipped = skipped

    def token(self, token_id: int) -> str:
        """The token's spelling in the vocabulary, "" for an id that has none."""
        return (self._backend.id_to_token(token_id) or "") if token_id >= 0 else ""

    def __missing__(self, token_id: int) -> str | bytes:
        token = "" if token_id in self._skipped else self.token(token_id)
        shape = self._shape
        data = byte_level_bytes(token) if shape.kind == "byte_level" else piece_bytes(token, shape)
        piece: str | bytes
        try:
            piece = data.decode()
        except UnicodeDecodeError:
            piece = data
        self[token_id] = piece
        return piece
