"""What adapters cost on a CPU, against the fastest path of the base alone.

    python bench/lora.py --json

Engines decode the same rows, a few steps each in turn, so that each round gives a ratio ("paired"); printed are medians.

used: the demo model without adapters, with adapters enabled that nobody uses, and with rows spread over adapters, for
several numbers of adapters and ranks. `--plot FILE` draws these as SVG. host: the same for a model so small that the
host's work shows, in microseconds a step that enabling adapters adds while nobody uses one. loading: steps of running rows
while other adapters are loaded, replaced and take slots: the longest, and what the copy to a slot takes of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from enginectl import Engine, SamplingParams
from enginectl.engine.control import ControlDesk, NotYet
from enginectl.interfaces.model import LinearSite
from enginectl.testing.tiny_models import save_tiny_model

DEMO_MODEL = Path(__file__).resolve().parents[1] / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT_LEN = 32


def write_adapter(directory: Path, sites: Sequence[LinearSite], rank: int, seed: int) -> Path:
    """A random adapter on every linear."""
    random = torch.Generator().manual_seed(seed)
    tensors, modules = {}, set[str]()
    for site in sites:
        for module, out_size in zip(site.modules, site.out_sizes, strict=True):
            modules.add(module.rpartition(".")[2])
            for side, shape in (("A", (rank, site.in_size)), ("B", (out_size, rank))):
                name = f"base_model.model.{module}.lora_{side}.weight"
                tensors[name] = torch.randn(shape, generator=random) * 0.02
    directory.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(modules)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def start_rows(
    engine: Engine, num_rows: int, num_steps: int, names: Sequence[str | None], *, vocab_size: int = 40_000
) -> None:
    """Rows that decode, adapters in turn."""
    params = SamplingParams(temperature=0.0, max_tokens=num_steps + 64, ignore_eos=True)
    random = np.random.default_rng(0)
    for i in range(num_rows):
        prompt = random.integers(100, vocab_size, PROMPT_LEN).tolist()
        engine._submit(engine._requests([prompt], params, {"adapter": names[i % len(names)]}))
    while engine.stats().num_waiting or engine.stats().step_tokens != num_rows:
        engine._step()


def steps_s(engine: Engine, count: int) -> list[float]:
    """Seconds of each of the next steps."""
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        engine._step()
        found.append(time.perf_counter() - begin)
    return found


def compare(engines: dict[str, Engine], rounds: int, count: int) -> dict[str, dict[str, float]]:
    """Medians of each engine's steps, and of its ratio to the first one's in the same round."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            times[name].append(statistics.median(steps_s(engine, count)))
    base = times[next(iter(times))]
    return {
        name: {
            "step_ms": round(statistics.median(own) * 1e3, 3),
            "throughput_of_base": round(statistics.median(b / t for b, t in zip(base, own, strict=True)), 3),
            "added_us": round(statistics.median(t - b for b, t in zip(base, own, strict=True)) * 1e6, 1),
        }
        for name, own in times.items()
    }


def measure(args: argparse.Namespace, num_adapters: int, rank: int) -> dict[str, Any]:
    """The three engines at one number of adapters and one rank."""
    common: dict[str, Any] = {"max_num_seqs": args.rows, "max_model_len": 1024, "num_threads": args.threads}
    common |= {"enable_prefix_caching": False, "kv_cache_memory_bytes": "512MiB"}
    with tempfile.TemporaryDirectory() as directory:
        lora: dict[str, Any] = {"enable_lora": True, "max_loras": num_adapters, "max_lora_rank": rank}
        lora["plugin_options"] = {"sgmv": {"roots": [directory]}}
        with (
            Engine(args.model, **common) as base,
            Engine(args.model, **common, **lora) as unused,
            Engine(args.model, **common, **lora) as used,
        ):
            sites = used._assembled.parts["adapter"].sites
            names = [f"a{i}" for i in range(num_adapters)]
            path = str(write_adapter(Path(directory) / "adapter", sites, rank, 0))
            for name in names:  # equal weights in slots of their own cost what others would
                used.load_adapter(name, path)
            steps = args.rounds * args.steps
            engines = {"base": base, "enabled, unused": unused, "used": used}
            for name, engine in engines.items():
                start_rows(engine, args.rows, steps, names if name == "used" else [None])
            found = compare(engines, args.rounds, args.steps)
            table = [row[1] for row in base.info.table if row[0] in ("model_family", "op_set", "attention")]
    return {"adapters": num_adapters, "rank": rank, "rows": args.rows, "base_path": table, **found}


def host_cost(rounds: int, count: int) -> dict[str, Any]:
    """Enabled and unused against not enabled, with a model of one layer."""
    common: dict[str, Any] = {"max_num_seqs": 32, "max_model_len": 16 * rounds * count, "num_threads": 1}
    common |= {"enable_prefix_caching": False, "kv_cache_memory_bytes": "256MiB"}
    with tempfile.TemporaryDirectory() as directory:
        changes: dict[str, Any] = {"num_hidden_layers": 1, "max_position_embeddings": 16 * rounds * count}
        model = str(save_tiny_model("llama", Path(directory) / "tiny", **changes))
        with Engine(model, **common) as base, Engine(model, **common, enable_lora=True) as unused:
            engines = {"base": base, "enabled, unused": unused}
            for engine in engines.values():
                start_rows(engine, 32, 2 * rounds * count, [None], vocab_size=250)
            found = compare(engines, rounds, count)
    return {"rows": 32, **found}


