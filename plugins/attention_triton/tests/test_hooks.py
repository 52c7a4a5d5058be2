"""What is registered, and when it cannot serve."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from enginectl.context import Gpu, Machine
from enginectl_attention_triton import hooks

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def machine(capability: tuple[int, int] | None, versions: dict[str, str]) -> Machine:
    gpus = () if capability is None else (Gpu("Test GPU", capability, 1 << 34),)
    return Machine(num_cores=1, memory_bytes=1, cpu_flags=frozenset(), gpus=gpus, versions=versions)


@pytest.mark.parametrize(
    ("capability", "triton", "reason"),
    [
        (None, "3.9.0", "needs an NVIDIA GPU, and none was found"),
        ((7, 5), "3.9.0", "Test GPU has 7.5"),
        ((8, 0), None, "not installed"),
        ((9, 0), "3.5.1", "found 3.5.1"),
        ((8, 0), "3.6.0", None),
        ((10, 0), "3.10.0", None),
    ],
)
def test_unsupported_says_why(capability: tuple[int, int] | None, triton: str | None, reason: str | None) -> None:
    """Law 23: the reason names what was found."""
    found = hooks.unsupported(machine(capability, {} if triton is None else {"triton": triton}))
    assert (reason in (found or "")) if reason else found is None


def test_a_machine_without_a_c_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles its launcher with one, at the first launch: too late to say it."""
    here = machine((9, 0), {"triton": "3.6.0"})
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "cc")
    assert hooks.unsupported(here) is None
    monkeypatch.delenv("CC")
    assert "C compiler" in (hooks.unsupported(here) or "")


def test_the_entry_point_is_named_triton_and_its_providers_too() -> None:
    """`--plugins triton` and `--attention triton`; ahead of core's own on a GPU."""
    points = tomllib.loads(PROJECT.read_text())["project"]["entry-points"]["enginectl"]
    assert points == {"triton": "enginectl_attention_triton.hooks"}
    providers = [*hooks.enginectl_attention(), *hooks.enginectl_op_set(), *hooks.enginectl_sampler()]
    assert {provider.name for provider in providers} == {"triton"}
    assert all(provider.rank > 0 for provider in providers)


def test_registration_imports_nothing_heavy() -> None:
    """Neither torch nor triton."""
    script = (
        "import sys; from enginectl_attention_triton import hooks; hooks.enginectl_attention(); "
        "hooks.enginectl_op_set(); hooks.enginectl_sampler(); sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
