"""Twenty minutes of trouble: the engine is killed every 30 s while clients check, leave, send garbage and read slowly.

    python bench/soak.py [--minutes 20] [--model DIR] [--json]

Without --model, a tiny random Llama is made. Its weights are wide, so that a wrong block or position changes tokens; the
reference is `generate` of transformers. It must hold, else the exit status is 1:

- no client waits longer than 90 s, none is cut off without an error, the server comes back after every kill;
- every finished greedy answer equals the reference, every seeded one its first;
- garbage is never answered with an internal error;
- memory of the HTTP process, and of each engine at its end, is flat;
- no process is left when the server is stopped, nor when it is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from server_process import ServerProcess, log_directory, start_ours
from soak_clients import CLIENTS, HANG_S, Record, Soak

from enginectl.loadtest.client import Client
from enginectl.loadtest.run import loop_factory
from enginectl.loadtest.target import parse_target

OPTIONS = ("--max-num-seqs", "16", "--max-model-len", "2048", "--block-size", "16", "--num-gpu-blocks-override", "256")
"""A pool that 16 long answers overfill: preemption is part of the trouble."""

NUM_PROMPTS, NUM_NEW = 24, 96
_BACK_S = 60.0
_ORPHAN_S = 5.0
_GROWTH, _GROWTH_BYTES = 0.10, 24 << 20
"""Memory is flat when the last fifth's median is above the second fifth's by no more than the larger of the two."""


@dataclass
class Watch:
    """What is seen from outside. engines: pid to the most memory it held."""

    rss: list[int] = field(default_factory=list)
    engines: dict[int, int] = field(default_factory=dict)
    back_s: list[float] = field(default_factory=list)


def reference(directory: str, seed: int) -> list[tuple[list[int], list[int]]]:
    """Random prompts and their greedy continuations by transformers, in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    draw, last = random.Random(seed), min(model.config.vocab_size, 250)
    prompts = [[draw.randrange(3, last) for _ in range(draw.choice((1, 5, 17, 64, 200)))] for _ in range(NUM_PROMPTS)]
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_NEW)
        found.append((prompt, out[0, len(prompt) :].tolist()))
    return found


def tiny_model(directory: Path) -> str:
    """The model of the soak."""
    from enginectl.testing.tiny_models import save_tiny_model

    return str(save_tiny_model("llama", directory, num_hidden_layers=2, max_position_embeddings=4096))


