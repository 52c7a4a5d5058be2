"""The benchmarks' own arithmetic, and that `make bench` names scripts that exist with options that they take."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import time
import xml.dom.minidom
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import psutil
import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_roofline_of_one_stream_is_the_bandwidth_and_of_a_prompt_the_flops() -> None:
    roofline = load("roofline")
    machine = roofline.Roofline(bytes_per_s=1e9, flop_per_s=1e12)
    shape = roofline.Shape(layers=900_000, head=100_000, kv=0, width=0)
    assert roofline.bound(machine, shape, 1, 1, 100) == pytest.approx(1e9 / 2e6)
    of_prompt = roofline.bound(machine, shape, 8, 4096, 1)
    assert of_prompt == pytest.approx(1e12 / (2 * (900_000 + 100_000 / 4096)))


def test_the_plot_is_xml_with_a_bar_for_each_engine() -> None:
    plot = load("plot")
    row = {"tokens_per_s": 5.0, "min": 4.0, "max": 6.0}
    text = plot.bars({"W1": {"ours": row, "<peer>": row}}, {"W1": 10.0})
    document = xml.dom.minidom.parseString(text)
    assert len(document.getElementsByTagName("rect")) == 1 + 2 + 2  # the ground, the key, the bars
    assert "roofline 10" in text


FAKE_PEER = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(json.dumps({"ready_s": child.pid}), flush=True)
time.sleep(600)
"""
HELD = """
import sys, time
sys.path.insert(0, sys.argv[1])
import compare
with compare.running([("peer", sys.executable, sys.argv[2], "model")], threads=1) as workers:
    print(workers[0].process.pid, workers[0].ready_s, flush=True)
    time.sleep(600)
"""


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_peers_that_are_stopped_end_with_the_benchmark(number: signal.Signals, tmp_path: Path) -> None:
    """Killed, it left them stopped for ever, with the memory of a model each; those that they had started, too."""
    script = tmp_path / "peer.py"
    script.write_text(FAKE_PEER)
    command = [sys.executable, "-c", HELD, str(BENCH), str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as bench:
        try:
            assert bench.stdout is not None
            peers = [psutil.Process(int(word)) for word in bench.stdout.readline().split()]
            assert len(peers) == 2
            until(lambda: all(peer.status() == psutil.STATUS_STOPPED for peer in peers))
        finally:
            bench.send_signal(number)
    until(lambda: all(not peer.is_running() or peer.status() == psutil.STATUS_ZOMBIE for peer in peers))


def test_make_bench_runs_scripts_that_exist() -> None:
    runs = load("run_all").RUNS
    assert not [name for name in runs if not (BENCH / f"{name}.py").is_file()]
    done = subprocess.run([sys.executable, str(BENCH / "run_all.py"), "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no benchmark named nonsense" in done.stderr
