"""Who asks for what, and when: Poisson arrivals or a trace; fixed, lognormal or traced lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginectl.errors import UsageError, unknown

_Z95 = 1.6448536269514722
"""The standard normal's 95th percentile."""


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution of lengths in tokens: lognormal about its median; sigma 0 is fixed. total: rescale the sum to this.

    most: no length above.
    """

    median: float
    sigma: float = 0.0
    total: int | None = None
    most: int | None = None

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        """`count` whole lengths of at least 1."""
        drawn = self.median * np.exp(self.sigma * random.standard_normal(count))
        if self.total is not None:
            drawn = drawn * (self.total / drawn.sum())
        lengths = np.maximum(np.rint(drawn), 1).astype(np.int64)
        if self.total is not None:
            _correct_sum(lengths, self.total)
        return lengths if self.most is None else np.minimum(lengths, self.most)


def _correct_sum(lengths: NDArray[np.int64], total: int) -> None:
    """Take what rounding added, or give what it lost, from and to whichever is the longest. None becomes 0."""
    excess = int(lengths.sum()) - max(total, lengths.size)
    for _ in range(abs(excess)):
        lengths[lengths.argmax()] -= np.sign(excess)


def parse_lengths(text: str, flag: str) -> Lengths:
    """`256`, or `lognormal:median=260,p95=735`, with sigma instead of p95, and total or most. Raises UsageError."""
    allowed = f"{flag} is {text!r}; give a number of tokens, or lognormal:median=260,p95=735 (or sigma=0.63)"
    kind, _, rest = text.partition(":")
    if not rest:
        if not kind.isdecimal() or int(kind) < 1:
            raise UsageError(allowed)
        return Lengths(median=int(kind))
    if kind != "lognormal":
        raise UsageError(f"{flag}: {unknown('distribution', kind, ('lognormal',))}")
    try:
        given = {key.strip(): float(value) for key, value in (part.split("=") for part in rest.split(","))}
    except ValueError as error:
        raise UsageError(allowed) from error
    for key in given:
        if key not in ("median", "p95", "sigma", "total", "most"):
            raise UsageError(f"{flag}: {unknown('parameter', key, ('median', 'p95', 'sigma', 'total', 'most'))}")
    return _lognormal(given, allowed)


def _lognormal(given: Mapping[str, float], allowed: str) -> Lengths:
    median, p95, sigma = given.get("median"), given.get("p95"), given.get("sigma")
    if median is None or median < 1 or (p95 is None) == (sigma is None):
        raise UsageError(allowed)
    if p95 is not None:
        if p95 < median:
            raise UsageError(f"{allowed}; p95 is below the median")
        sigma = math.log(p95 / median) / _Z95
    assert sigma is not None, "one of the two is given"
    total, most = given.get("total"), given.get("most")
    return Lengths(
        median=median,
        sigma=sigma,
        total=None if total is None else int(total),
        most=None if most is None else int(most),
    )


class Arrival(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a trace. prefix: name of a shared prefix; its first prefix_tokens tokens are the same for all."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    priority: int = 0
    prefix: str = ""
    prefix_tokens: int = 0


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Poisson arrivals of one tenant. rate: requests a second, 0 for all at once. count or duration_s ends it."""

    rate: float
    prompt: Lengths
    output: Lengths
    count: int | None = None
    duration_s: float | None = None
    tenant: str = ""
    priority: int = 0
    prefix_tokens: int = 0


def poisson(traffic: Sequence[Traffic], seed: int) -> list[Arrival]:
    """The arrivals of all tenants, by time. Each tenant's do not depend on the others'."""
    found: list[Arrival] = []
    for place, one in enumerate(traffic):
        random = np.random.default_rng((seed, place))
        times = _times(one, random)
        prompts, outputs = one.prompt.draw(times.size, random), one.output.draw(times.size, random)
        for time, prompt, output in zip(times.tolist(), prompts.tolist(), outputs.tolist(), strict=True):
            found.append(
                Arrival(
                    arrival_s=time,
                    prompt_tokens=prompt + one.prefix_tokens,
                    output_tokens=output,
                    tenant=one.tenant,
                    priority=one.priority,
                    prefix=one.tenant or "shared" if one.prefix_tokens else "",
                    prefix_tokens=one.prefix_tokens,
                )
            )
    return sorted(found, key=lambda arrival: arrival.arrival_s)


def _times(one: Traffic, random: np.random.Generator) -> NDArray[np.float64]:
    if one.count is not None:
        gaps = random.exponential(1.0, one.count)
        times: NDArray[np.float64] = np.cumsum(gaps) / one.rate if one.rate else np.zeros(one.count)
        return times if one.duration_s is None else times[times < one.duration_s]
    assert one.duration_s is not None, "checked by the caller"
    assert one.rate > 0, "checked by the caller"
    count = int(one.rate * one.duration_s + 6 * math.sqrt(one.rate * one.duration_s) + 10)
    times = np.cumsum(random.exponential(1.0 / one.rate, count))
    return times[times < one.duration_s]


def read_trace(path: Path) -> list[Arrival]:
    """A trace: one JSON object a line, by arrival time. Raises UsageError with the line's number."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"--trace {path}: cannot be read: {error.strerror}") from error
    decoder = msgspec.json.Decoder(Arrival)
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            arrival = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise UsageError(f"--trace {path}, line {number}: {error}") from error
        if arrival.prompt_tokens < 1 or arrival.output_tokens < 1 or arrival.prefix_tokens < 0:
            raise UsageError(f"--trace {path}, line {number}: prompt_tokens and output_tokens must be at least 1")
        found.append(arrival)
    if not found:
        raise UsageError(f"--trace {path}: it has no requests")
    return sorted(found, key=lambda arrival: arrival.arrival_s)