def loading(args: argparse.Namespace, num_adapters: int, rank: int, num_slots: int = 4) -> dict[str, Any]:
    """Rows decode with one adapter while others are loaded, half of them twice, and each is asked once."""
    options: dict[str, Any] = {"max_num_seqs": args.rows, "max_model_len": 1024, "num_threads": args.threads}
    options |= {"kv_cache_memory_bytes": "512MiB", "enable_lora": True, "max_loras": num_slots, "max_lora_rank": rank}
    with tempfile.TemporaryDirectory() as directory:
        options["plugin_options"] = {"sgmv": {"roots": [directory]}}
        with Engine(args.model, **options) as engine:
            backend = engine._assembled.parts["adapter"]
            paths = [
                str(write_adapter(Path(directory) / str(i), backend.sites, rank, i)) for i in range(num_adapters + 1)
            ]
            engine.load_adapter("busy", paths[-1])
            start_rows(engine, args.rows - 1, 900, ["busy"])
            quiet = steps_s(engine, 60)
            fills = Timed(backend._fill)
            backend._fill = fills
            busy: list[float] = []
            desk = ControlDesk(engine._assembled)
            for i in range(num_adapters):
                for replace in (False, True)[: 1 + i % 2]:
                    busy += load_beside(engine, desk, {"name": f"a{i}", "path": paths[i], "replace": replace})
                (ticket,) = engine._submit(
                    engine._requests([[5, 6]], SamplingParams(temperature=0.0, max_tokens=2), {"adapter": f"a{i}"})
                )
                while not ticket.is_done:
                    busy += steps_s(engine, 1)
    return {
        "adapters": num_adapters,
        "slots": num_slots,
        "rank": rank,
        "rows": args.rows - 1,
        "quiet_step_ms": milliseconds(quiet),
        "step_ms_while_loading": milliseconds(busy),
        "copy_to_slot_ms": milliseconds(fills.seconds),
    }


class Timed:
    """A function, and how long each call took."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds: list[float] = []

    def __call__(self, *arguments: Any) -> Any:
        begin = time.perf_counter()
        result = self._function(*arguments)
        self.seconds.append(time.perf_counter() - begin)
        return result


def load_beside(engine: Engine, desk: ControlDesk, arguments: dict[str, Any]) -> list[float]:
    """Steps until the adapter is there, the control message counted with its step."""
    found = []
    while True:
        begin, is_loaded = time.perf_counter(), True
        try:
            desk.handle("load_adapter", arguments)
        except NotYet:
            is_loaded = False
        engine._step()
        found.append(time.perf_counter() - begin)
        if is_loaded:
            return found


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Of so many calls."""
    ordered = sorted(seconds)
    quantiles = {"median": statistics.median(seconds), "p90": ordered[len(ordered) * 9 // 10], "max": ordered[-1]}
    return {"count": len(seconds)} | {name: round(value * 1e3, 2) for name, value in quantiles.items()}


def svg(found: Sequence[dict[str, Any]]) -> str:
    """Share of the base's throughput against the number of adapters, a line a rank."""
    colors = ("#06c", "#c60", "#090", "#906")
    left, top, width, height = 60, 30, 380, 260
    counts = sorted({one["adapters"] for one in found})
    widest = math.log(counts[-1] / counts[0]) or 1.0

    def place(one: dict[str, Any]) -> tuple[float, float]:
        across = math.log(one["adapters"] / counts[0]) / widest
        return left + width * across, top + height * (1 - one["used"]["throughput_of_base"] / 1.05)

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="560" height="340" font-family="sans-serif" font-size="12">',
        f'<text x="{left}" y="20">throughput, base alone = 1, by adapters among {found[0]["rows"]} rows</text>',
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#999"/>',
    ]
    for share in (0.25, 0.5, 0.75, 1.0):
        y = top + height * (1 - share / 1.05)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 34}" y="{y + 4:.1f}">{share:.2f}</text>')
    for color, rank in zip(itertools.cycle(colors), sorted({one["rank"] for one in found}), strict=False):
        own = sorted((one for one in found if one["rank"] == rank), key=lambda one: one["adapters"])
        points = [place(one) for one in own]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
        parts.append(f'<text x="{left + width + 8}" y="{points[-1][1] + 4:.1f}" fill="{color}">rank {rank}</text>')
    for count in counts:
        parts.append(
            f'<text x="{left + width * math.log(count / counts[0]) / widest - 4:.0f}" y="{top + height + 16}">{count}</text>'
        )
    return "\n".join([*parts, "</svg>"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", default=os.environ.get("ENGINECTL_DEMO_MODEL") or str(DEMO_MODEL))
    parser.add_argument("--parts", nargs="+", default=["used", "host", "loading"], choices=["used", "host", "loading"])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--adapters", type=int, nargs="+", default=[8])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="steps of each engine in a round")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--loads", type=int, default=40, help="adapters of the part loading")
    parser.add_argument("--plot", type=Path, help="write an SVG of the part used here")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    if "used" in args.parts:
        found["used"] = [measure(args, adapters, rank) for rank in args.ranks for adapters in args.adapters]
        if args.plot:
            args.plot.write_text(svg(found["used"]))
    if "host" in args.parts:
        found["host"] = [host_cost(args.rounds * 4, args.steps * 4)]
    if "loading" in args.parts:
        found["loading"] = [loading(args, args.loads, rank) for rank in args.ranks]
    if args.json:
        print(json.dumps({"model": Path(args.model).name, **found}, indent=2))
        return
    for part, rows in found.items():
        for row in rows:
            print(part, json.dumps(row))


if __name__ == "__main__":
    main()
