"""Facts about the workspace that no single distribution can check."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))
PROJECTS = [ROOT / "core", *PLUGINS]
GPU_MACHINE = {"torch": "2.11.0", "triton": "3.6.0", "transformers": "5.17.0"}
"""The oldest versions that the engine is checked with on a GPU."""


def project(path: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((path / "pyproject.toml").read_text())["project"]
    return table


def requirements(path: Path) -> list[Requirement]:
    table = project(path)
    extras = [line for lines in table.get("optional-dependencies", {}).values() for line in lines]
    return [Requirement(line) for line in [*table["dependencies"], *extras]]


def listed(name: str) -> list[Requirement]:
    lines = (line.partition(" #")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]


CONSTRAINTS = {canonicalize_name(requirement.name): requirement for requirement in listed("constraints.txt")}


def test_the_seven_plugins_are_there_and_installed_by_make_test() -> None:
    names = {path.name for path in PLUGINS}
    designed = {"attention_triton", "attention_flashinfer", "spec_ngram", "spec_draft", "lora_sgmv", "prefix_cache"}
    assert designed | {"attention_cpu"} <= names
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    assert {f"-e ./plugins/{name}" for name in names} <= set(lines)
    assert "-c constraints.txt" in lines


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: path.name)
def test_a_plugin_is_named_after_its_folder(path: Path) -> None:
    table = project(path)
    assert table["name"] == "enginectl-" + path.name.replace("_", "-")
    assert table["requires-python"] == project(ROOT / "core")["requires-python"]
    assert (path / "src" / f"enginectl_{path.name}" / "__init__.py").is_file()
    assert (path / "README.md").is_file()


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.name)
def test_every_requirement_has_a_tested_version_within_it(path: Path) -> None:
    for requirement in requirements(path):
        if requirement.name.startswith("enginectl"):
            assert requirement.specifier.contains(project(ROOT / "core")["version"])
            continue
        constraint = CONSTRAINTS[canonicalize_name(requirement.name)]
        tested = [part.version for part in constraint.specifier if part.operator in ("==", ">=")]
        assert tested, f"{constraint} names no version"
        assert all(requirement.specifier.contains(v) for v in tested), f"{requirement} excludes the tested {constraint}"


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.name)
def test_metadata_admit_the_gpu_machine_and_have_no_local_versions(path: Path) -> None:
    for requirement in requirements(path):
        assert "+" not in str(requirement.specifier)
        if requirement.name in GPU_MACHINE:
            assert requirement.specifier.contains(GPU_MACHINE[requirement.name]), str(requirement)


def test_development_tools_are_pinned() -> None:
    assert {canonicalize_name(r.name) for r in listed("requirements-dev.txt")} <= set(CONSTRAINTS)


def test_flashinfer_is_pinned_to_what_its_plugin_takes() -> None:
    versions = {requirement.name: requirement.specifier for requirement in listed("requirements-flashinfer.txt")}
    pins = {name: [part.version for part in specifier if part.operator == "=="] for name, specifier in versions.items()}
    assert all(pins.values()), pins
    assert CONSTRAINTS["flashinfer-python"].specifier.contains(pins["flashinfer-python"][0])


def test_torch_and_triton_have_a_ceiling() -> None:
    """Without one, pip takes builds of several gigabytes, or a triton that torch was not made for."""
    for name in ("torch", "triton"):
        assert any(part.operator == "<" for part in CONSTRAINTS[canonicalize_name(name)].specifier)


def test_entry_points_load_without_torch() -> None:
    """Law 23's groundwork: listing plugins is cheap, whatever they would import to serve."""
    code = (
        "import sys; from importlib.metadata import entry_points;"
        "[point.load() for point in entry_points(group='enginectl') if point.dist.name.startswith('enginectl')];"
        "heavy = {'torch', 'triton', 'flashinfer', 'transformers'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_entry_points_are_unique_across_distributions() -> None:
    owners: dict[str, str] = {}
    for distribution in distributions():
        if not (distribution.name or "").startswith("enginectl"):
            continue
        for point in distribution.entry_points.select(group="enginectl"):
            assert owners.setdefault(point.name, distribution.name) == distribution.name


def test_a_plugin_that_registers_nothing_says_so() -> None:
    for path in PLUGINS:
        if "entry-points" not in project(path):
            assert "registers nothing" in (path / "README.md").read_text()


def test_bootstrap_refuses_a_python_it_cannot_use() -> None:
    result = subprocess.run(
        [
            "bash",
            "-c",
            'source <(sed "/^main \\"/d; s/^readonly venv=.*/venv=none/; /^cd /d" scripts/bootstrap.sh); make_venv',
        ],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHON": "/bin/false"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert "Python 3.11 or 3.12 is needed" in result.stderr
    assert not (ROOT / "none").exists()


@pytest.mark.parametrize("script", ["scripts/bootstrap.sh", "scripts/check.sh", ".ci/run"])
def test_scripts_are_executable_and_parse(script: str) -> None:
    assert (ROOT / script).stat().st_mode & 0o100
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True, timeout=30)


def test_the_readme_opens_with_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines[3].startswith("make serve")
    assert lines[4].startswith("make test")
    assert len(lines) < 120
