"""The API process alone: from an engine's message to bytes for the sockets, for streams that nobody reads.

    python bench/http_path.py --tokenizer DIR [--streams 64] [--tokens 128] [--profile] --json

Messages as an engine process sends them, one a step with a token for every stream, are decoded, made into text and
events, and go through the middleware and uvicorn's protocol to transports that drop them. What is missing is the
kernel's share of the writes. Microseconds a token, the least of the rounds. --profile: where they go, by function.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from enginectl.api_side import ApiSide
from enginectl.config import EngineConfig, ServerConfig
from enginectl.engine.client import EngineState
from enginectl.engine.messages import Outputs, Submit, ToEngine, encoder, from_engine_decoder
from enginectl.engine.routed import RoutedClient
from enginectl.engine.router import OutputRouter
from enginectl.interfaces.observer import Observer
from enginectl.machine import detect_machine
from enginectl.plugins import PluginHost
from enginectl.provider import Role
from enginectl.server import build_app
from enginectl.testing.fake_client import fake_info
from enginectl.types import EngineStats, Finished, FinishReason, StepOutputs, Timings

BODY = {"model": "bench", "prompt": list(range(100, 132)), "stream": True, "ignore_eos": True, "temperature": 0}
TURNS = 4
"""Turns of the event loop between two messages, so that whoever was woken by one runs before the next."""


class FedClient(RoutedClient):
    """A client whose engine is the benchmark. keys: of the choices that were sent to it."""

    def __init__(
        self, config: EngineConfig, host: PluginHost, observers: Sequence[Observer], tokenizer_dir: Path
    ) -> None:
        super().__init__(config, host, observers)
        self.info = fake_info(
            model="bench",
            max_model_len=8192,
            vocab_size=49_152,
            num_kv_tokens=1 << 20,
            max_num_seqs=256,
            tokenizer_dir=str(tokenizer_dir),
        )
        self.keys: list[int] = []

    def _send(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self.keys += [request.key for request in message.requests]

    def begin(self, api: ApiSide) -> None:
        """Serve."""
        self.router = OutputRouter(api.detokenizer(self.info), self.info, on_finished=self._audience.finished)
        self._set_state(EngineState.RUNNING)

    def feed(self, message: bytes) -> None:
        """A step's message arrives."""
        decoded = from_engine_decoder.decode(message)
        assert isinstance(decoded, Outputs), "made by step_messages"
        self._on_outputs(decoded.outputs)

    async def close(self) -> None:
        """Nothing to close."""


class Drop(asyncio.Transport):
    """A connection whose other end takes everything. num_writes, num_bytes: what it took."""

    def __init__(self) -> None:
        super().__init__()
        self.num_writes = self.num_bytes = 0

    def write(self, data: Any) -> None:
        """Count it."""
        self.num_writes += 1
        self.num_bytes += len(data)

    def is_closing(self) -> bool:
        """Never."""
        return False

    def close(self) -> None:
        """Nothing to close."""


def step_messages(keys: list[int], num_steps: int) -> list[bytes]:
    """What an engine process would send: a token for each, and in the last step the end of each."""
    random = np.random.default_rng(0)
    key_bytes = np.array(keys, np.int64).tobytes()
    timings = Timings(0.0, 0.0, 0.0, 0.0, 0)
    finished = tuple(Finished(key, FinishReason.LENGTH, None, None, 0, timings) for key in keys)
    messages = []
    for step in range(num_steps):
        tokens = random.integers(100, 40_000, len(keys), dtype=np.int32).tobytes()
        ends = finished if step == num_steps - 1 else ()
        messages.append(encoder.encode(Outputs(StepOutputs(key_bytes, b"", tokens, ends, (), (), EngineStats()))))
    return messages


async def run_round(client: FedClient, app: Any, num_streams: int, num_tokens: int) -> tuple[float, Drop]:
    """Seconds from the first message to the last byte, and one of the connections."""
    config = uvicorn.Config(app, http="httptools", lifespan="off", log_config=None, access_log=False)
    config.load()
    state = ServerState()
    body = json.dumps({**BODY, "max_tokens": num_tokens}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    drops = [Drop() for _ in range(num_streams)]
    client.keys.clear()
    for drop in drops:
        protocol = HttpToolsProtocol(config, state, {})
        protocol.connection_made(drop)
        protocol.data_received(head % len(body) + body)
    while len(client.keys) < num_streams:
        await asyncio.sleep(0)
    messages = step_messages(client.keys, num_tokens)
    begin = time.perf_counter()
    for message in messages:
        client.feed(message)
        for _ in range(TURNS):
            await asyncio.sleep(0)
    while client.router is not None and client.router.num_open:
        await asyncio.sleep(0)
    return time.perf_counter() - begin, drops[0]


async def measure(args: argparse.Namespace) -> tuple[dict[str, float], cProfile.Profile | None]:
    """The figures, and a profile of one more round."""
    config = EngineConfig(model="bench")
    host, machine = PluginHost(), detect_machine()
    api = ApiSide(config, host, machine)
    observers = list(api.all_of(Role.OBSERVER).values())
    client = FedClient(config, host, observers, args.tokenizer)
    client.begin(api)
    frontends = list(api.all_of(Role.FRONTEND).values())
    app = build_app(client, api.tokenizer, config, ServerConfig(log_requests=False), frontends, observers)
    least, drop = min(
        [await run_round(client, app, args.streams, args.tokens) for _ in range(args.rounds)], key=lambda one: one[0]
    )
    found = {
        "us_per_token": round(least / args.streams / args.tokens * 1e6, 2),
        "writes_per_token": round(drop.num_writes / args.tokens, 2),
        "bytes_per_token": round(drop.num_bytes / args.tokens),
    }
    if not args.profile:
        return found, None
    profile = cProfile.Profile()
    profile.enable()
    await run_round(client, app, args.streams, args.tokens)
    profile.disable()
    return found, profile


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="a directory with tokenizer.json")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found, profile = runner.run(measure(args))
    print(json.dumps(found) if args.json else "  ".join(f"{key} {value}" for key, value in found.items()))
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(32)


if __name__ == "__main__":
    main()
