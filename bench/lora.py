"""What adapters cost on a CPU, against the fastest path of the base alone.

    python bench/lora.py --json

Three engines with the demo model decode the same rows, a few steps each in turn: one without adapters, one with adapters
enabled that nobody uses, and one whose rows are spread over adapters, for several numbers of adapters and ranks. Printed
are medians of the time of a step, and of the ratio to the base's steps beside it. `--plot FILE` draws the cost against the
number of adapters and the rank (needs matplotlib).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from enginectl import Engine, SamplingParams
from enginectl.interfaces.model import LinearSite

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


def start_rows(engine: Engine, num_rows: int, num_steps: int, names: Sequence[str | None]) -> None:
    """Rows that decode, adapters in turn."""
    params = SamplingParams(temperature=0.0, max_tokens=num_steps + 64, ignore_eos=True)
    random = np.random.default_rng(0)
    for i in range(num_rows):
        prompt = random.integers(100, 40_000, PROMPT_LEN).tolist()
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
        lora = {"enable_lora": True, "max_loras": num_adapters, "max_lora_rank": rank}
        lora["plugin_options"] = {"sgmv": {"roots": [directory]}}
        with (
            Engine(args.model, **common) as base,
            Engine(args.model, **common, **lora) as unused,
            Engine(args.model, **common, **lora) as used,
        ):
            sites = used._assembled.parts["adapter"].sites
            names = [f"a{i}" for i in range(num_adapters)]
            for i, name in enumerate(names):
                used.load_adapter(name, str(write_adapter(Path(directory) / name, sites, rank, i)))
            steps = args.rounds * args.steps
            engines = {"base": base, "enabled, unused": unused, "used": used}
            for name, engine in engines.items():
                start_rows(engine, args.rows, steps, names if name == "used" else [None])
            found = compare(engines, args.rounds, args.steps)
            table = [row[1] for row in base.info.table if row[0] in ("model_family", "op_set", "attention")]
    return {"adapters": num_adapters, "rank": rank, "rows": args.rows, "base_path": table, **found}


def plot(found: Sequence[dict[str, Any]], file: str) -> None:
    """Share of the base's throughput against the number of adapters, a line a rank."""
    from matplotlib import pyplot as plt  # type: ignore[import-not-found]

    for rank in sorted({one["rank"] for one in found}):
        own = [one for one in found if one["rank"] == rank]
        plt.plot(
            [one["adapters"] for one in own],
            [one["used"]["throughput_of_base"] for one in own],
            marker="o",
            label=f"rank {rank}",
        )
    plt.xlabel("adapters among the rows")
    plt.ylabel("throughput, base alone = 1")
    plt.ylim(0, 1.05)
    plt.legend()
    plt.savefig(file)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", default=os.environ.get("ENGINECTL_DEMO_MODEL") or str(DEMO_MODEL))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--adapters", type=int, nargs="+", default=[8])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="steps of each engine in a round")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--plot", metavar="FILE", help="draw the cost")
    args = parser.parse_args()
    found = [measure(args, adapters, rank) for rank in args.ranks for adapters in args.adapters]
    if args.plot:
        plot(found, args.plot)
    if args.json:
        print(json.dumps({"model": Path(args.model).name, "measurements": found}))
        return
    for one in found:
        print(f"{one['rows']} rows, {one['adapters']} adapters of rank {one['rank']}, base path {one['base_path']}")
        for name in ("base", "enabled, unused", "used"):
            own = one[name]
            print(f"  {name:<16} {own['step_ms']:8.2f} ms a step, {own['throughput_of_base']:.0%} of the base")


if __name__ == "__main__":
    main()
