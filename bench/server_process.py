"""Servers as processes: ours, and a peer's, on a free port, until they are stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_POLL_S = 0.1
_STOP_S = 20.0


class ServerProcess:
    """A server, ready to answer once made. log: the file it writes to. start_s: how long it took to answer."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str], *, port: int, timeout_s: float
    ) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        begin = time.monotonic()
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=dict(env), start_new_session=True
            )
        try:
            self._wait(timeout_s)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - begin

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.is_healthy():
            status = self.process.poll()
            if status is not None or time.monotonic() > deadline:
                why = f"ended with status {status}" if status is not None else f"does not answer after {timeout_s:g} s"
                tail = self.log.read_text(errors="replace")[-3000:]
                raise SystemExit(f"{self.name} {why}; the end of {self.log}:\n{tail}")
            time.sleep(_POLL_S)

    def is_healthy(self, timeout_s: float = 5.0) -> bool:
        """Whether /health says that it serves."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=timeout_s) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    @contextlib.contextmanager
    def alone(self, others: Sequence[ServerProcess]) -> Iterator[None]:
        """Stop the others for a while (SIGSTOP): some of them spin while they wait, which costs whoever is measured."""
        waiting = [other for other in others if other is not self]
        for other in waiting:
            os.killpg(other.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for other in waiting:
                os.killpg(other.process.pid, signal.SIGCONT)

    def stop(self, timeout_s: float = _STOP_S) -> int:
        """Ask it to end, make it end, and whatever it started in its session with it. Returns its exit status."""
        return end_session(self.process, timeout_s)


def end_session(process: subprocess.Popen[Any], timeout_s: float = _STOP_S) -> int:
    """Ask a process that leads a session to end, make it end, and whatever it started there. Returns its exit status."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def stop_on_signals() -> None:
    """SIGTERM ends this process as an exception does, so that `finally` and exit stacks stop what it started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def start_ours(
    model: str, options: Sequence[str], log: Path, *, threads: int, timeout_s: float = 300.0
) -> ServerProcess:
    """`enginectl serve` of this interpreter's environment."""
    port = free_port()
    program = "import sys; from enginectl.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--num-threads", str(threads), *options]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ENGINECTL_")}
    env = {**kept, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "NO_COLOR": "1"}
    return ServerProcess("enginectl", command, log, env, port=port, timeout_s=timeout_s)


def start_vllm(
    python: str, model: str, options: Sequence[str], log: Path, *, threads: int, timeout_s: float = 600.0
) -> ServerProcess:
    """vLLM's OpenAI server of another environment, bound to the first `threads` cores."""
    port = free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1"]
    command += ["--port", str(port), *options]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
        "HF_HUB_OFFLINE": "1",
    }
    env.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    if (metadata := _vllm_metadata(python, log.parent)) is not None:
        env["PYTHONPATH"] = os.pathsep.join(part for part in (str(metadata), env.get("PYTHONPATH")) if part)
    return ServerProcess("vllm", command, log, env, port=port, timeout_s=timeout_s)


def _vllm_metadata(python: str, directory: Path) -> Path | None:
    """A folder that tells the CPU build's server which version it is: its wheel has another name than it asks for."""
    program = (
        "import importlib.metadata as m\n"
        "names = {d.metadata['Name'].lower(): d.version for d in m.distributions() if d.metadata['Name']}\n"
        "print('' if 'vllm' in names else names.get('vllm-cpu', 'none'))"
    )
    found = subprocess.run([python, "-c", program], capture_output=True, text=True)
    version = found.stdout.strip()
    if found.returncode or version == "none":
        raise SystemExit(
            f"{python} has no vLLM: {found.stderr.strip()[-300:] or 'neither vllm nor vllm-cpu is installed'}"
        )
    if not version:
        return None
    version = f"{version.partition('+')[0]}+cpu"
    folder = directory / "metadata"
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder


def log_directory() -> Path:
    """Where logs go: $BENCH_LOGS, or a new temporary directory."""
    given = os.environ.get("BENCH_LOGS")
    return Path(given) if given else Path(tempfile.mkdtemp(prefix="enginectl-bench-"))
