"""Building: once, whole or not at all, and with a reason when it cannot be."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from enginectl.context import Gpu, Machine
from enginectl.errors import UnsupportedError
from enginectl.machine import cpu_flags
from enginectl_attention_cpu import build, hooks


def machine(**changes: object) -> Machine:
    fields = {"num_cores": 2, "memory_bytes": 1 << 33, "cpu_flags": hooks.NEEDED_FLAGS, "has_compiler": True}
    return Machine(**(fields | changes))  # type: ignore[arg-type]


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hooks.unsupported(machine()) is None
    assert "avx2" in (hooks.unsupported(machine(cpu_flags=frozenset({"fma", "f16c"}))) or "")
    assert "compiler" in (hooks.unsupported(machine(has_compiler=False)) or "")
    assert "GPU" in (hooks.unsupported(machine(gpus=(Gpu("H200", (9, 0), 1 << 37),))) or "")


def test_a_library_built_before_serves_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert build.find_compiler() is None
    with pytest.raises(UnsupportedError, match="no C\\+\\+ compiler"):
        build.library_path()
    directory = build.cache_dir()
    directory.mkdir(parents=True)
    library = directory / f"{build.source_key(cpu_flags())}-0.so"
    library.touch()
    assert build.library_path() == (library, 0.0)
    assert hooks.unsupported(machine(has_compiler=False, cpu_flags=cpu_flags())) is None


def test_a_failing_compiler_is_quoted_and_nothing_stays(tmp_path: Path) -> None:
    compiler = script(tmp_path / "c++", 'case "$1" in --version) echo 1;; *) echo "no such flag" >&2; exit 3;; esac')
    with pytest.raises(UnsupportedError, match=r"(?s)status 3.*no such flag"):
        build.library_path(tmp_path / "cache", compiler=compiler)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(UnsupportedError, match="XDG_CACHE_HOME"):
        build.library_path(tmp_path / "cache", compiler=script(tmp_path / "c++", "echo 1"))


def test_it_is_built_once_and_again_for_other_sources_or_flags(tmp_path: Path) -> None:
    count = tmp_path / "count"
    compiler = script(
        tmp_path / "c++",
        f'if [ "$1" = --version ]; then echo 1; exit; fi\necho >> {count}\n'
        'while [ "$1" != -o ]; do shift; done; echo library > "$2"',
    )
    first, seconds = build.library_path(tmp_path / "cache", compiler=compiler)
    assert seconds > 0
    assert first.read_text() == "library\n"
    assert build.library_path(tmp_path / "cache", compiler=compiler) == (first, 0.0)
    other, _ = build.library_path(tmp_path / "cache", compiler=compiler, flags=(*build.FLAGS, "-g"))
    assert other != first
    assert len(count.read_text().splitlines()) == 2


def test_hooks_import_nothing_heavy() -> None:
    code = (
        "import sys, enginectl_attention_cpu.hooks as hooks, enginectl_attention_cpu.build;"
        "hooks.enginectl_attention(), hooks.enginectl_op_set();"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_forked_child_computes(tmp_path: Path) -> None:
    """The child of a fork has none of its parent's threads, and starts its own."""
    code = """
import os, torch
from enginectl_attention_cpu.ops import CpuOpSet
linear, x = CpuOpSet(2).linear(torch.ones(4096, 64), None), torch.ones(8, 64)
expected = linear(x)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(linear(x), expected) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(linear(x), expected)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
