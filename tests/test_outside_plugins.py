"""Packages outside the repository, built and installed by pip, replace parts of the engine without touching core."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from enginectl import Engine, SamplingParams

Serve = Callable[..., Any]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

NAME = "tiny"
KEY = {"authorization": "Bearer sesame"}
MAX_TOKENS = 6

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "acme-{name}"
version = "1.2.3"

[project.entry-points.enginectl]
{points}

[tool.hatch.build.targets.wheel]
packages = ["acme_{name}"]
"""

PACKAGES = {
    "lifo": {
        "hooks": """
            import msgspec
            from enginectl import Provider, Role, hookimpl

            class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
                quantum: int = 1
                share: float = 0.5
                label: str = "none"
                strict: bool = False

            class Plugin:
                @hookimpl
                def enginectl_scheduler(self):
                    return [Provider(Role.SCHEDULER, "lifo", "acme_lifo.scheduler:build", config=Options, rank=-1)]

            plugin = Plugin()
        """,
        "scheduler": """
            import msgspec
            from enginectl.interfaces.scheduler import Scheduler

            class Lifo(Scheduler):
                def __init__(self, options):
                    self.options, self.waiting = options, {}
                def add(self, request, *, resumed):
                    self.waiting[request.key] = request
                def remove(self, request):
                    del self.waiting[request.key]
                def __len__(self):
                    return len(self.waiting)
                def candidates(self, now):
                    yield from reversed(list(self.waiting.values()))
                def controls(self):
                    return {"lifo_options": lambda arguments: msgspec.to_builtins(self.options)}

            def build(ctx):
                return Lifo(ctx.options)
        """,
    },
    "shout": {
        "hooks": """
            from enginectl import Provider, Role, hookimpl

            class Plugin:
                @hookimpl
                def enginectl_sampler(self):
                    return Provider(Role.SAMPLER, "shout", "acme_shout.sampler:build", rank=-1)

            plugin = Plugin()
        """,
        "sampler": """
            import numpy as np
            import torch
            from enginectl.interfaces.sampler import Sampler

            class Shout(Sampler):
                def add_row(self, row, params, seed, choice, prompt_len): ...
                def remove_row(self, row): ...
                def greedy_rows(self, rows):
                    return np.zeros(len(rows), np.bool_)
                def sample(self, logits, batch):
                    return torch.full((len(logits),), self.token, dtype=torch.int64)

            def build(ctx):
                from enginectl.builtin.tokenizer import Tokenizer
                sampler = Shout()
                sampler.token = Tokenizer.load(ctx.checkpoint.tokenizer_dir()).encode("A")[-1]
                return sampler
        """,
    },
    "greeter": {
        "hooks": """
            from enginectl import Provider, Role, hookimpl

            class Plugin:
                @hookimpl
                def enginectl_frontend(self):
                    return [Provider(Role.FRONTEND, "greeter", "acme_greeter.routes:build")]

            plugin = Plugin()
        """,
        "routes": """
            from starlette.responses import JSONResponse
            from starlette.routing import Route
            from enginectl.interfaces.frontend import Frontend

            class Greeter(Frontend):
                def routes(self, ctx):
                    async def greet(request):
                        return JSONResponse({"hello": request.path_params["name"]})
                    async def lifo(request):
                        return JSONResponse(await ctx.client.control("lifo_options"))
                    return [Route("/hello/{name}", greet), Route("/lifo", lifo)]

            def build(ctx):
                return Greeter()
        """,
    },
    "lottery": {
        "hooks": """
            from enginectl import Provider, Role, hookimpl

            class Plugin:
                @hookimpl
                def enginectl_scheduler(self):
                    return [
                        Provider(Role.SCHEDULER, name, f"acme_lottery.scheduler:{name}", rank=-1)
                        for name in ("unlicensed", "unready", "misfit", "misspelt", "refusing")
                    ]

            plugin = Plugin()
        """,
        "scheduler": """
            from enginectl.errors import ConfigError
            from enginectl.interfaces.scheduler import Scheduler

            class Unready(Scheduler):
                def add(self, request):
                    raise AssertionError("never reached")
                def __len__(self):
                    return 0
                def candidates(self, now):
                    return iter(())

            class Misfit(Unready):
                def remove(self, request): ...

            def unlicensed(ctx):
                raise ValueError("no license file")

            def unready(ctx):
                return Unready()

            def misfit(ctx):
                return Misfit()

            def refusing(ctx):
                raise ConfigError("--lottery.tickets: buy one")
        """,
    },
    "faulty": {
        "broken": "import a_module_that_is_not_there",
        "ancient": """
            from enginectl import Provider, Role, hookimpl

            class Plugin:
                @hookimpl
                def enginectl_sampler(self):
                    return [Provider(Role.SAMPLER, "ancient", "nowhere:build", api=0)]

            plugin = Plugin()
        """,
        "misspelt": """
            from enginectl import hookimpl

            class Plugin:
                @hookimpl
                def enginectl_schduler(self):
                    return []

            plugin = Plugin()
        """,
    },
}
"""Package to its modules. Modules named `hooks` are entry points by the package's name, those of `faulty` by their own."""

