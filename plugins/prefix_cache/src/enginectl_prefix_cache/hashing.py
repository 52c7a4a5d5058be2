"""Block hashes: SHA-256 or XXH3, over raw bytes or over CBOR.

A block's digest covers its parent's digest, its tokens and its extras, so equal digests mean equal prefixes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import cbor2
import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from enginectl.errors import ConfigError, unknown
from enginectl.interfaces.kv import BlockKey

Extra = tuple[str | int | None, ...]
"""Something besides tokens that separates blocks. The first entry is its tag, so none can pass for another."""


@dataclass(frozen=True, slots=True)
class BlockHasher:
    """How blocks are named.

    root: stands for the parent of a sequence's first block. hash_block: (parent's digest, the block's part of
    `split`, encoded extras) to a digest of as many bytes as root. encode: extras to bytes, one way only.
    is_cryptographic: nobody can find two blocks with one digest. split: (tokens of whole blocks, block size) to what is
    hashed of each block; all at once, because that is where the time goes.
    """

    name: str
    root: bytes
    hash_block: Callable[[bytes, bytes, bytes], bytes]
    encode: Callable[[Sequence[Extra]], bytes]
    is_cryptographic: bool
    split: Callable[[NDArray[np.int32], int], list[bytes]]


def split_raw(token_ids: NDArray[np.int32], block_size: int) -> list[bytes]:
    """Each block's tokens as int32 bytes."""
    data, width = token_ids.tobytes(), 4 * block_size
    return [data[at : at + width] for at in range(0, len(data), width)]


def split_cbor(token_ids: NDArray[np.int32], block_size: int) -> list[bytes]:
    """Each block's tokens as a CBOR array of numbers in their shortest form (RFC 8949 §4.2).

    Every number is laid out right-aligned, in as many bytes as the largest needs: its big-endian bytes, and the head that
    says how many before them. Then the bytes that its own form lacks are left out.
    """
    if token_ids.min(initial=0) < 0:  # no token, but a number all the same
        return [cbor2.dumps(block) for block in token_ids.reshape(-1, block_size).tolist()]
    big_endian = token_ids.astype(">u4").view(np.uint8).reshape(-1, 4)
    fits_1, fits_2 = token_ids < 1 << 8, token_ids < 1 << 16
    width = 3 if fits_2.all() else 5
    cells = np.empty((token_ids.size, width), np.uint8)
    kept = np.ones((token_ids.size, width), np.bool_)
    cells[:, -1] = big_endian[:, 3]
    cells[:, -2] = np.where(fits_1, 24, big_endian[:, 2])
    kept[:, -2] = token_ids >= 24
    kept[:, -3] = ~fits_1
    if width == 3:
        cells[:, 0] = 25
    else:
        cells[:, 2] = np.where(fits_2, 25, big_endian[:, 1])
        cells[:, 1] = big_endian[:, 0]
        cells[:, 0] = 26
        kept[:, 1] = kept[:, 0] = ~fits_2
    data = cells[kept].tobytes()
    ends = kept.reshape(-1, width * block_size).sum(1).cumsum().tolist()
    head = _cbor_head(0x80, block_size)
    return [head + data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _cbor_head(major: int, value: int) -> bytes:
    """The head of a CBOR item of this major type (its three bits in place), with a length or number below 2^32."""
    if value < 24:
        return bytes([major | value])
    width = 1 if value < 1 << 8 else 2 if value < 1 << 16 else 4
    return bytes([major | 23 + width.bit_length()]) + value.to_bytes(width, "big")


def first_extras(key: BlockKey) -> tuple[Extra, ...]:
    """What separates a sequence's first block; the blocks after it inherit that through their parents."""
    extras: list[Extra] = []
    if key.adapter is not None:
        extras.append(("adapter", key.adapter, key.adapter_version))
    if key.salt is not None:
        extras.append(("salt", key.salt))
    return tuple(extras)


def extras_by_block(key: BlockKey, block_size: int) -> dict[int, tuple[Extra, ...]]:
    """The extras of each block that has any. A multimodal item belongs to the block that holds its first token."""
    found: dict[int, tuple[Extra, ...]] = {}
    if first := first_extras(key):
        found[0] = first
    for position, content in sorted(key.multimodal):
        block, offset = divmod(position, block_size)
        found[block] = (*found.get(block, ()), ("multimodal", offset, content))
    return found


def make_hasher(algorithm: str) -> BlockHasher:
    """The hasher of `--prefix-caching-hash-algo`. SHA-256 gives the same digests in every process; XXH3 is seeded
    anew each time, so that nobody outside can prepare collisions.
    """
    if algorithm not in _MAKERS:
        raise ConfigError(unknown("prefix caching hash algorithm", algorithm, _MAKERS))
    return _MAKERS[algorithm]()


def _sha256() -> BlockHasher:
    start = sha256()

    def hash_block(parent: bytes, block: bytes, extras: bytes) -> bytes:
        state = start.copy()  # a fifth faster than a new one
        state.update(parent + block + extras)
        return state.digest()

    return BlockHasher("sha256", bytes(32), hash_block, _encode, is_cryptographic=True, split=split_raw)


def _sha256_cbor() -> BlockHasher:
    start = sha256(_OPEN + _cbor_head(0x40, 32))

    def hash_block(parent: bytes, block: bytes, extras: bytes) -> bytes:
        state = start.copy()
        state.update(parent + block + (extras or _NULL))
        return state.digest()

    return BlockHasher("sha256_cbor", bytes(32), hash_block, _encode_cbor, is_cryptographic=True, split=split_cbor)


def _xxhash() -> BlockHasher:
    digest, seed = xxhash.xxh3_128_digest, secrets.randbits(64)

    def hash_block(parent: bytes, block: bytes, extras: bytes) -> bytes:
        return digest(parent + block + extras, seed)

    return BlockHasher("xxhash", bytes(16), hash_block, _encode, is_cryptographic=False, split=split_raw)


def _xxhash_cbor() -> BlockHasher:
    digest, seed, head = xxhash.xxh3_128_digest, secrets.randbits(64), _OPEN + _cbor_head(0x40, 16)

    def hash_block(parent: bytes, block: bytes, extras: bytes) -> bytes:
        return digest(head + parent + block + (extras or _NULL), seed)

    return BlockHasher("xxhash_cbor", bytes(16), hash_block, _encode_cbor, is_cryptographic=False, split=split_cbor)


_MAKERS: dict[str, Callable[[], BlockHasher]] = {
    "sha256": _sha256,
    "sha256_cbor": _sha256_cbor,
    "xxhash": _xxhash,
    "xxhash_cbor": _xxhash_cbor,
}

ALGORITHMS = tuple(_MAKERS)


def _encode(extras: Sequence[Extra]) -> bytes:
    """After a parent and tokens of fixed length, so where it starts is never in doubt."""
    return msgspec.msgpack.encode(extras) if extras else b""


# What the CBOR hashes cover is [parent, [token, …], extras or null] as in RFC 8949, for tools in other languages: the
# head of three items and of the parent, the parent, the tokens (`split_cbor`), and the extras as a byte string.
_OPEN = b"\x83"
_NULL = b"\xf6"


def _encode_cbor(extras: Sequence[Extra]) -> bytes:
    """As a byte string that holds CBOR."""
    return cbor2.dumps(cbor2.dumps([list(extra) for extra in extras])) if extras else b""
