"""Check and time everything that needs a GPU, on a machine with one GPU and no network.

    python bench/gpu/check.py --out results/              all sections, those that have ended before left out
    python bench/gpu/check.py --out results/ --sections kernels,rooflines --again
    python bench/gpu/check.py --out dry --dry-run    every section's host side, on a CPU

Each section runs in a process of its own, so that a fault in one leaves the others. What they find is gathered in
OUT/results.json as they end, their output in OUT/log.txt; the table over all of them, and whether each wanted figure was
met, come last and are written to OUT/table.md. How to prepare the folders: README.md beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from packages import environment_of, missing_message, missing_modules  # noqa: E402
from report import Results, table, wanted  # noqa: E402

SECTIONS: dict[str, int] = {
    "environment": 60,
    "kernels": 130,
    "greedy": 130,
    "first_start": 130,
    "rooflines": 50,
    "steps": 110,
    "graphs": 80,
    "host_gap": 60,
    "memory": 50,
    "conformance": 110,
    "lora": 50,
    "sampling": 45,
    "speculation": 45,
    "baseline": 60,
    "sanitizer": 80,
}
"""Section to the most seconds it may take, the more important first. `--budget` bounds all of them together."""

TOGETHER = ("kernels", "greedy", "first_start")
"""They measure nothing and mostly wait for compilers: they run at the same time."""

MIN_SECTION_S = 20
"""Less is not worth a start."""

PARTS = ("check", "correctness", "rooflines", "speed", "overheads", "warm_up")
"""Modules with sections, functions of their name."""


def environment(bench: Any) -> None:
    """What is under test. Everything else needs what is asked for here."""
    import torch

    from enginectl.machine import detect_machine
    from enginectl.plugins import PluginHost
    from enginectl.provider import Role

    machine = detect_machine()
    bench.add(
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        python=platform.python_version(),
        gpu=machine.gpus[0].name if machine.gpus else "none",
        versions={
            name: machine.versions.get(name) for name in ("torch", "triton", "flashinfer-python", "transformers")
        },
    )
    installed = PluginHost().catalogue[Role.ATTENTION]
    bench.add(attention=", ".join(installed), ok="triton" in installed and "torch" in installed)
    if bench.dry_run:
        return
    found = torch.cuda.get_device_properties(0)
    bench.add(
        capability=f"{found.major}.{found.minor}",
        multiprocessors=found.multi_processor_count,
        memory_gib=str(found.total_memory >> 30),
        driver=driver(),
        cores=machine.num_cores,
        ok=bool(machine.gpus),
    )


def driver() -> str:
    """Its version, clocks and power limit, as they are."""
    fields = "driver_version,clocks.sm,clocks.mem,power.limit"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


# -- in a section's process --------------------------------------------------------------------------------------------


def run_sections(names: Sequence[str], *, dry_run: bool, small: bool, out: Path | None) -> int:
    """One after another, in this process. Status 1 if something was wrong."""
    if dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    try:
        from harness import Bench, describe
    except Exception as error:  # said here, as the sections' own errors are
        for name in names if out is not None else ():
            line = json.dumps({"could_not_start": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]})
            rows_file(out, name).write_text(line + "\n")
        raise

    all_ok = True
    for name in names:
        bench = Bench(dry_run=dry_run, small=small, file=None if out is None else rows_file(out, name))
        print(f"== {name}", flush=True)
        start = time.monotonic()
        try:
            section(name)(bench)
        except Exception as error:
            traceback.print_exc()
            bench.add(error=describe(error), ok=False)
        bench.write({"ended_after_s": round(time.monotonic() - start, 1)})
        all_ok = all_ok and all(row.get("ok", True) for row in bench.rows)
    return 0 if all_ok else 1


def section(name: str) -> Callable[[Any], None]:
    """The function of this name."""
    if name == "environment":
        return environment
    modules = [import_module(part) for part in PARTS[1:]]
    found: Callable[[Any], None] = next(getattr(module, name) for module in modules if hasattr(module, name))
    return found


def rows_file(out: Path, name: str) -> Path:
    """Where a section's rows are until it has ended."""
    return out / f"{name}.rows"


# -- in the process that starts them -----------------------------------------------------------------------------------