FAULTS = {
    "broken": "ModuleNotFoundError: No module named 'a_module_that_is_not_there'",
    "ancient": "was written for API version 0, this core has 1",
    "misspelt": "unknown hook 'enginectl_schduler'; did you mean 'enginectl_scheduler'?",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the packages installed by pip."""
    root = tmp_path_factory.mktemp("plugins")
    for name, modules in PACKAGES.items():
        package = root / name / f"acme_{name}"
        package.mkdir(parents=True)
        points = {module: module for module in modules} if name == "faulty" else {name: "hooks"}
        lines = "\n".join(f'{point} = "acme_{name}.{module}:plugin"' for point, module in points.items())
        (root / name / "pyproject.toml").write_text(PYPROJECT.format(name=name, points=lines))
        (package / "__init__.py").touch()
        for module, code in modules.items():
            (package / f"{module}.py").write_text(textwrap.dedent(code))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--no-compile"]
    sources = [str(root / name) for name in PACKAGES]
    subprocess.run([*pip, *offline, "--target", str(root / "site"), *sources], check=True, timeout=120)
    return root / "site"


@pytest.fixture(scope="module")
def good_site(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without the broken ones."""
    good = tmp_path_factory.mktemp("good") / "site"
    return shutil.copytree(site, good, ignore=shutil.ignore_patterns("acme_faulty*"))


@pytest.fixture(scope="module")
def server(serve_module: Serve, tiny_llama: Path, site: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All three at work beside broken ones that nobody named; options come from a flag, a variable and a file."""
    config = tmp_path_factory.mktemp("config") / "server.toml"
    config.write_text(
        'api-key = ["sesame"]\n[plugins]\nrequire = ["shout"]\n[plugins.lifo]\nlabel = "from file"\nquantum = 9\n'
    )
    arguments = ["--served-model-name", NAME, "--config", str(config), "--plugins", "lifo,shout"]
    env = {"PYTHONPATH": str(site), "ENGINECTL_PLUGIN_LIFO__SHARE": "0.25", "ENGINECTL_PLUGIN_LIFO__QUANTUM": "8"}
    return serve_module(str(tiny_llama), *arguments, "--lifo.quantum", "7", "--lifo.strict", env=env)


class TestServing:
    def test_sampler_and_scheduler_are_replaced(self, server: Any) -> None:
        body = {"model": NAME, "prompt": "hello", "max_tokens": MAX_TOKENS, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=KEY).json()
        assert answer["choices"][0]["text"] == "A" * MAX_TOKENS
        table = httpx.get(f"{server.url}/server_info", headers=KEY).json()["assembled"]
        rows = {row["role"]: (row["provider"], row["distribution"], row["version"]) for row in table}
        assert rows["sampler"] == ("shout", "acme-shout", "1.2.3")
        assert rows["scheduler"] == ("lifo", "acme-lifo", "1.2.3")
        assert ("frontend", "greeter") in {(row["role"], row["provider"]) for row in table}

    def test_a_route_is_added_and_needs_the_key(self, server: Any) -> None:
        """Law 16."""
        url = f"{server.url}/hello/you"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers=KEY).json() == {"hello": "you"}

    def test_options_arrive_typed_whatever_their_source(self, server: Any) -> None:
        """Flag over variable over file, in the engine process."""
        options = httpx.get(f"{server.url}/lifo", headers=KEY).json()
        assert options == {"quantum": 7, "share": 0.25, "label": "from file", "strict": True}

    def test_broken_plugins_that_nobody_named_cost_a_warning(self, server: Any) -> None:
        for name, fault in FAULTS.items():
            server.wait_for_line(f"warning.*'{name}' \\(acme-faulty 1.2.3\\) ignored: ")
            assert fault in server.log


class TestBrokenPlugins:
    def test_plugins_lists_them_with_their_errors(self, site: Path, enginectl: Run) -> None:
        done = enginectl("plugins", "--json", env={"PYTHONPATH": str(site)})
        assert done.returncode == 0
        assert done.stderr == ""
        rows = {row["plugin"]: row for row in json.loads(done.stdout)}
        for name, fault in FAULTS.items():
            assert rows[name]["state"] == "failed"
            assert fault in rows[name]["error"]
            assert (rows[name]["distribution"], rows[name]["version"]) == ("acme-faulty", "1.2.3")
        assert (rows["lifo"]["role"], rows["lifo"]["name"], rows["lifo"]["state"]) == (
            "scheduler",
            "lifo",
            "registered",
        )
        assert "failed" in enginectl("plugins", env={"PYTHONPATH": str(site)}).stdout

    @pytest.mark.parametrize("name", FAULTS)
    def test_a_named_one_is_refused_at_start(self, name: str, site: Path, enginectl: Run) -> None:
        """Law 23: with the plugin, its distribution, the reason, and what to do."""
        done = enginectl("serve", "M", "--plugins", name, env={"PYTHONPATH": str(site)})
        assert done.returncode == 2
        *_, message = done.stderr.splitlines()
        assert message.startswith(f"error: plugin {name!r} (acme-faulty 1.2.3) cannot be used: ")
        assert FAULTS[name] in message
        assert message.endswith("leave it out of --plugins.")
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("unlicensed", "could not build its scheduler: ValueError: no license file; fix or update"),
            ("unready", "could not build its scheduler: TypeError: Can't instantiate abstract class Unready"),
            ("misspelt", "could not build its scheduler: AttributeError: module 'acme_lottery.scheduler' has no"),
            (
                "misfit",
                "cannot serve as scheduler: Misfit.add takes (request), and is called with (request, *, resumed)",
            ),
            ("refusing", "--lottery.tickets: buy one"),
        ],
    )
    def test_one_that_cannot_be_built_or_does_not_fit_is_refused_at_start(
        self, name: str, message: str, good_site: Path, tiny_llama: Path, enginectl: Run
    ) -> None:
        """Law 23. It was a bare error with status 1, or the first request killed the engine."""
        options = ["--max-tokens", "1", "--device", "cpu", "--scheduler", name]
        done = enginectl("generate", str(tiny_llama), "hi", *options, env={"PYTHONPATH": str(good_site)})
        assert done.returncode == 2
        *_, last = done.stderr.splitlines()
        origin = "" if name == "refusing" else "plugin 'lottery' (acme-lottery 1.2.3) "
        assert last.startswith(f"error: {origin}{message}")
        assert "Traceback" not in done.stderr

    def test_a_refused_one_that_is_asked_for_by_its_part_says_why(self, site: Path, enginectl: Run) -> None:
        done = enginectl("serve", "M", "--sampler", "ancient", env={"PYTHONPATH": str(site)})
        assert done.returncode == 2
        reason = "plugin 'ancient' (acme-faulty 1.2.3) cannot be used: sampler 'ancient' was written for API version 0"
        assert f"error: no sampler 'ancient': {reason}" in done.stderr

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--plugins", "lfio"], "no plugin named 'lfio'; did you mean 'lifo'?"),
            (
                ["--lifo.quantum", "many"],
                "--lifo.quantum: quantum is 'many' (expected `int`, got `str`); allowed: a whole number",
            ),
            (["--lifo.quantom", "1"], "no option named 'quantom'; did you mean 'quantum'?"),
            (["--scheduler", "lfio"], "no scheduler named 'lfio'; did you mean 'lifo'?"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_a_wrong_name_or_option_is_refused(
        self, arguments: list[str], message: str, good_site: Path, enginectl: Run
    ) -> None:
        done = enginectl("serve", "M", *arguments, env={"PYTHONPATH": str(good_site)})
        assert done.returncode == 2
        assert message in done.stderr
        assert done.stderr.count("\n") == 1


def test_two_engines_with_different_plugins_run_in_one_process(
    good_site: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no hook is called while they decode (law 24)."""
    monkeypatch.syspath_prepend(str(good_site))
    params = SamplingParams(temperature=0.0, max_tokens=33, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 4}
    with (
        Engine(str(tiny_llama), **options) as plain,
        Engine(
            str(tiny_llama), plugins=["shout"], plugin_options={"lifo": {"quantum": 3}}, scheduler="lifo", **options
        ) as odd,
    ):
        expected = plain.generate("hi", params)[0].outputs[0].text
        first, second = plain.stream("hi", params), odd.stream("hi", params)
        texts = [next(first).text, next(second).text]
        calls: list[str] = []
        for engine in (plain, odd):
            engine._host._manager.add_hookcall_monitoring(lambda name, *_: calls.append(name), lambda *_: None)
        for _ in range(31):  # in turn
            texts[0] += next(first).text
            texts[1] += next(second).text
        assert calls == []
        texts[0] += "".join(chunk.text for chunk in first)
        texts[1] += "".join(chunk.text for chunk in second)
        assert texts == [expected, "A" * 33]
        assert set(calls) == {"enginectl_request_finished"}
        assert odd.core.scheduler.options.quantum == 3
