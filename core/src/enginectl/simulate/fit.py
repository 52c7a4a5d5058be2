"""Measures a running server from outside, so that a step cost can be fitted to it. Any OpenAI-compatible server will do.

Decode steps: B streams at once, for several B; the time between tokens is a step with B rows and B tokens. Prompts: the
time to the only token of a request, for several lengths, is one step or more with one row and that many tokens.
"""

from __future__ import annotations

import http.client
import json
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from enginectl.errors import EnginectlError, UsageError

_TIMEOUT_S = 300.0
_SHORT_PROMPT = 16
_TOKEN_RANGE = (100, 900)
"""Ids that every vocabulary has. They are drawn at random, so that no prefix cache knows them."""


class Probe(msgspec.Struct, frozen=True):
    """Something that was timed: num_steps steps, rows in each, tokens in all of them, and the seconds they took."""

    num_steps: int
    rows: int
    tokens: int
    seconds: float


class Server:
    """Where to send requests. Raises UsageError for an address that is not http."""

    def __init__(self, url: str, *, api_key: str | None = None, model: str | None = None, seed: int = 0) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is not an address; give http://HOST:PORT")
        self._parts = parts
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._random = np.random.default_rng(seed)
        served = self.get("/v1/models")["data"][0]
        self.model = model or served["id"]
        self.max_model_len = int(served.get("max_model_len") or 2048)

    def get(self, path: str) -> Any:
        """A JSON document. Raises EnginectlError."""
        connection = self._connect()
        try:
            connection.request("GET", self._path(path), headers=self._headers)
            return json.loads(self._answer(connection).read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EnginectlError(f"{self._parts.geturl()}{path}: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def stream(self, num_prompt: int, num_output: int) -> list[float]:
        """Complete a random prompt; when each piece of the answer came. Raises EnginectlError."""
        prompt = self._random.integers(*_TOKEN_RANGE, num_prompt).tolist()
        body = {"model": self.model, "prompt": prompt, "max_tokens": num_output, "min_tokens": num_output}
        body |= {"stream": True, "temperature": 0, "ignore_eos": True}
        connection = self._connect()
        times: list[float] = []
        try:
            connection.request("POST", self._path("/v1/completions"), json.dumps(body), self._headers)
            answer = self._answer(connection)
            for line in iter(answer.readline, b""):
                if line.startswith(b"data:") and b"[DONE]" not in line:
                    times.append(time.perf_counter())
        except (OSError, http.client.HTTPException) as error:
            raise EnginectlError(f"{self._parts.geturl()}: {error or type(error).__name__}") from error
        finally:
            connection.close()
        return times

    def _path(self, path: str) -> str:
        return f"{self._parts.path.rstrip('/').removesuffix('/v1')}{path}"

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None, "checked when made"
        return kind(self._parts.hostname, self._parts.port, timeout=_TIMEOUT_S)

    def _answer(self, connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        answer = connection.getresponse()
        if answer.status != 200:
            text = answer.read(2000).decode(errors="replace")
            raise EnginectlError(f"{self._parts.geturl()} answered {answer.status}: {text}")
        return answer


def measure(
    server: Server,
    *,
    batch_sizes: Sequence[int] = (1, 2, 4, 8),
    prompt_lens: Sequence[int] = (32, 64, 128, 256, 512),
    num_output: int = 48,
    repeats: int = 3,
    max_num_batched_tokens: int | None = None,
) -> list[Probe]:
    """Time decode steps and prompts. max_num_batched_tokens: longer prompts take several steps; None means one step.

    Raises EnginectlError if the server fails.
    """
    server.stream(_SHORT_PROMPT, 4)  # whatever is compiled or captured at first use
    probes = []
    for size in batch_sizes:
        for _ in range(repeats):
            probes.append(Probe(1, size, size, _decode_step(server, size, num_output)))
    for length in prompt_lens:
        if length + 1 > server.max_model_len:
            continue
        num_steps = 1 if max_num_batched_tokens is None else -(-length // max_num_batched_tokens)
        for _ in range(repeats):
            begin = time.perf_counter()
            times = server.stream(length, 1)
            probes.append(Probe(num_steps, 1, length, times[0] - begin))
    return probes


def _decode_step(server: Server, size: int, num_output: int) -> float:
    """Seconds between tokens of `size` streams that run together."""
    found: list[float] = []
    errors: list[Exception] = []
    start = threading.Barrier(size)

    def run() -> None:
        try:
            start.wait()
            times = server.stream(_SHORT_PROMPT, num_output)
            found.append((times[-1] - times[0]) / (num_output - 1))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return statistics.median(found)


def budget_of(server: Server) -> int | None:
    """The token budget of a step, which enginectl servers report and others do not."""
    try:
        found = server.get("/server_info")
    except EnginectlError:
        return None
    return _find(found, "max_num_batched_tokens")


def _find(value: Any, key: str) -> int | None:
    if not isinstance(value, dict):
        return None
    if isinstance(value.get(key), int):
        return int(value[key])
    return next((found for part in value.values() if (found := _find(part, key)) is not None), None)
