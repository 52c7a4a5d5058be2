"""What is asked, and when: Poisson or closed-loop arrivals, fixed or lognormal lengths, all by a seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np

from enginectl.errors import UsageError
from enginectl.simulate.workload import Lengths, Traffic, poisson

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

_WORDS = [
    "river",
    "stone",
    "light",
    "paper",
    "green",
    "winter",
    "table",
    "music",
    "garden",
    "north",
    "window",
    "letter",
    "silver",
    "bread",
    "cloud",
    "engine",
    "forest",
    "market",
    "yellow",
    "summer",
    "bridge",
    "animal",
    "doctor",
    "ocean",
    "simple",
    "strong",
    "quiet",
    "early",
    "travel",
    "number",
]
"""Words that are one token in most vocabularies, each with the space before it."""


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """How hard to press: so many clients that each ask again when answered, or requests a second; one of the two."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        """For tables: `16 clients`, `2.5 req/s`."""
        if self.rate is not None:
            return f"{self.rate:g} req/s"
        return "1 client" if self.concurrency == 1 else f"{self.concurrency} clients"


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What every request asks. token_range: prompt ids are drawn from [first, last).

    max_model_len: drawn lengths are cut so that prompt and output fit.
    """

    model: str
    input_len: int
    output_len: int
    lognormal_sigma: float = 0.0
    api: Literal["completions", "chat"] = "completions"
    token_range: tuple[int, int] = (100, 900)
    max_model_len: int | None = None
    ignore_eos: bool = True
    extra_body: Mapping[str, Any] = {}

    @property
    def path(self) -> str:
        """Where requests go."""
        return PATHS[self.api]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request ready to send, arrival_s after the start."""

    arrival_s: float
    body: bytes
    input_len: int
    output_len: int


def make_requests(workload: Workload, level: Level, count: int, seed: int | tuple[int, ...]) -> list[Request]:
    """`count` requests by arrival time; the same for the same seed. All prompts differ, so that no cache knows them."""
    first, last = workload.token_range
    if not 0 <= first < last:
        raise UsageError(f"the token range {first}-{last} is empty; give FIRST-LAST with 0 <= FIRST < LAST")
    entropy = list(seed) if isinstance(seed, tuple) else [seed]
    arrivals = poisson([_traffic(workload, level, count)], int(np.random.SeedSequence(entropy).generate_state(1)[0]))
    random = np.random.default_rng([*entropy, 1])
    encode = msgspec.json.Encoder().encode
    requests = []
    for arrival in arrivals:
        length, output = arrival.prompt_tokens, arrival.output_tokens
        if workload.max_model_len is not None:
            output = min(output, workload.max_model_len - length)
        body = _body(workload, length, output, random)
        requests.append(Request(arrival_s=arrival.arrival_s, body=encode(body), input_len=length, output_len=output))
    return requests


def _traffic(workload: Workload, level: Level, count: int) -> Traffic:
    sigma, most = workload.lognormal_sigma, None
    if workload.max_model_len is not None:
        most = workload.max_model_len - workload.output_len
        if workload.input_len + workload.output_len > workload.max_model_len:
            raise UsageError(
                f"{workload.input_len} prompt and {workload.output_len} output tokens are more than the "
                f"{workload.max_model_len} that {workload.model} takes; lower --input-len or --output-len"
            )
    return Traffic(
        rate=level.rate or 0.0,
        prompt=Lengths(median=workload.input_len, sigma=sigma, most=most),
        output=Lengths(median=workload.output_len, sigma=sigma),
        count=count,
    )


def _body(workload: Workload, length: int, output: int, random: np.random.Generator) -> dict[str, Any]:
    body: dict[str, Any] = {"model": workload.model, "max_tokens": output, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if workload.ignore_eos:
        body["ignore_eos"] = True
    if workload.api == "chat":
        words = [_WORDS[place] for place in random.integers(0, len(_WORDS), length).tolist()]
        body["messages"] = [{"role": "user", "content": " ".join(words)}]
    else:
        body["prompt"] = random.integers(*workload.token_range, length).tolist()
    return body | dict(workload.extra_body)
