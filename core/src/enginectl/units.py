"""Sizes in bytes, as people write and read them: 24GiB, 4GB, 512 MiB; and nouns for numbers of things."""

from __future__ import annotations

import re

from enginectl.errors import ConfigError

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(text: str | int, *, what: str = "size") -> int:
    """Bytes: a whole number of them, or a number with B, KB … TB (powers of 1000) or KiB … TiB (powers of 1024).

    what: names the value in errors. Raises ConfigError.
    """
    if isinstance(text, int):
        if isinstance(text, bool) or text < 0:
            raise ConfigError(f"{what}: {text!r} is not a size; give bytes as a whole number from 0, or like 24GiB")
        return text
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{what}: {text!r} is not a size; write it like 24GiB, 4GB, 512MiB, or bytes like 1073741824")
    number, unit = match[1], match[2].lower()
    if unit in ("k", "m", "g", "t"):
        big = unit.upper()
        raise ConfigError(
            f"{what}: {text!r} may mean powers of 1000 or of 1024; write {number}{big}B or {number}{big}iB"
        )
    if unit and unit not in _UNITS:
        raise ConfigError(f"{what}: {text!r} has the unknown unit {match[2]!r}; known: B, KB, MB, GB, TB, KiB … TiB")
    if "." not in number:
        return int(number) * _UNITS.get(unit, 1)
    if not unit or unit == "b":
        raise ConfigError(f"{what}: {text!r} is a fraction of a byte; add a unit, like {number}GiB")
    return int(float(number) * _UNITS[unit])


def format_size(num_bytes: int) -> str:
    """The size in the largest binary unit that keeps it from 1 up: `512 B`, `1.50 GiB`, `24 GiB`."""
    if num_bytes < 0:
        raise ValueError(f"a size cannot be negative: {num_bytes}")
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value == int(value) else f"{value:.2f} {unit}"


def plural(number: int, noun: str) -> str:
    """The noun for so many: `block` for 1, else `blocks`. For nouns that take an s."""
    return noun if number == 1 else f"{noun}s"
