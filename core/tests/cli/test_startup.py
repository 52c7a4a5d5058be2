"""What is checked before an engine is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from enginectl.cli.startup import check_start, idle_options, launch_engine
from enginectl.config import EngineConfig, ServerConfig
from enginectl.config_sources import Resolved
from enginectl.context import Gpu, Machine
from enginectl.engine.supervisor import EngineProcess
from enginectl.errors import PluginError, UsageError
from enginectl.hookspecs import hookimpl
from enginectl.logs import LogConfig
from enginectl.plugins import Plugin, PluginHost
from enginectl.provider import Provider, Role

GPU = Gpu("Test GPU", (9, 0), 80 << 30)
ON_GPU = Machine(num_cores=1, memory_bytes=1 << 33, cpu_flags=frozenset(), gpus=(GPU,), versions={"triton": "3.9.0"})


def looks_like_a_model(path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (path / name).touch()


@pytest.mark.parametrize("part", ["attention", "op_set", "sampler"])
def test_a_gpus_part_is_refused_on_the_cpu_that_was_asked_for(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check asked what the machine has, not what --device says, so that the engine process failed later."""
    monkeypatch.setattr("enginectl.machine.detect_machine", lambda: ON_GPU)
    looks_like_a_model(tmp_path)

    def start(device: str) -> None:
        engine = EngineConfig(model=str(tmp_path), device=device, roles={part: "triton"})
        check_start(Resolved(engine, ServerConfig(), LogConfig(), {}))

    start("auto")
    with pytest.raises(PluginError, match=r"'triton'.*needs cuda, this machine has cpu"):
        start("cpu")


class Parsers:
    """A parser that needs what is not there, and one that serves."""

    @hookimpl
    def enginectl_parser(self) -> list[Provider]:
        lacks = Provider(Role.PARSER, "lacks", "nowhere:build", unsupported=lambda machine: "no grammar of its own")
        return [lacks, Provider(Role.PARSER, "serves", "nowhere:build")]


class Served(EngineProcess):
    """An engine that must not be started."""

    async def start(self) -> None:
        raise AssertionError("the engine was started")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tool_call_parser": "lacks"}, r"parser 'lacks' of plugin .* cannot serve here: no grammar of its own"),
        ({"reasoning_parser": "lacks"}, r"parser 'lacks' of plugin .* cannot serve here"),
        ({"tool_call_parser": "serves"}, r"--tool-call-parser serves: the frontend 'openai' does not turn"),
        ({"reasoning_parser": "serves"}, r"--reasoning-parser serves: the frontend 'openai' does not turn"),
    ],
)
async def test_a_parser_that_is_installed_and_of_no_use_is_refused_before_the_engine_starts(
    options: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said after the weights had been loaded."""
    looks_like_a_model(tmp_path)
    host = PluginHost(only_named=True)
    host.register(Parsers(), Plugin("parsers", "test", "1", "test"))
    monkeypatch.setattr("enginectl.cli.startup.check_plugins", lambda config, origins: host)
    monkeypatch.setattr("enginectl.engine.supervisor.EngineProcess", Served)
    engine = EngineConfig(model=str(tmp_path), device="cpu", only_plugins=True)
    resolved = Resolved(engine, ServerConfig(**options), LogConfig(), {})
    with pytest.raises(UsageError, match=words):
        await launch_engine(resolved, check_start(resolved), with_frontends=True)


def test_options_of_a_plugin_that_does_not_serve_are_warned_of() -> None:
    """`--fair.burst 3` without the fair scheduler was accepted and changed nothing. A file may keep its sections."""
    origins = {
        "scheduling_policy": "--scheduling-policy",
        "plugins": "--plugins",
        "plugins.fair.burst": "--fair.burst",
        "plugins.ngram.prompt_lookup_max": "environment variable ENGINECTL_PLUGIN_NGRAM__PROMPT_LOOKUP_MAX",
        "plugins.draft.model": "engine.toml [plugins.draft]",
        "plugins.lifo.quantum": "--lifo.quantum",
    }
    burst, lookup = idle_options(origins, {"fcfs", "lifo"})
    assert burst.startswith("--fair.burst has no effect: the plugin 'fair' serves nothing here")
    assert lookup.startswith("environment variable ENGINECTL_PLUGIN_NGRAM__PROMPT_LOOKUP_MAX has no effect")
