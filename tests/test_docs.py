"""The documentation says what the code does: generated pages are up to date, links lead somewhere, and code runs."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from enginectl import errors
from enginectl.builtin.openai import protocol
from enginectl.builtin.openai.openapi import describe_routes
from enginectl.builtin.prometheus import PrometheusFrontend, PrometheusObserver
from enginectl.config import EngineConfig, ServerConfig
from enginectl.hookspecs import HookSpecs
from enginectl.plugins import Plugin, PluginHost
from enginectl.provider import Role
from enginectl.server import OPENAPI_PATH, build_app
from enginectl.testing.architectures import ARCHITECTURES, REFUSALS
from enginectl.testing.fake_client import FakeClient
from enginectl.types import FinishedRequest, FinishReason, Timings, Usage

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "core" / "README.md"]
PLUGIN_READMES = sorted(ROOT.glob("plugins/*/README.md"))

_BLOCK = re.compile(r"^(?:`(?P<file>[^`\n]+)`:\n\n)?```(?P<kind>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]\n]+\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. file: the name on the line before it, if there is one."""

    kind: str
    code: str
    file: str | None


def blocks(page: Path) -> list[Block]:
    return [Block(m["kind"], m["code"], m["file"]) for m in _BLOCK.finditer(page.read_text(encoding="utf-8"))]


def without_code(text: str) -> str:
    """The text a reader sees as text: links in it are links."""
    return re.sub(r"(`+)[^`]+\1", "", _BLOCK.sub("", text))


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as code hosts make them."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


# -- pages -------------------------------------------------------------------------------------------------------------


