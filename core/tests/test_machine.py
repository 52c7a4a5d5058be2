"""Machine facts come from files; here from trees of fake ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from enginectl.context import Gpu, Machine
from enginectl.machine import (
    cpu_flags,
    detect_machine,
    installed_versions,
    seen_from,
    usable_cores,
    usable_memory_bytes,
    visible_gpus,
)

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def two_hundred_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(200)))


MEMINFO = f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {48 * GIB // 1024} kB\n"


@pytest.mark.usefixtures("two_hundred_cores")
class TestCores:
    def test_affinity_without_cgroups(self, tmp_path: Path) -> None:
        assert usable_cores(tmp_path) == 200

    @pytest.mark.parametrize(
        ("quota", "cores"), [("max 100000", 200), ("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1)]
    )
    def test_version_2_quota(self, tmp_path: Path, quota: str, cores: int) -> None:
        files = {
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/cpu.max": quota,
            "sys/fs/cgroup/cpu.max": "max 100000",
        }
        assert usable_cores(tree(tmp_path, files)) == cores

    def test_the_tightest_group_above_counts(self, tmp_path: Path) -> None:
        files = {
            "proc/self/cgroup": "0::/a/b/c\n",
            "sys/fs/cgroup/a/cpu.max": "300000 100000",
            "sys/fs/cgroup/a/b/c/cpu.max": "800000 100000",
        }
        assert usable_cores(tree(tmp_path, files)) == 3

    def test_a_container_sees_its_own_group_at_the_mount_point(self, tmp_path: Path) -> None:
        files = {"proc/self/cgroup": "0::/host/path\n", "sys/fs/cgroup/cpu.max": "600000 100000"}
        assert usable_cores(tree(tmp_path, files)) == 6

    @pytest.mark.parametrize("controllers", ["cpu,cpuacct", "cpu"])
    def test_version_1_quota(self, tmp_path: Path, controllers: str) -> None:
        group = f"sys/fs/cgroup/{controllers}/job"
        files = {
            "proc/self/cgroup": f"5:memory:/other\n4:{controllers}:/job\n",
            f"{group}/cpu.cfs_quota_us": "700000\n",
            f"{group}/cpu.cfs_period_us": "100000\n",
        }
        assert usable_cores(tree(tmp_path, files)) == 7

    def test_version_1_without_quota(self, tmp_path: Path) -> None:
        files = {
            "proc/self/cgroup": "4:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        }
        assert usable_cores(tree(tmp_path, files)) == 200


class TestMemory:
    def test_available_without_cgroups(self, tmp_path: Path) -> None:
        assert usable_memory_bytes(tree(tmp_path, {"proc/meminfo": MEMINFO})) == 48 * GIB

    def test_version_2_limit_less_what_is_used_and_not_droppable(self, tmp_path: Path) -> None:
        files = {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/memory.max": str(8 * GIB),
            "sys/fs/cgroup/job/memory.current": str(3 * GIB),
            "sys/fs/cgroup/job/memory.stat": f"anon {2 * GIB}\ninactive_file {GIB}\n",
        }
        assert usable_memory_bytes(tree(tmp_path, files)) == 6 * GIB

    def test_no_limit_is_what_the_machine_has(self, tmp_path: Path) -> None:
        files = {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "3:memory:/job\n0::/\n",
            "sys/fs/cgroup/memory.max": "max\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{GIB}\n",
        }
        assert usable_memory_bytes(tree(tmp_path, files)) == 48 * GIB

    def test_version_1_limit(self, tmp_path: Path) -> None:
        files = {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "3:memory:/job\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}\n",
        }
        assert usable_memory_bytes(tree(tmp_path, files)) == 3 * GIB

    def test_a_group_over_its_limit_has_nothing_left(self, tmp_path: Path) -> None:
        files = {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": str(GIB),
            "sys/fs/cgroup/memory.current": str(2 * GIB),
        }
        assert usable_memory_bytes(tree(tmp_path, files)) == 0


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 amx_bf16\n\nflags : other\n", {"fpu", "avx2", "amx_bf16"}),
        ("processor : 0\nFeatures : fp asimd sve\n", {"fp", "asimd", "sve"}),
        ("", set()),
    ],
)
def test_cpu_flags_of_the_first_core(tmp_path: Path, text: str, flags: set[str]) -> None:
    assert cpu_flags(tree(tmp_path, {"proc/cpuinfo": text})) == flags


class TestVisibleGpus:
    GPUS = tuple((f"GPU-{letter}000", Gpu(letter, (9, 0), 80 * GIB)) for letter in "abc")

    @pytest.mark.parametrize(
        ("visible", "names"),
        [
            (None, "abc"),
            ("", ""),
            ("-1", ""),
            ("2,0", "ca"),
            ("1, 7, 0", "b"),
            ("GPU-b", "b"),
            ("GPU-zzz,0", ""),
            ("MIG-4f2c", "a"),
        ],
    )
    def test_as_cuda_reads_the_variable(self, visible: str | None, names: str) -> None:
        assert "".join(gpu.name for gpu in visible_gpus(self.GPUS, visible)) == names


def test_versions_of_missing_distributions_are_absent() -> None:
    versions = installed_versions(["enginectl", "no-such-distribution-here"])
    assert set(versions) == {"enginectl"}


def test_a_compiler_is_one_on_the_path(tmp_path: Path) -> None:
    assert not detect_machine(environ={"PATH": str(tmp_path)}).has_compiler
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    assert detect_machine(environ={"PATH": str(tmp_path)}).has_compiler


def test_detection_imports_no_torch() -> None:
    code = "import sys; from enginectl.machine import detect_machine; m = detect_machine(); print(m.num_cores, 'torch' in sys.modules)"
    cores, has_torch = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert int(cores) >= 1
    assert has_torch == "False"


def test_parts_see_the_device_they_compute_on() -> None:
    """Beside a CPU there is no GPU, and an architecture is asked of the GPU that was named, not of the first."""
    first, second = Gpu("first", (8, 0), 1 << 34), Gpu("second", (9, 0), 1 << 35)
    machine = Machine(num_cores=1, memory_bytes=1, cpu_flags=frozenset({"avx2"}), gpus=(first, second))
    assert seen_from(machine, "cpu").gpus == ()
    assert seen_from(machine, "cpu").cpu_flags == machine.cpu_flags
    assert seen_from(machine, "cuda").gpus == seen_from(machine, "cuda:0").gpus == (first, second)
    assert seen_from(machine, "cuda:1").gpus == (second, first)
