"""Fixtures of the end-to-end tests: real models on disk, and real server processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
ENGINECTL = str(Path(sys.executable).with_name("enginectl"))
DEMO_MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
START_S = 60.0


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The GGUF file of the demo model; skips where it is absent, and fails instead under CI=true."""
    path = Path(os.environ.get("ENGINECTL_DEMO_MODEL") or DEMO_MODEL)
    if path.is_file():
        return path
    reason = f"no demo model at {path}; fetch it with scripts/bootstrap.sh, or set ENGINECTL_DEMO_MODEL"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a long context, so that a request can run for seconds."""
    from enginectl.testing.tiny_models import save_tiny_model

    directory = tmp_path_factory.mktemp("models") / "tiny"
    return save_tiny_model("llama", directory, num_hidden_layers=2, max_position_embeddings=8192)


def environment(**more: str) -> dict[str, str]:
    """This process's environment without settings of the engine, and with `more`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ENGINECTL_")}
    return {**kept, "NO_COLOR": "1", "COLUMNS": "200", **more}


class ServerProcess:
    """`enginectl serve` on a free port."""

    def __init__(self, *arguments: str, env: Mapping[str, str]) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [ENGINECTL, "serve", *arguments, "--host", "127.0.0.1", "--port", "0", "--num-threads", "1"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(env),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.lines.append(line.rstrip())

    @property
    def log(self) -> str:
        """What it wrote so far."""
        return "\n".join(self.lines)

    def wait_for_line(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        """The first line of its log that matches."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match
            if self.process.poll() is not None:
                self._reader.join(5)
                pytest.fail(f"the server ended with status {self.process.returncode}:\n{self.log}")
            time.sleep(0.02)
        pytest.fail(f"no line {pattern!r} in {timeout_s} s:\n{self.log}")

    @property
    def url(self) -> str:
        """Where it listens; waits until it does."""
        return self.wait_for_line(r"serving on (http://\S+)").group(1)

    def engine(self) -> psutil.Process:
        """The engine process."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def signal(self, number: int) -> None:
        """Send a signal to the API process."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """Its exit status; fails the test if it does not end in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the server did not end in {timeout_s} s:\n{self.log}")

    def health(self) -> tuple[int, dict[str, Any]]:
        """Status and body of GET /health."""
        answer = httpx.get(f"{self.url}/health")
        return answer.status_code, answer.json()

    def stats(self) -> dict[str, Any]:
        """The engine's statistics."""
        stats: dict[str, Any] = httpx.get(f"{self.url}/server_info").json()["stats"]
        return stats

    def stop(self) -> None:
        """End it and all it started, whatever its state."""
        processes = [psutil.Process(self.process.pid)] if self.process.poll() is None else []
        for process in processes:
            processes += process.children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)
        for process in processes:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()


Serve = Callable[..., ServerProcess]


def serving(**defaults: str) -> Iterator[Serve]:
    """A function that starts servers; they end with the generator."""
    servers: list[ServerProcess] = []

    def serve(*arguments: str, env: Mapping[str, str] | None = None) -> ServerProcess:
        server = ServerProcess(*arguments, env=environment(**{**defaults, **(env or {})}))
        servers.append(server)
        return server

    try:
        yield serve
    finally:
        for server in servers:
            server.stop()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(*arguments, env=…)`: starts a server that ends with the test."""
    yield from serving()


@pytest.fixture(scope="module")
def serve_module() -> Iterator[Serve]:
    """The same, for servers that a module shares."""
    yield from serving()


@pytest.fixture(scope="session")
def enginectl() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`enginectl(*arguments, env=…)`: runs the command line to its end."""

    def run(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ENGINECTL, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment(**(env or {})),
            timeout=120,
        )

    return run