def test_generated_pages_are_up_to_date() -> None:
    result = subprocess.run(
        [sys.executable, "scripts/gen_reference.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", [*PAGES, *PLUGIN_READMES], ids=relative)
def test_internal_links_lead_somewhere(page: Path) -> None:
    for match in _LINK.finditer(without_code(page.read_text(encoding="utf-8"))):
        target, _, anchor = match["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{match[0]} leads nowhere"
        assert not anchor or anchor in anchors(path), f"{match[0]}: no heading {anchor!r} in {relative(path)}"


def test_every_page_can_be_reached_from_the_map() -> None:
    seen: set[Path] = set()
    waiting = [DOCS / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        for match in _LINK.finditer(without_code(page.read_text(encoding="utf-8"))):
            target = match["target"].partition("#")[0]
            if target and not re.match(r"[a-z]+:", target):
                waiting.append((page.parent / target).resolve())
    assert set(DOCS.rglob("*.md")) - seen == set()


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_python_in_the_pages_parses(page: Path) -> None:
    for block in blocks(page):
        if block.kind == "python":
            ast.parse(block.code)


def readme_block(start: str) -> str:
    return next(block.code for block in blocks(ROOT / "README.md") if block.code.startswith(start))


def test_readme_observer_prints_slow_requests(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(readme_block("# slow_log/observer.py"), names)
    observer = names["build"](None)
    reasons, usage = (FinishReason.STOP, FinishReason.ABORT), Usage(3, 4)
    timings = (Timings(1.0, 1.0, 2.0, 21.5, 0), Timings(1.0, 0.0, 0.0, 2.0, 0))
    observer.on_finished(FinishedRequest(request_id="r-1", reasons=reasons, usage=usage, timings=timings))
    assert capsys.readouterr().out == "r-1: 20.5 s\n"


def test_readme_plugin_registers() -> None:
    names: dict[str, Any] = {}
    exec(readme_block("# slow_log/hooks.py"), names)
    host = PluginHost()
    host.register(SimpleNamespace(**names), Plugin("slow-log", "slow-log", "1", "slow_log.hooks"))
    assert host.entry(Role.OBSERVER, "slow-log").plugin.name == "slow-log"


@pytest.mark.slow
@pytest.mark.model
def test_readme_python_example_names_paris(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = readme_block("from enginectl import Engine")
    assert demo_model.name in code
    exec(code.replace(f".cache/models/{demo_model.name}", str(demo_model)), {})
    assert "Paris" in capsys.readouterr().out


# -- reference ---------------------------------------------------------------------------------------------------------


def test_every_hook_is_documented() -> None:
    page = (REFERENCE / "hooks.md").read_text(encoding="utf-8")
    for name, hook in vars(HookSpecs).items():
        if name.startswith("enginectl_"):
            assert hook.__doc__, f"{name} has no docstring"
            assert "Called:" in hook.__doc__, f"{name} does not say when it is called"
            assert f"### `{name}(" in page


def test_every_configuration_key_has_a_meaning() -> None:
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", (REFERENCE / "config.md").read_text(encoding="utf-8"), re.MULTILINE)
    empty = [name for name, rest in rows if not re.split(r"(?<!\\)\|", rest)[2].strip()]
    assert empty == []
    assert {*EngineConfig.__struct_fields__, *ServerConfig.__struct_fields__} <= {name for name, _ in rows}


def test_every_public_error_is_documented() -> None:
    page = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert f"`{name}`" in page


def test_http_reference_has_every_route_and_field() -> None:
    page = (REFERENCE / "http-api.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(?:(?:GET|POST) )?([/\w{}.]+)`", page))
    routes = {*describe_routes()["paths"], *PrometheusFrontend().openapi()["paths"], OPENAPI_PATH}
    assert routes - documented == set()
    for struct in (
        protocol.ChatRequest,
        protocol.CompletionRequest,
        protocol.TokenizeRequest,
        protocol.DetokenizeRequest,
        protocol.LoadAdapterRequest,
        protocol.UnloadAdapterRequest,
    ):
        assert set(struct.__struct_fields__) - documented == set(), struct.__name__


async def test_the_metrics_table_is_what_a_scrape_shows() -> None:
    page = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `enginectl:(\w+)` \| (\w+) \|", page, re.MULTILINE)
    app = build_app(
        FakeClient(), None, EngineConfig(model="m"), ServerConfig(), [PrometheusFrontend()], [PrometheusObserver()]
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        text = (await http.get("/metrics")).text
    families = {family.name: family.type for family in text_string_to_metric_families(text)}
    documented = {
        f"enginectl:{name.removesuffix('_total') if kind == 'counter' else name}": kind for name, kind in rows
    }
    assert documented == families


def test_the_table_of_architectures_lists_exactly_the_registry() -> None:
    """Each with a result as the registry says, found with one transformers; the sweep itself is not run here."""
    results = json.loads((REFERENCE / "architectures.json").read_text(encoding="utf-8"))
    assert list(results) == [*ARCHITECTURES, *REFUSALS]
    page = (REFERENCE / "architectures.md").read_text(encoding="utf-8")
    exact, refused = page.split("## Exact")[1].split("## Refused")
    assert re.findall(r"^\| (\w+) \| `", exact, re.MULTILINE) == list(ARCHITECTURES)
    assert re.findall(r"^\| `([\w-]+)` \|", refused, re.MULTILINE) == [each.model_type for each in REFUSALS.values()]
    for name, architecture in ARCHITECTURES.items():
        found = results[name]
        assert "wrong" not in found, f"{name}: {found['wrong']}"
        assert (found["type"], found["route"]) == (architecture.model_type, architecture.route)
        assert found["traits"] == sorted(architecture.traits)
        assert found.get("native", False) is architecture.native
    assert all("refused" in results[name] for name in REFUSALS)
    assert len({found["transformers"] for found in results.values()}) == 1


# -- tutorials ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from enginectl.testing.tiny_models import save_tiny_model

    return save_tiny_model("llama", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def shell(tmp_path: Path, tiny_model: Path) -> dict[str, str]:
    """The environment of a reader: `pip` installs into a directory of its own, MODEL is a tiny random model."""
    site, tools = tmp_path / "site", tmp_path / "bin"
    tools.mkdir()
    pip = f'"{sys.executable}" -m pip --disable-pip-version-check "$@" --quiet --no-deps --no-build-isolation --target "{site}"'
    enginectl = f'"{sys.executable}" -c "import sys; from enginectl.cli import main; sys.exit(main())" "$@"'
    for name, command in {"pip": pip, "enginectl": enginectl, "python": f'"{sys.executable}" "$@"'}.items():
        (tools / name).write_text(f"#!/bin/sh\nexec {command}\n", encoding="utf-8")
        (tools / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ENGINECTL_", "COV_"))}
    return {
        **kept,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(site),
        "MODEL": str(tiny_model),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        "NO_COLOR": "1",
    }


def shown(text: str) -> Iterator[str]:
    """Lines as they are compared: without the width of columns, and without empty ones."""
    return (" ".join(line.split()) for line in text.splitlines() if line.strip())


def test_first_plugin_tutorial_runs_and_shows_what_it_says(tmp_path: Path, shell: dict[str, str]) -> None:
    """Every block is used: files are written, commands run in order, and `text` blocks are in the output above them."""
    work = tmp_path / "work"
    output = ""
    for block in blocks(DOCS / "tutorials" / "first-plugin.md"):
        if block.file is not None:
            path = work / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code, encoding="utf-8")
        elif block.kind == "sh":
            result = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.code],
                cwd=work,
                env=shell,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=120,
            )
            output = result.stdout
            assert result.returncode == 0, output
        else:
            assert block.kind == "text", f"a block that is not used:\n{block.code}"
            lines = list(shown(output))
            places = [lines.index(line) for line in shown(block.code)]
            assert places == sorted(places), output