class Run:
    """One call: what is there already, and what is added."""

    def __init__(self, args: argparse.Namespace, deadline: float) -> None:
        self.out: Path = args.out
        self.args = args
        self.deadline = deadline
        self.environ = environment_of(args.wheels, args.flashinfer_modules)
        self.file = self.out / "results.json"
        self.results: Results = json.loads(self.file.read_text()) if self.file.exists() else {}
        if any(found["dry_run"] != args.dry_run for found in self.results.values()):
            kind = "a GPU" if args.dry_run else "a dry run"
            raise SystemExit(f"{self.file} holds results of {kind}, which would count as these; give another --out")
        for name in SECTIONS:  # of a call that was itself ended
            if rows_file(self.out, name).exists():
                self.gather(name, "was ended with the call")

    def start(self, names: Sequence[str]) -> None:
        """Run these at the same time, those that have ended before left out, and wait."""
        names = [name for name in names if self.args.again or not self.has_ended(name)]
        left = self.deadline - time.monotonic()
        if names and left < MIN_SECTION_S:
            print(f"== {', '.join(names)}: left out, the budget is used up; run again with the same --out", flush=True)
            return
        # A dry run is about what the sections do: one process serves all of them.
        groups = [names] if self.args.dry_run else [[name] for name in names]
        processes = {tuple(group): self.launch(group) for group in groups if group}
        start = time.monotonic()
        try:
            for group, process in processes.items():
                most = min(sum(SECTIONS[name] for name in group) * self.args.patience, left)
                try:
                    why = f"ended with status {process.wait(max(0.0, start + most - time.monotonic()))}"
                except subprocess.TimeoutExpired:
                    why = "took too long"
                end_group(process)
                for name in group:
                    self.gather(name, why)
        finally:
            for process in processes.values():
                end_group(process)

    def has_ended(self, name: str) -> bool:
        """Whether there is a result, right or wrong, of the whole section."""
        return name in self.results and "error" not in self.results[name]

    def launch(self, names: Sequence[str]) -> subprocess.Popen[bytes]:
        """In a process group, so that what a section started ends with it."""
        command = [sys.executable, str(HERE / "check.py"), "--run", ",".join(names), "--out", str(self.out)]
        command += ["--dry-run"] if self.args.dry_run else []
        with (self.out / "log.txt").open("ab") as log:
            return subprocess.Popen(
                command, env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )

    def gather(self, name: str, why: str) -> None:
        """Move a section's rows to the results. why: what became of its process. More rows found before are kept."""
        file = rows_file(self.out, name)
        rows = (
            [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
        )
        result: dict[str, Any] = {"dry_run": self.args.dry_run}
        if rows and "ended_after_s" in rows[-1]:
            result["seconds"] = rows.pop()["ended_after_s"]
        elif rows and "could_not_start" in rows[-1]:
            result["error"] = f"{why}: {rows.pop()['could_not_start']}"
        else:
            result["error"] = why
        result |= {"ok": "error" not in result and all(row.get("ok", True) for row in rows), "rows": rows}
        before = self.results.get(name)
        if before is None or "error" not in result or ("error" in before and len(rows) >= len(before["rows"])):
            self.results[name] = result
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(self.results, indent=1, allow_nan=False) + "\n")
        partial.replace(self.file)
        file.unlink(missing_ok=True)
        seconds = f" in {result['seconds']} s" if "seconds" in result else ""
        errors = [str(row["error"]) for row in rows if row.get("error") is not None and not row.get("ok", True)]
        why = f": {errors[-1]}" if errors else ""
        print(f"== {name}: {result.get('error') or ('ok' if result['ok'] else 'WRONG')}{seconds}{why}", flush=True)

    def skip(self, name: str, why: str) -> None:
        """Leave a section out that cannot run here; what it found before is kept."""
        if not self.has_ended(name):
            self.gather(name, f"skipped, {why}")


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Whatever is left of a section, its workers too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> int:
    """Run the sections, print the table. Status 1 if any result is wrong or missing."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--again", action="store_true", help="run sections whose results are there too")
    parser.add_argument("--dry-run", action="store_true", help="the host side only, on a CPU; measures nothing")
    parser.add_argument("--budget", type=float, default=480, help="seconds for everything together")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies the time each section may take")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to use besides what is installed")
    parser.add_argument(
        "--flashinfer-modules", type=Path, help="folder of prebuilt modules, NAME/NAME.so; with --wheels"
    )
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        return run_sections(args.run.split(","), dry_run=args.dry_run, small=args.small, out=args.out)
    names = args.sections.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"no section named {', '.join(unknown)}; sections: {', '.join(SECTIONS)}")
    args.out = args.out or Path("gpu-results")
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # sections end with this process
    run = Run(args, started + args.budget)
    missing = missing_modules(run.environ, names)
    # What only the tests' own runner needs costs no more than that section.
    if any(users != ["conformance"] for users in missing.values()) or (missing and names == ["conformance"]):
        print(missing_message(missing, len(names)), file=sys.stderr)
        return 2
    if missing:
        run.skip("conformance", f"missing: {', '.join(module.replace('_', '-') for module in missing)}")
    for group in order([name for name in names if not (missing and name == "conformance")], args.dry_run):
        run.start(group)
        if "environment" in group and not run.results.get("environment", {}).get("ok"):
            print(f"nothing else can run, see {args.out / 'log.txt'}", flush=True)
            break
    text = f"{table(run.results, SECTIONS)}\n{wanted(run.results)}"
    (args.out / "table.md").write_text(text)
    print(text)
    return 0 if all(run.results.get(name, {}).get("ok") for name in names) else 1


def order(names: Sequence[str], dry_run: bool) -> list[list[str]]:
    """What runs at the same time, group by group."""
    if dry_run:
        return [list(names)]
    together = [name for name in names if name in TOGETHER]
    alone = [[name] for name in names if name not in TOGETHER]
    return [*alone[:1], together, *alone[1:]] if names[0] == "environment" else [together, *alone]


if __name__ == "__main__":
    sys.exit(main())
