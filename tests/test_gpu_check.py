"""bench/gpu/check.py without a GPU: every section's host side runs, results are resumed, nothing is measured."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

GPU = Path(__file__).resolve().parents[1] / "bench" / "gpu"


@pytest.fixture(scope="module", autouse=True)
def on_path() -> Iterator[None]:
    """The script's modules import each other by name."""
    sys.path.insert(0, str(GPU))
    yield
    sys.path.remove(str(GPU))


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(GPU / "check.py"), "--dry-run", "--out", str(out), "--patience", "5", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def results(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


def log(out: Path, done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr + (out / "log.txt").read_text()


# -- a dry run ---------------------------------------------------------------------------------------------------------


def test_every_section_runs_without_a_gpu_and_a_second_run_has_nothing_to_do(tmp_path: Path) -> None:
    """All of them, in the order of the table; a dry run has no numbers; few files are left."""
    check = import_module("check")
    done = run(tmp_path)
    assert done.returncode == 0, log(tmp_path, done)
    assert done.stdout.count("dry run: nothing was measured") == len(check.SECTIONS)
    found = results(tmp_path)
    assert list(found) == list(check.SECTIONS)
    rows = [row for result in found.values() for row in result["rows"]]
    assert not any(isinstance(value, float) for row in rows for value in row.values())
    assert {row.get("backend") for row in found["rooflines"]["rows"]} >= {"torch", "triton"}
    assert "| yes |" not in done.stdout, "nothing was measured, nothing is met"
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "log.txt", "table.md"}
    again = run(tmp_path)
    assert again.returncode == 0
    assert "== " not in again.stdout
    assert "dry run: nothing was measured" in again.stdout


def test_results_of_a_dry_run_never_count_as_those_of_a_gpu(tmp_path: Path) -> None:
    """Both go to the same folder unasked: a run on a GPU found every section done and ended at once."""
    check = import_module("check")
    (tmp_path / "results.json").write_text('{"steps": {"dry_run": true, "ok": true, "rows": []}}')
    args = argparse.Namespace(
        out=tmp_path, wheels=None, flashinfer_modules=None, again=False, dry_run=False, patience=1.0
    )
    with pytest.raises(SystemExit, match="a dry run"):
        check.Run(args, time.monotonic() + 60)
    args.dry_run = True
    assert check.Run(args, time.monotonic() + 60).has_ended("steps")


def test_an_unknown_section_is_an_error(tmp_path: Path) -> None:
    """With the names there are."""
    found = run(tmp_path, "--sections", "kernles")
    assert found.returncode == 2
    assert "kernels" in found.stderr


def test_a_budget_leaves_sections_out_and_a_second_run_makes_them_up(tmp_path: Path) -> None:
    """Minutes on a GPU end; what was found is kept."""
    first = run(tmp_path, "--sections", "sanitizer", "--budget", "1")
    assert first.returncode == 1
    assert "sanitizer: left out, the budget is used up" in first.stdout
    again = run(tmp_path, "--sections", "sanitizer")
    assert again.returncode == 0, log(tmp_path, again)
    assert "== sanitizer: ok" in again.stdout


# -- what the environment lacks ----------------------------------------------------------------------------------------


def lacking(*modules: str) -> Any:
    """missing_modules of an environment without these."""
    packages = import_module("packages")
    real = packages.missing_modules

    def missing(environ: dict[str, str], sections: Sequence[str]) -> dict[str, list[str]]:
        assert real(environ, sections) == {}
        needs = {name: (*packages.NEEDED, *packages.NEEDED_BY.get(name, ())) for name in sections}
        found = {module: [name for name in sections if module in needs[name]] for module in modules}
        return {module: users for module, users in found.items() if users}

    return missing


def test_a_package_that_is_not_there_is_named_with_its_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by a process of the sections' environment, which imports nothing."""
    packages = import_module("packages")
    environ = packages.environment_of(None, None)
    assert packages.missing_modules(environ, ["kernels", "conformance"]) == {}
    monkeypatch.setattr(packages, "NEEDED", ("torch", "no_such_module"))
    monkeypatch.setitem(packages.NEEDED_BY, "steps", ("nor_this",))
    missing = packages.missing_modules(environ, ["kernels", "steps"])
    assert missing == {"no_such_module": ["kernels", "steps"], "nor_this": ["steps"]}
    text = packages.missing_message(missing, 2)
    assert "no-such-module: needed by every section" in text
    assert "nor-this: needed by steps" in text
    assert "--wheels" in text


def test_what_is_missing_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without pytest every section `ended with status 1`, and the reason was in the log alone."""
    check = import_module("check")
    monkeypatch.setattr(check, "missing_modules", lacking("pytest"))
    monkeypatch.setattr(check.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["check.py", "--dry-run", "--out", str(tmp_path), "--sections", "kernels,steps"])
    assert check.main() == 2
    captured = capsys.readouterr()
    assert "pytest: needed by every section" in captured.err
    assert "==" not in captured.out
    assert not (tmp_path / "log.txt").exists()


@pytest.mark.parametrize(("sections", "status"), [("sanitizer", 0), ("sanitizer,conformance", 1), ("conformance", 2)])
def test_what_only_conformance_needs_leaves_the_other_sections(
    sections: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is left out with the reason, and made up by a later call."""
    check = import_module("check")
    monkeypatch.setattr(check, "missing_modules", lacking("pytest_timeout"))
    monkeypatch.setattr(check.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["check.py", "--dry-run", "--out", str(tmp_path), "--sections", sections])
    monkeypatch.setattr(check.Run, "launch", lambda run, names: ended(run, names))
    assert check.main() == status
    captured = capsys.readouterr()
    assert ("== sanitizer: ok" in captured.out) == ("sanitizer" in sections)
    if status == 1:
        assert "== conformance: skipped, missing: pytest-timeout" in captured.out
        assert "error" in results(tmp_path)["conformance"]


def ended(run: Any, names: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process whose sections are all right."""
    for name in names:
        (run.out / f"{name}.rows").write_text('{"ended_after_s": 0.1}\n')
    return subprocess.Popen(["true"], process_group=0)


def test_why_a_section_failed_stands_beside_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both of one that could not start and of one that raised."""
    starts = Starts(import_module("check"), tmp_path, monkeypatch)
    starts.script = """echo '{"could_not_start": "ImportError: no x"}' > ROWS; exit 1"""
    starts.run.start(["steps"])
    starts.script = """printf '{"error": "ValueError: y", "ok": false}\n{"ended_after_s": 1.0}\n' > ROWS; exit 1"""
    starts.run.start(["lora"])
    assert capsys.readouterr().out.splitlines() == [
        "== steps: ended with status 1: ImportError: no x",
        "== lora: WRONG in 1.0 s: ValueError: y",
    ]


def test_a_section_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its rows, for the process that started it."""
    monkeypatch.setitem(sys.modules, "harness", None)
    with pytest.raises(ImportError):
        import_module("check").run_sections(["steps"], dry_run=False, small=False, out=tmp_path)
    assert "could_not_start" in json.loads((tmp_path / "steps.rows").read_text())


# -- the process that starts sections ----------------------------------------------------------------------------------


class Starts:
    """A Run whose sections are shell commands."""

    def __init__(self, check: ModuleType, out: Path, monkeypatch: pytest.MonkeyPatch, *, budget: float = 60) -> None:
        args = argparse.Namespace(
            out=out, wheels=None, flashinfer_modules=None, again=False, dry_run=False, patience=1.0
        )
        self.run = check.Run(args, time.monotonic() + budget)
        self.script = ""
        self.num_started = 0
        monkeypatch.setattr(self.run, "launch", self.launch)

    def launch(self, names: Sequence[str]) -> subprocess.Popen[bytes]:
        self.num_started += 1
        script = self.script.replace("ROWS", str(self.run.out / f"{names[0]}.rows"))
        return subprocess.Popen(["sh", "-c", script], process_group=0)


def test_a_section_that_takes_too_long_is_ended_and_its_rows_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With whatever it started; a later run tries again, and keeps the better half."""
    check = import_module("check")
    monkeypatch.setitem(check.SECTIONS, "steps", 1)
    starts = Starts(check, tmp_path, monkeypatch)
    starts.script = (
        """(sleep 2; echo '{"late": 1}' >> ROWS) & printf '{"batch": 1}\n{"batch": 8}\n{"bat' > ROWS; sleep 60"""
    )
    starts.run.start(["steps"])
    expected = {"dry_run": False, "error": "took too long", "ok": False, "rows": [{"batch": 1}, {"batch": 8}]}
    assert results(tmp_path)["steps"] == expected
    starts.script = """echo '{"batch": 1}' > ROWS; exit 3"""
    starts.run.start(["steps"])
    assert results(tmp_path)["steps"] == expected, "two rows are more than one"
    starts.script = """printf '{"batch": 1}\n{"ended_after_s": 2.5}\n' > ROWS; exit 1"""
    starts.run.start(["steps"])
    assert results(tmp_path)["steps"] == {"dry_run": False, "seconds": 2.5, "ok": True, "rows": [{"batch": 1}]}
    starts.run.start(["steps"])
    assert starts.num_started == 3
    time.sleep(1.2)
    assert not list(tmp_path.glob("*.rows")), "nothing of the first one is left"


def test_sections_of_a_group_run_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other."""
    check = import_module("check")
    starts = Starts(check, tmp_path, monkeypatch)
    others = f"for i in 1 2; do until [ -e {tmp_path}/$i ]; do sleep 0.05; done; done"
    starts.script = f"touch {tmp_path}/1 2>/dev/null; case ROWS in *greedy*) touch {tmp_path}/2;; esac; {others}; " + (
        """echo '{"ended_after_s": 1.0}' > ROWS"""
    )
    starts.run.start(["kernels", "greedy"])
    assert results(tmp_path)["kernels"]["ok"]
    assert results(tmp_path)["greedy"]["ok"]


def test_rows_of_a_call_that_was_itself_ended_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call has them in its results."""
    (tmp_path / "lora.rows").write_text('{"batch": 1}\n')
    Starts(import_module("check"), tmp_path, monkeypatch)
    assert results(tmp_path)["lora"]["rows"] == [{"batch": 1}]
    assert not results(tmp_path)["lora"]["ok"]


def test_correctness_comes_first_then_what_is_wanted() -> None:
    """Minutes may be short."""
    check = import_module("check")
    groups = check.order(list(check.SECTIONS), False)
    assert groups[:4] == [["environment"], ["kernels", "greedy", "first_start"], ["rooflines"], ["steps"]]
    assert [name for group in groups for name in group] == list(check.SECTIONS)


def test_prebuilt_modules_are_put_where_flashinfer_looks(tmp_path: Path) -> None:
    """Beside what it brings, and only whole ones; a folder without any is an error."""
    packages = import_module("packages")
    modules, installed = tmp_path / "modules", tmp_path / "packages"
    modules.mkdir()
    with pytest.raises(SystemExit, match="flashinfer-python among"):
        packages.place_modules(modules, installed)
    (installed / "flashinfer" / "data" / "csrc").mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"prebuild\.py makes them"):
        packages.place_modules(modules, installed)
    (modules / "norm").mkdir()
    (modules / "norm" / "norm.so").write_bytes(b"module")
    (modules / "norm" / "norm.partial").write_bytes(b"half")
    packages.place_modules(modules, installed)
    found = [path for path in (installed / "flashinfer" / "data" / "aot").rglob("*") if path.is_file()]
    assert [path.name for path in found] == ["norm.so"]
    assert found[0].parent.name == "norm"


def test_settings_of_the_engine_in_the_environment_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything fetched; a cache that is set stays."""
    monkeypatch.setenv("ENGINECTL_ATTENTION", "torch")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/cache")
    environ = import_module("packages").environment_of(None, None)
    assert "ENGINECTL_ATTENTION" not in environ
    assert environ["TRITON_CACHE_DIR"] == "/cache"
    assert environ["HF_HUB_OFFLINE"] == "1"
    assert "FLASHINFER_DISABLE_JIT" not in environ


# -- what a section is given -------------------------------------------------------------------------------------------


def test_an_error_in_one_part_of_a_section_leaves_the_others(tmp_path: Path) -> None:
    """It becomes a row; numbers that JSON lacks become text."""
    bench = import_module("harness").Bench(dry_run=False, file=tmp_path / "rows")
    missing = RuntimeError("no\nmodule")
    with bench.attempt(backend="flashinfer"):
        future: Future[None] = Future()
        future.set_exception(missing)
        future.result()
    bench.add(backend="triton", error_of_tolerance=float("nan"), ok=False)
    lines = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert lines == [
        {"backend": "flashinfer", "error": "RuntimeError: no module", "ok": False},
        {"backend": "triton", "error_of_tolerance": "nan", "ok": False},
    ]


def test_times_are_medians_in_seconds_with_the_cache_filled_before_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of our own: an event reads it in milliseconds."""
    import torch

    harness = import_module("harness")
    clock = [0.0]
    calls: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(harness, "WARM_UP_S", 0.0)
    monkeypatch.setattr(harness.Bench, "_fill_cache", lambda self: calls.append("fill"))

    def work() -> None:
        calls.append("work")
        clock[0] += 100.0 if calls.count("work") == 5 else 3.0

    assert harness.Bench(dry_run=False).seconds(work, repeats=4) == pytest.approx(3e-3)
    assert calls == ["work"] * 3 + ["fill", "work"] * 4


def test_tasks_are_spread_over_processes_and_their_errors_come_back() -> None:
    """In order. The function is a module's own, as new processes find it."""
    bench = import_module("harness").Bench(dry_run=False)
    gcd = import_module("math").gcd
    first, second, third = bench.map(gcd, [(6, 4), (1, "x"), (9, 6)], 2)
    assert (first, third) == (2, 3)
    assert isinstance(second, TypeError)


def test_pauses_within_a_launch_are_not_the_hosts() -> None:
    """Kernels 1 and 1 are of one graph; the copy behind it came 4 us late."""
    speed = import_module("speed")
    spans = [(0.0, 1.0, 1), (3.0, 4.0, 1), (8.0, 9.0, 2), (8.5, 10.0, 3)]
    assert speed.idle_us(spans) == 6.0
    assert speed.idle_us(speed.by_launch(spans)) == 4.0
    assert speed.idle_us(speed.by_launch([(start, end, 0) for start, end, _ in spans])) == 6.0, "0 is no launch"
    assert speed.decode_part([(0.0, 1.0, 1), (24.0, 25.0, 2), (26.0, 100.0, 3)]) == [(26.0, 100.0, 3)]


def test_wanted_figures_are_met_or_not(tmp_path: Path) -> None:
    """What was seen decides; what was not seen is not met."""
    report = import_module("report")
    rows = [
        {"backend": "triton", "what": "decode 64 x 4096", "of_copy": 0.9},
        {"backend": "flashinfer", "what": "decode 64 x 4096", "of_copy": 0.8},
    ]
    found = {
        "rooflines": {"ok": True, "dry_run": False, "rows": rows},
        "steps": {
            "ok": True,
            "dry_run": False,
            "rows": [{"model": "8B", "backend": "triton", "batch": 64, "of_floor": 1.2}],
        },
        "kernels": {"ok": False, "dry_run": False, "rows": []},
    }
    text = report.wanted(found)
    assert "triton, of the measured copy | at least 0.85 | 0.9 | yes |" in text
    assert "flashinfer, of the measured copy | at least 0.85 | 0.8 | no |" in text
    assert "8B decode step, batch 64, triton, of the time to read its bytes | at most 1.25 | 1.2 | yes |" in text
    assert "batch 1, triton, of the time to read its bytes | at most 1.25 | not measured | no |" in text
    assert "kernels: right | ok | WRONG | no |" in text


def test_random_models_know_their_answer_where_it_is_asked_for() -> None:
    """The likeliest token is the last one's successor, whatever the layers hold."""
    from enginectl import Engine, SamplingParams

    source = import_module("random_model").RandomSource("tiny", "float32", "cpu", num_layers=1, successor=True)
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "attention": "torch", "num_gpu_blocks_override": 80}
    with Engine(str(GPU), weights=source, **options) as engine:
        (output,) = engine.generate([[5, 300, 41]], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    assert output.outputs[0].token_ids == (42, 43, 44, 45, 46, 47)


def test_options_that_the_pages_name_exist() -> None:
    """Of check.py and of the engine."""
    root = GPU.parents[1]
    known = (root / "docs" / "reference" / "cli.md").read_text()
    known += "".join((GPU / name).read_text() for name in ("check.py", "prebuild.py"))
    for page in (GPU / "README.md", root / "docs" / "how-to" / "run-on-a-gpu.md"):
        text = re.sub(r"^pip .*$", "", page.read_text(), flags=re.MULTILINE)
        missing = [flag for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text) if flag not in known]
        assert not missing, page


def test_every_section_is_in_the_readme_in_order() -> None:
    """With what it asks."""
    check = import_module("check")
    named = re.findall(r"^\| (\w+) \|", (GPU / "README.md").read_text(), re.MULTILINE)
    assert named[1:] == list(check.SECTIONS)
