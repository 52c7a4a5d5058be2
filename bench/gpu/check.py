"""Check and time everything that needs a GPU, on a machine with one GPU and no network.

    python bench/gpu/check.py --out results/              all sections, those already there left out
    python bench/gpu/check.py --out results/ --sections kernels,rooflines --again
    python bench/gpu/check.py --out dry --dry-run    every section's host side, on a CPU

Each section runs in a process of its own, so that a fault in one leaves the others, and writes OUT/SECTION.json. The
table over all of them comes last and is written to OUT/table.md. How to prepare the folders: README.md beside this file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SECTIONS: dict[str, int] = {
    "environment": 30,
    "kernels": 75,
    "greedy": 60,
    "rooflines": 45,
    "steps": 120,
    "graphs": 60,
    "host_gap": 45,
    "memory": 60,
    "sampling": 45,
    "lora": 60,
    "speculation": 45,
    "conformance": 120,
    "sanitizer": 60,
}
"""Section to the most seconds it may take, the more important first. `--budget` bounds all of them together."""

MIN_SECTION_S = 20
"""Less is not worth a start."""


def environment(bench: Any) -> None:
    """What is under test."""
    import torch

    from enginectl.machine import detect_machine

    machine = detect_machine()
    bench.add(
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        python=platform.python_version(),
        gpu=machine.gpus[0].name if machine.gpus else "none",
        versions={name: v for name, v in machine.versions.items() if name in ("torch", "triton", "flashinfer-python")},
    )
    if not bench.dry_run:
        found = torch.cuda.get_device_properties(0)
        bench.add(
            capability=f"{found.major}.{found.minor}",
            multiprocessors=found.multi_processor_count,
            memory_gib=str(found.total_memory >> 30),
        )


def run_section(name: str, *, dry_run: bool, small: bool, target: Path | None) -> int:
    """In this process. Status 1 if something in it was wrong."""
    if dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    sys.path.insert(0, str(HERE))
    import correctness
    import overheads
    import speed
    from harness import Bench

    run: Callable[[Bench], None] | None = {"environment": environment}.get(name)
    run = run or next(getattr(part, name) for part in (correctness, speed, overheads) if hasattr(part, name))
    partial = None if target is None else target.with_suffix(".partial")
    bench = Bench(dry_run=dry_run, small=small, partial=partial)
    start = time.monotonic()
    run(bench)
    ok = all(row.get("ok", True) for row in bench.rows)
    if target is not None:
        seconds = round(time.monotonic() - start, 1)
        write_result(target, name, dry_run=dry_run, ok=ok, seconds=seconds, rows=bench.rows)
    return 0 if ok else 1


def write_result(target: Path, name: str, **fields: Any) -> None:
    """One section's JSON; its partial rows are not needed any more."""
    target.write_text(json.dumps({"section": name, **fields}, indent=1) + "\n")
    target.with_suffix(".partial").unlink(missing_ok=True)


def rows_so_far(target: Path) -> list[dict[str, Any]]:
    """What a section that did not end has found."""
    partial = target.with_suffix(".partial")
    return [json.loads(line) for line in partial.read_text().splitlines()] if partial.exists() else []


def start_section(name: str, args: argparse.Namespace, environ: dict[str, str], left_s: float) -> None:
    """In a process of its own, unless its result is there, or too little of the budget is left to start it."""
    target = args.out / f"{name}.json"
    if target.exists() and not args.again:
        return
    if left_s < min(SECTIONS[name], MIN_SECTION_S):
        print(f"== {name}: left out, the budget is used up; run again with the same --out", flush=True)
        return
    for earlier in (target, target.with_suffix(".partial")):
        earlier.unlink(missing_ok=True)
    print(f"== {name}", flush=True)
    command = [sys.executable, str(HERE / "check.py"), "--run", name, "--target", str(target)]
    command += ["--dry-run"] if args.dry_run else []
    try:
        most = min(SECTIONS[name] * args.patience, left_s)
        status = subprocess.run(command, env=environ, timeout=most, check=False).returncode
    except subprocess.TimeoutExpired:
        status = -1
    if not target.exists():
        why = "took too long" if status == -1 else f"ended with status {status}"
        write_result(target, name, dry_run=args.dry_run, ok=False, error=why, rows=rows_so_far(target))


def packages(args: argparse.Namespace) -> dict[str, str]:
    """The environment of the sections: extra wheels on the path, prebuilt FlashInfer modules in their place."""
    environ = dict(os.environ)
    if args.wheels is None:
        return environ
    target = Path(tempfile.gettempdir()) / "enginectl-gpu-packages"
    wheels = sorted(str(path) for path in args.wheels.glob("*.whl"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
    subprocess.run([*command, "--target", str(target), *wheels], check=True)
    if args.flashinfer_modules is not None:
        shutil.copytree(args.flashinfer_modules, target / "flashinfer" / "data" / "aot", dirs_exist_ok=True)
        environ["FLASHINFER_DISABLE_JIT"] = "1"
    environ["PYTHONPATH"] = os.pathsep.join([str(target), *filter(None, [environ.get("PYTHONPATH")])])
    return environ


def table(out: Path) -> str:
    """All results, a Markdown table a section."""
    parts = []
    for name in SECTIONS:
        path = out / f"{name}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        state = "ok" if result["ok"] else result.get("error", "WRONG")
        dry = ", dry run: nothing was measured" if result["dry_run"] else ""
        parts.append(f"## {name}: {state}{dry}\n")
        columns = list(dict.fromkeys(key for row in result["rows"] for key in row))
        if columns:
            lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
            lines += ["| " + " | ".join(cell(row.get(key)) for key in columns) + " |" for row in result["rows"]]
            parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def cell(value: object) -> str:
    """Short."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value).replace("|", "/").replace("\n", " ")


def main() -> int:
    """Run the sections, print the table. Status 1 if any result is wrong or missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--again", action="store_true", help="run sections whose results are there too")
    parser.add_argument("--dry-run", action="store_true", help="the host side only, on a CPU; measures nothing")
    parser.add_argument("--budget", type=float, default=480, help="seconds for all sections together")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies the time each section may take")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to use besides what is installed")
    parser.add_argument("--flashinfer-modules", type=Path, help="folder of prebuilt modules, NAME/NAME.so")
    parser.add_argument("--run", choices=list(SECTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--target", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        return run_section(args.run, dry_run=args.dry_run, small=args.small, target=args.target)
    names = args.sections.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"no section named {', '.join(unknown)}; sections: {', '.join(SECTIONS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    environ, start = packages(args), time.monotonic()
    for name in names:
        start_section(name, args, environ, args.budget * args.patience - (time.monotonic() - start))
    text = table(args.out)
    (args.out / "table.md").write_text(text)
    print(text)
    return 0 if all(succeeded(args.out / f"{name}.json") for name in names) else 1


def succeeded(result: Path) -> bool:
    """It was written, and nothing in it was wrong."""
    return result.exists() and bool(json.loads(result.read_text())["ok"])


if __name__ == "__main__":
    sys.exit(main())