def engine_of(server: ServerProcess) -> psutil.Process | None:
    """The engine's process, if there is one now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(server.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "enginectl.engine.process" in child.cmdline():
                    return child
    return None


async def watch(server: ServerProcess, soak: Soak, seen: Watch) -> None:
    """Memory of both processes, every second."""
    api = psutil.Process(server.process.pid)
    while not soak.is_over:
        with contextlib.suppress(psutil.NoSuchProcess):
            seen.rss.append(api.memory_info().rss)
        engine = engine_of(server)
        if engine is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                seen.engines[engine.pid] = max(seen.engines.get(engine.pid, 0), engine.memory_info().rss)
        await asyncio.sleep(1.0)


async def kill(server: ServerProcess, soak: Soak, seen: Watch, every_s: float) -> None:
    """Kill the engine again and again, each time once it serves."""
    while time.monotonic() + every_s < soak.until_s:
        await asyncio.sleep(every_s)
        engine = engine_of(server)
        if engine is None:
            soak.record.fail("there was no engine to kill")
            continue
        engine.kill()
        begin = time.monotonic()
        await asyncio.sleep(0.05)
        while not await asyncio.to_thread(server.is_healthy):
            if time.monotonic() - begin > _BACK_S:
                soak.record.fail(f"the server did not come back within {_BACK_S:g} s of kill {len(seen.back_s) + 1}")
                soak.until_s = time.monotonic()
                return
            await asyncio.sleep(0.05)
        seen.back_s.append(time.monotonic() - begin)


async def trouble(server: ServerProcess, answers: Any, args: argparse.Namespace, record: Record) -> Watch:
    """All of it at once, until the time is over and every client has its answer."""
    client = Client(parse_target(server.url), timeout_s=HANG_S)
    soak = Soak(client, answers, record, time.monotonic() + args.minutes * 60, random.Random(args.seed))
    seen = Watch()
    tasks = [asyncio.create_task(run(soak), name=run.__name__) for run, count in CLIENTS for _ in range(count)]
    tasks += [
        asyncio.create_task(watch(server, soak, seen)),
        asyncio.create_task(kill(server, soak, seen, args.kill_s)),
    ]
    done, waiting = await asyncio.wait(tasks, timeout=args.minutes * 60 + HANG_S + _BACK_S)
    for task in waiting:
        record.fail(f"{task.get_name()} hangs")
        task.cancel()
    for task in done:
        if (error := task.exception()) is not None:
            record.fail(f"{task.get_name()}: {type(error).__name__}: {error}")
    await client.close()
    return seen


def check_memory(seen: Watch, record: Record) -> dict[str, float]:
    """Whether it is flat; in MiB, what was compared."""
    found = {}
    engines = list(seen.engines.values())[:-1]  # the last was not there to its end
    for name, values in (("http", seen.rss), ("engine", engines)):
        size = max(1, len(values) // 5)
        if len(values) < 2 * size + 1:
            continue
        early, late = statistics.median(values[size : 2 * size]), statistics.median(values[-size:])
        if late - early > max(_GROWTH * early, _GROWTH_BYTES):
            record.fail(f"memory of the {name} process grew from {early / 2**20:.0f} to {late / 2**20:.0f} MiB")
        found |= {f"{name} early MiB": early / 2**20, f"{name} late MiB": late / 2**20}
    return found


def check_orphans(pids: list[int], record: Record, when: str) -> None:
    """None of the processes may be there after a moment."""
    deadline = time.monotonic() + _ORPHAN_S
    left = pids
    while (left := [pid for pid in left if _is_engine(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        record.fail(f"{len(left)} engine processes are left after the server was {when}: {left}")


def _is_engine(pid: int) -> bool:
    """Numbers are used again, so its command line has to be the engine's."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and "enginectl.engine.process" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def soak(args: argparse.Namespace) -> dict[str, Any]:
    """Everything; what was found."""
    logs, record = log_directory(), Record()
    print(f"log of the server: {logs}", file=sys.stderr)
    model = args.model or tiny_model(logs / "model")
    answers = reference(model, args.seed)
    options = [*OPTIONS, "--dtype", "float32"]
    server = start_ours(model, options, logs / "soak.log", threads=1)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            seen = runner.run(trouble(server, answers, args, record))
    finally:
        status = server.stop()
    if status != 0:
        record.fail(f"the server ended with status {status} when it was asked to end")
    check_orphans(list(seen.engines), record, "stopped")
    server = start_ours(model, options, logs / "killed.log", threads=1)
    engine = engine_of(server)
    assert engine is not None, "a server that serves has an engine"
    server.process.kill()
    check_orphans([engine.pid], record, "killed")
    server.stop()
    if seen.back_s and not record.counts["greedy: finished"]:
        record.fail("no greedy answer was finished, so nothing was checked")
    return {
        "minutes": args.minutes,
        "kills": len(seen.back_s),
        "back_s": {"median": statistics.median(seen.back_s), "most": max(seen.back_s)} if seen.back_s else None,
        "memory": check_memory(seen, record),
        "counts": dict(sorted(record.counts.items())),
        "failures": record.failures,
    }


def main() -> int:
    """Soak and print; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--kill-s", type=float, default=30.0, help="seconds between kills")
    parser.add_argument("--model", metavar="DIR", help="default: a tiny random model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = soak(args)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            if isinstance(value, dict):
                value = "".join(f"\n  {key:36} {one:,.1f}" for key, one in value.items())
            elif isinstance(value, list):
                value = "".join(f"\n  {one}" for one in value) or "none"
            print(f"{name}: {value}")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
