"""Seconds from starting `enginectl serve` to the first streamed token, and where they go.

    python bench/startup.py [--model MODEL] [--tiny DIR] [--rounds 3] --json

MODEL is a model's directory or GGUF file, by default the demo model; DIR one of `bench/tiny_model.py`. Each round has a
first start, whose caches (built kernels, dequantised weights, converted tokenizer) are a new empty directory, and a
second one that finds them. The files themselves have been read before: the disk is not measured. Figures are medians.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from server_process import end_session, free_port, stop_on_signals

DEMO_MODEL = Path(__file__).resolve().parents[1] / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
STAGES = {
    "importing torch": "API process up, engine process started",
    "opening": "import torch",
    "loading weights": "open the model, plugins",
    "sizing": "kernels, weights",
    "allocating": "other parts",
    "serving on": "KV pool, tokenizer, routes",
}
"""What a line of the log holds, and what was done by then since the line before."""
_TIMEOUT_S = 300.0
_POLL_S = 0.01


def start_once(model: str, cache: str, options: list[str]) -> dict[str, float]:
    """Seconds of each stage, and `total`, of one start with this directory for caches."""
    port = free_port()
    program = "import sys; from enginectl.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "serve", model, "--host", "127.0.0.1", "--port", str(port), *options]
    env = {**os.environ, "XDG_CACHE_HOME": cache, "NO_COLOR": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling our own modules is not part of a start
    lines: list[tuple[float, str]] = []
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    )
    try:
        reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
        reader.start()
        _first_token(process, port, model, lines)
        total = time.perf_counter() - begin
    finally:
        end_session(process)
    return {**_stages(lines, begin, begin + total), "total": total}


def _read(process: subprocess.Popen[str], lines: list[tuple[float, str]]) -> None:
    assert process.stderr is not None, "opened with a pipe"
    for line in process.stderr:
        lines.append((time.perf_counter(), line))


def _first_token(process: subprocess.Popen[str], port: int, model: str, lines: list[tuple[float, str]]) -> None:
    """Ask until the server accepts, and read the first event."""
    body = json.dumps({"model": model, "prompt": [5, 6, 7, 8], "max_tokens": 2, "stream": True, "ignore_eos": True})
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        # The socket listens before the model is loaded: a request sent early would wait in it, and measure the same.
        if not any("serving on" in line for _, line in lines):
            time.sleep(_POLL_S)
            continue
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        event = connection.getresponse().readline()
        if not event.startswith(b"data: {"):
            raise SystemExit(f"the server answered {event[:300]!r}")
        return
    tail = "".join(line for _, line in lines[-20:])
    raise SystemExit(f"the server gave no token (status {process.poll()}); the end of its log:\n{tail}")


def _stages(lines: list[tuple[float, str]], begin: float, end: float) -> dict[str, float]:
    found: dict[str, float] = {}
    last = begin
    for mark, stage in STAGES.items():
        at = next((at for at, line in lines if mark in line), None)
        if at is not None:
            found[stage], last = at - last, at
    return {**found, "first token": end - last}


def measure(model: str, rounds: int, options: list[str]) -> dict[str, dict[str, float]]:
    """Medians of first and second starts."""
    samples: dict[str, list[dict[str, float]]] = {"first start": [], "second start": []}
    for round_ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="enginectl-startup-") as cache:
            for name, found in samples.items():
                found.append(start_once(model, cache, options))
                print(f"round {round_ + 1}, {name}: {found[-1]['total']:.2f} s", file=sys.stderr, flush=True)
    return {
        name: {stage: round(statistics.median(one[stage] for one in found), 3) for stage in found[0]}
        for name, found in samples.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("ENGINECTL_DEMO_MODEL") or str(DEMO_MODEL))
    parser.add_argument("--tiny", metavar="DIR", help="measure this model too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--option", action="append", default=[], metavar="OPTION", help="one more word for `serve`")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    stop_on_signals()
    models = [args.model, *([args.tiny] if args.tiny else [])]
    found = {Path(model).name: measure(model, args.rounds, args.option) for model in models}
    if args.json:
        print(json.dumps(found))
        return
    for model, starts in found.items():
        for name, stages in starts.items():
            print(f"{model}, {name}")
            for stage, seconds in stages.items():
                print(f"  {stage:42s}{seconds:8.2f} s")


if __name__ == "__main__":
    main()
