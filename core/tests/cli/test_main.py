"""Exit statuses and messages, and how fast the command line answers."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import enginectl
from enginectl import hookimpl
from enginectl.cli import main
from enginectl.cli.app import _add_plugin_commands, build_app
from enginectl.cli.config import as_toml
from enginectl.config import EngineConfig
from enginectl.config_aliases import check_promises
from enginectl.config_sources import resolve
from enginectl.errors import PluginError
from enginectl.plugins import Plugin, PluginHost

NOT_OURS = frozenset({"--merge"})
"""Flags of other programs that messages name."""

HEAVY = ("torch", "transformers", "starlette", "uvicorn", "triton", "numpy", "tokenizers", "asyncio")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENGINECTL_CONFIG", "ENGINECTL_DEBUG", "ENGINECTL_MODEL", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(line.split())
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("line", ["", "bench"])
def test_no_command_shows_the_help_and_no_error(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It began with `error: enginectl: Usage:`."""
    status, out, err = run(line, capsys)
    assert (status, out) == (2, "")
    assert err.startswith("Usage: enginectl")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "serve",
        "generate",
        "chat",
        "plugins",
        "doctor",
        "config",
        "capacity",
        "simulate",
        "bench serve",
        "bench fit",
    ],
)
def test_help_cuts_no_line_and_names_no_python_type(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(f"{line} --help", capsys)
    assert status == 0
    usage, *lines = out.splitlines()
    assert not [line for line in lines if line.endswith("...") or re.search(r"<\w", line)]
    assert usage.startswith("Usage: ")


class TestWrongInvocations:
    """Every one is a single message on standard error, says what to do, and starts nothing."""

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("serve", "no model: give MODEL on the command line, ENGINECTL_MODEL"),
            (
                "serve M --max-model-length 5",
                "enginectl serve: no such flag --max-model-length; did you mean '--max-model-len'?",
            ),
            ("serve M --no-enable-prefix-cachin", "did you mean '--no-enable-prefix-caching'?"),
            ("serve M --xyzzy", "enginectl serve: no such flag --xyzzy; `enginectl serve --help` lists them"),
            (
                "serve M --max-model-len many",
                "--max-model-len: max_model_len is 'many'; allowed: a whole number, or auto",
            ),
            ("serve M --max-model-len", "requires an argument"),
            ("serve M extra", "unexpected extra argument"),
            ("serve M --block-size 24", "--block-size: block_size is 24; allowed: a power of two from 1 to 256"),
            ("serve M --dtype bfloat61", "did you mean 'bfloat16'?"),
            ("serve M --kv-cache-memory-bytes 4lb", "--kv-cache-memory-bytes: kv_cache_memory_bytes"),
            ("serve M --gpu-memory-utilization 0", "allowed: more than 0, at most 1"),
            ("serve M --tensor-parallel-size 2", "no installed executor provides it"),
            ("serve M --lora-modules x=y", "enable_lora is off"),
            ("serve M --lora-modules x", "allowed: NAME=PATH"),
            ("serve M --speculative-config {}", "method is None"),
            ("serve M --speculative-config ngram", "allowed: a JSON object"),
            ("serve M --plugins trition,fcfs", "--plugins: no plugin named 'trition'"),
            ("serve M --fcsf.x 1", "--fcsf.x: no plugin named 'fcsf'; did you mean 'fcfs'?"),
            ("serve M --fcfs.x 1 --fcfs.x 2", "given twice"),
            ("serve M --paged.x 1", "takes no options"),
            ("serve M --config /no/such/file.toml", "cannot be read: No such file"),
            ("serve M --log-level loud", "allowed: debug, info, warning, error"),
            ("serve M --port 70000", "allowed: 0 (any free port) to 65535"),
            ('serve M --structured-outputs-config {"backnd":1}', "No such"),
            ("generate M --temperature 9 hi", "--temperature is 9.0; allowed: 0 to 2"),
            ("generate M --format xml hi", "--format is 'xml'; allowed: text, jsonl"),
            ("generate M --input /no/such.jsonl", "--input /no/such.jsonl: cannot be read"),
            ("generate M hi --input x.jsonl", "give one of them"),
            ("generate M --port 1 hi", "no such flag --port"),
            ("plugins --role atention", "no role named 'atention'; did you mean 'attention'?"),
            ("config", "no model"),
            ("serv M", "No such command 'serv'"),
        ],
    )
    def test_status_2_and_a_message(self, line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
        status, out, err = run(line, capsys)
        assert message.lower() in err.lower()
        assert status == 2
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert "Traceback" not in err

    def test_debug_adds_the_traceback(self, capsys: pytest.CaptureFixture[str]) -> None:
        status, _, err = run("serve --debug", capsys)
        assert status == 2
        assert "Traceback" in err
        assert "error: no model" in err

    def test_what_nobody_foresaw_is_status_1_and_a_hint(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(**_: Any) -> None:
            raise ZeroDivisionError("by zero")

        monkeypatch.setattr("enginectl.machine.detect_machine", lambda: fail())
        status, out, err = run("doctor", capsys)
        assert (status, out) == (1, "")
        assert err.startswith("error: internal error: ZeroDivisionError: by zero\nhint: ")
        assert "--debug" in err
        assert "Traceback" not in err

    def test_ctrl_c_is_130(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("enginectl.machine.detect_machine", interrupt)
        assert run("doctor", capsys)[0] == 130


class TestAnswers:
    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        from enginectl import __version__

        assert run("version", capsys) == (0, f"enginectl {__version__}\n", "")
        assert run("--version", capsys) == (0, f"enginectl {__version__}\n", "")

    def test_plugins_as_json_names_who_provides_what(self, capsys: pytest.CaptureFixture[str]) -> None:
        status, out, _ = run("plugins --json", capsys)
        rows = json.loads(out)
        assert status == 0
        assert {"role", "name", "plugin", "distribution", "version", "state", "error"} == set(rows[0])
        assert ("scheduler", "fcfs", "enginectl") in {(row["role"], row["name"], row["distribution"]) for row in rows}

    def test_plugins_of_one_role_as_a_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        _, out, _ = run("plugins --role kv-allocator", capsys)
        header, *rows = out.splitlines()
        assert header.split()[:4] == ["role", "name", "plugin", "distribution"]
        assert {row.split()[0] for row in rows} == {"kv_allocator"}

    def test_doctor_gives_a_reason_for_all_that_cannot_serve(self, capsys: pytest.CaptureFixture[str]) -> None:
        status, out, _ = run("doctor --json", capsys)
        report = json.loads(out)
        assert status == 0
        assert report["machine"]["cores"] >= 1
        assert report["machine"]["memory_bytes"] > 0
        assert all((row["serves"] == "yes") == (row["reason"] == "") for row in report["providers"])
        assert run("doctor", capsys)[1].startswith("fact")

    def test_help_of_every_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        for command in ("serve", "generate", "chat", "plugins", "doctor", "config", "capacity", "version"):
            status, out, err = run(f"{command} --help", capsys)
            assert (status, err) == (0, "")
            assert f"enginectl {command}" in out

    def test_help_cuts_no_flag_on_a_narrow_terminal(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """At 80 columns, `--max-num-batched-tokens` was shown as `--max-num-batched-t…`."""
        monkeypatch.setenv("COLUMNS", "80")
        app: Any = typer.main.get_command(build_app())
        for command in ("serve", "generate", "chat", "config", "simulate"):
            out = run(f"{command} --help", capsys)[1]
            for param in app.commands[command].params:
                assert all(name in out for name in (*param.opts, *param.secondary_opts) if name.startswith("--")), param
            assert max(map(len, out.splitlines())) <= 80

    def test_speculators_serve_when_asked_for(self, capsys: pytest.CaptureFixture[str]) -> None:
        """`doctor` said that one would serve by itself, and that it outranked the others."""
        rows = json.loads(run("doctor --json", capsys)[1])["providers"]
        found = {row["role"]: row for row in rows if row["role"] in ("speculator", "adapter")}
        assert all(row["serves"] == "if named" and "when asked for with --" in row["reason"] for row in found.values())


def test_messages_name_only_flags_that_exist() -> None:
    """`tools` advised a flag that was always refused, and `chat` one that it does not have."""
    group: Any = typer.main.get_command(build_app())
    known = {"--help", "--plugin.option", "--speculative-config.key"}
    for command in (group, *group.commands.values(), *group.commands["bench"].commands.values()):
        known |= {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    plugins = {plugin.name for plugin in PluginHost().plugins.values()}
    named = set()
    source = Path(enginectl.__file__).parent
    style_sheet, kit = source / "loadtest" / "page.py", source / "testing"
    for path in {path for path in source.rglob("*.py") if path != style_sheet and kit not in path.parents}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= set(re.findall(r"(?<![\w-])--[a-z][a-z0-9.-]*[a-z0-9](?![\w-])", node.value))
    unknown = {flag for flag in named - known if flag[2:].partition(".")[0] not in plugins}
    assert unknown <= NOT_OURS


class TestConfigCommand:
    def test_toml_resolves_to_the_same_configuration(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        line = (
            "config M --max-num-seqs 8 --dtype bf16 --kv-cache-memory-bytes 4GiB --plugins fcfs --attention torch "
            "--served-model-name s --no-log-requests"
        )
        first = json.loads(run(f"{line} --json", capsys)[1])
        toml = tmp_path / "c.toml"
        toml.write_text(run(line, capsys)[1])
        again = json.loads(run(f"config --config {toml} --json", capsys)[1])
        assert again["values"] == first["values"]
        assert first["values"]["kv_cache_memory_bytes"] == 4 << 30
        everything = tmp_path / "all.toml"
        everything.write_text(run(f"{line} --all", capsys)[1])
        assert json.loads(run(f"config --config {everything} --json", capsys)[1])["values"] == first["values"]

    def test_tables_resolve_to_the_same_configuration(self, tmp_path: Path) -> None:
        flags = {
            "model": "M",
            "enable_lora": True,
            "lora_modules": ["a.b=/x", "ü=/y"],
            "plugins": ["n-gram"],
            "sampler": "s",
        }
        sections = {"n-gram": {"k": "4", "name": 'quote " and \\'}}
        first = resolve(flags, plugin_flags=sections, environ={}, installed=["n-gram"])
        toml = tmp_path / "c.toml"
        toml.write_text("\n".join(as_toml(first, everything=False)), encoding="utf-8")
        again = resolve({}, environ={}, config_file=toml, installed=["n-gram"])
        assert again.engine == first.engine
        assert again.engine.lora_modules == {"a.b": "/x", "ü": "/y"}

    def test_origins(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ENGINECTL_SEED", "5")
        report = json.loads(run("config M --port 1 --json", capsys)[1])
        assert report["origins"]["seed"] == "environment variable ENGINECTL_SEED"
        assert report["origins"]["port"] == "--port"
        assert report["origins"]["model"] == "MODEL"
        assert report["origins"]["host"] == "default"
        assert "seed = 5  # environment variable ENGINECTL_SEED" in run("config M", capsys)[1]

    def test_keys_are_never_printed(self, capsys: pytest.CaptureFixture[str]) -> None:
        for form in ("", "--json", "--all"):
            _, out, _ = run(f"config M --api-key sesame --admin-api-key open {form}", capsys)
            assert "sesame" not in out
            assert "open" not in out.replace("openai", "")
            assert "1 hidden" in out


@pytest.mark.parametrize(
    ("fields", "package"),
    [
        ({"enable_lora": True}, "enginectl-lora-sgmv"),
        ({"enable_prefix_caching": True}, "enginectl-prefix-cache"),
    ],
    ids=["--enable-lora", "--enable-prefix-caching"],
)
def test_a_flag_whose_plugin_is_missing_names_the_package(fields: dict[str, bool], package: str) -> None:
    with pytest.raises(PluginError, match=f"pip install {package}"):
        check_promises(EngineConfig(model="M", **fields), PluginHost(only_named=True))  # type: ignore[arg-type]


def test_plugins_add_commands_and_replace_none(capsys: pytest.CaptureFixture[str]) -> None:
    """A plugin whose hook raises costs a warning, not the command line."""
    app = typer.Typer()

    def greet() -> None:
        """Say hello."""

    class Good:
        @hookimpl
        def enginectl_commands(self, app: typer.Typer) -> None:
            app.command("greet")(greet)
            app.command("serve")(greet)

    class Bad:
        @hookimpl
        def enginectl_commands(self, app: typer.Typer) -> None:
            raise RuntimeError("boom")

    host = PluginHost()
    host.register(Good(), Plugin("good", "dist", "1", "x"))
    host.register(Bad(), Plugin("bad", "dist", "1", "x"))
    app.command("serve")(lambda: None)
    _add_plugin_commands(app, host)
    assert [command.name for command in app.registered_commands] == ["serve", "greet"]
    assert app.registered_commands[0].callback is not greet
    assert capsys.readouterr().err == "warning: plugin 'bad' adds no commands: boom\n"


class TestStartUp:
    @pytest.mark.parametrize("line", [["--help"], ["plugins"], ["doctor"], ["config", "M"], ["serve", "--help"]])
    def test_nothing_heavy_is_imported(self, line: list[str]) -> None:
        code = (
            "import sys\nfrom enginectl.cli import main\n"
            f"status = main({line!r})\nprint(status, *sorted(set(sys.modules) & set({HEAVY!r})), file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stderr.split() == ["0"]

    @pytest.mark.parametrize("line", [["--help"], ["plugins"]])
    def test_it_answers_at_once(self, line: list[str]) -> None:
        """Half a second is the aim; the bound leaves room for a machine that is busy with other tests, and what counts
        is the processor's time.
        """
        command = [sys.executable, "-c", "from enginectl.cli import main; raise SystemExit(main())", *line]
        times = []
        for _ in range(3):
            before = os.times()
            subprocess.run(command, capture_output=True, check=True)
            after = os.times()
            spent = after.children_user + after.children_system - before.children_user - before.children_system
            times.append(spent)
        assert min(times) < 1.0
