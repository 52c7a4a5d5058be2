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

from enginectl.errors import ConfigError, unknown
from enginectl.interfaces.kv import BlockKey

Extra = tuple[str | int | None, ...]
"""Something besides tokens that separates blocks. The first entry is its tag, so none can pass for another."""


@dataclass(frozen=True, slots=True)
class BlockHasher:
    """How blocks are named.

    root: stands for the parent of a sequence's first block. hash_block: (parent's digest, tokens as int32 bytes,
    encoded extras) to a digest of as many bytes as root. encode: extras to bytes, one way only.
    is_cryptographic: nobody can find two blocks with one digest.
    """

    name: str
    root: bytes
    hash_block: Callable[[bytes, bytes, bytes], bytes]
    encode: Callable[[Sequence[Extra]], bytes]
    is_cryptographic: bool


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
    def hash_block(parent: bytes, tokens: bytes, extras: bytes) -> bytes:
        return sha256(parent + tokens + extras).digest()

    return BlockHasher("sha256", bytes(32), hash_block, _encode, is_cryptographic=True)


def _sha256_cbor() -> BlockHasher:
    def hash_block(parent: bytes, tokens: bytes, extras: bytes) -> bytes:
        return sha256(_as_cbor(parent, tokens, extras)).digest()

    return BlockHasher("sha256_cbor", bytes(32), hash_block, _encode_cbor, is_cryptographic=True)


def _xxhash() -> BlockHasher:
    digest, seed = xxhash.xxh3_128_digest, secrets.randbits(64)

    def hash_block(parent: bytes, tokens: bytes, extras: bytes) -> bytes:
        return digest(parent + tokens + extras, seed)

    return BlockHasher("xxhash", bytes(16), hash_block, _encode, is_cryptographic=False)


def _xxhash_cbor() -> BlockHasher:
    digest, seed = xxhash.xxh3_128_digest, secrets.randbits(64)

    def hash_block(parent: bytes, tokens: bytes, extras: bytes) -> bytes:
        return digest(_as_cbor(parent, tokens, extras), seed)

    return BlockHasher("xxhash_cbor", bytes(16), hash_block, _encode_cbor, is_cryptographic=False)


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


def _encode_cbor(extras: Sequence[Extra]) -> bytes:
    return cbor2.dumps([list(extra) for extra in extras]) if extras else b""


def _as_cbor(parent: bytes, tokens: bytes, extras: bytes) -> bytes:
    """[parent, [token, …], extras or null] as in RFC 8949, for tools in other languages."""
    return cbor2.dumps([parent, np.frombuffer(tokens, np.int32).tolist(), extras or None])
