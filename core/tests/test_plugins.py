"""PluginHost: what is found, what is refused and why, who serves."""

from __future__ import annotations

import logging
import textwrap
import tomllib
import zlib
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec
import pytest

from enginectl import plugins as plugins_module
from enginectl.context import Machine
from enginectl.errors import ConfigError, PluginError, UnsupportedError
from enginectl.packages import BRING, PACKAGES
from enginectl.plugins import PluginHost
from enginectl.provider import Role

Install = Callable[..., None]

MACHINE = Machine(num_cores=1, memory_bytes=1 << 30, cpu_flags=frozenset())
HEAD = """
import msgspec
from enginectl import Provider, Role, hookimpl
from enginectl.provider import Capabilities
"""
ALPHA = """
@hookimpl
def enginectl_attention():
    return [Provider(Role.ATTENTION, "alpha", "nowhere:build", rank=5)]
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Install:
    """`install("dist", "1.2", name="code", …)`: a distribution whose entry points are modules of this code."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(distribution: str, version: str = "1.0", **plugins: str) -> None:
        lines = ["[enginectl]"]
        for name, code in plugins.items():
            module = f"fake_{zlib.crc32(f'{request.node.nodeid} {distribution} {name}'.encode())}"
            (tmp_path / f"{module}.py").write_text(HEAD + textwrap.dedent(code))
            lines.append(f"{name} = {module}")
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")

    return make


def failure(host: PluginHost, name: str) -> str:
    """Why an installed but unnamed plugin is not used."""
    (row,) = (row for row in host.describe() if row["plugin"] == name and row["state"] == "failed")
    return row["error"]


def test_an_installed_plugin_is_found_with_its_origin(install: Install) -> None:
    """Law 23: provenance; the highest rank serves, and the others are told why they do not."""
    install("third-party", "1.2", alpha=ALPHA)
    host = PluginHost()
    selection = host.select(Role.ATTENTION, MACHINE)
    (chosen,) = selection.chosen
    assert (chosen.provider.name, chosen.plugin.origin) == ("alpha", "'alpha' (third-party 1.2)")
    assert ("torch", "torch", "rank 0 is lower") in selection.skipped
    row = next(row for row in host.describe() if row["plugin"] == "alpha")
    assert row == {
        "role": "attention",
        "name": "alpha",
        "plugin": "alpha",
        "distribution": "third-party",
        "version": "1.2",
        "state": "registered",
        "error": "",
    }


def test_an_unknown_name_is_an_error_with_the_nearest() -> None:
    with pytest.raises(PluginError, match=r"no plugin named 'tokenisers'; did you mean 'tokenizers'\?.*Install"):
        PluginHost(["tokenisers"])
    with pytest.raises(PluginError, match="no kv allocator named 'pagde'; did you mean 'paged'"):
        PluginHost().entry(Role.KV_ALLOCATOR, "pagde")


def test_one_of_ours_that_is_not_installed_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--attention flashinfer` without the plugin said to install "the package that brings it"."""
    rest = [point for point in entry_points(group="enginectl") if point.name != "flashinfer"]
    monkeypatch.setattr(plugins_module, "entry_points", lambda group: rest)
    command = "pip install enginectl-attention-flashinfer"
    with pytest.raises(PluginError, match=f"no plugin named 'flashinfer'; .*{command}"):
        PluginHost(["flashinfer"])
    for role in (Role.ATTENTION, Role.OP_SET):
        with pytest.raises(PluginError, match=f"named 'flashinfer'; .*{command}"):
            PluginHost().entry(role, "flashinfer")


def test_the_packages_that_are_named_are_all_we_publish() -> None:
    """Each under the name of its plugin."""
    folders = (Path(__file__).resolve().parents[2] / "plugins").glob("*/pyproject.toml")
    found: dict[str, str] = {}
    for path in folders:
        project = tomllib.loads(path.read_text())["project"]
        found |= dict.fromkeys(project["entry-points"]["enginectl"], project["name"])
    assert found == PACKAGES


def test_the_plugins_that_bring_a_role_bring_it() -> None:
    """They are what a flag without its plugin says to install."""
    host = PluginHost()
    brought = {(role.value, entry.plugin.name) for role in Role for entry in host.catalogue[role].values()}
    assert {(role, plugin) for role, plugins in BRING.items() for plugin in plugins} <= brought
    assert {plugin for plugins in BRING.values() for plugin in plugins} <= set(PACKAGES)


def test_a_refused_plugin_that_is_asked_for_says_why_it_was_refused(install: Install) -> None:
    """Core knew the reason and said "no scheduler named 'bad'; did you mean …"."""
    provider = "Provider(Role.{role}, '{name}', 'm:f', api=7)"
    scheduler, adapter = provider.format(role="SCHEDULER", name="fate"), provider.format(role="ADAPTER", name="lora")
    install("third-party", "0.3", bad=f"@hookimpl\ndef enginectl_scheduler(): return {scheduler}")
    install("another", "2", worse=f"@hookimpl\ndef enginectl_adapter(): return {adapter}")
    host = PluginHost(only_named=False)
    words = r"'bad' \(third-party 0\.3\) cannot be used: scheduler 'fate' was written for API version 7.*choose another"
    for name in ("bad", "fate"):
        with pytest.raises(PluginError, match=f"no scheduler '{name}': plugin {words}"):
            host.entry(Role.SCHEDULER, name)
    with pytest.raises(PluginError, match="no scheduler named 'bda'; known: fair"):
        host.entry(Role.SCHEDULER, "bda")
    words = r"--enable-lora: plugin 'worse' \(another 2\) cannot be used: adapter 'lora' was written for"
    with pytest.raises(PluginError, match=words):
        raise host.missing(Role.ADAPTER, "--enable-lora")


BROKEN = {
    "raises when imported": ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
    "misses a module": ("import not_installed_anywhere", "ModuleNotFoundError: .*not_installed_anywhere"),
    "misspells a hook": (
        "def enginectl_atention(): return []",
        "unknown hook 'enginectl_atention'; did you mean 'enginectl_attention'",
    ),
    "misspells a marked hook": ("@hookimpl\ndef enginectl_atention(): return []", "unknown hook 'enginectl_atention'"),
    "asks for an argument no hook has": (
        "@hookimpl\ndef enginectl_attention(ctx): return []",
        "enginectl_attention.*ctx",
    ),
    "raises in its hook": ("@hookimpl\ndef enginectl_sampler(): return 1 / 0", "ZeroDivisionError"),
    "returns something else": (
        "@hookimpl\ndef enginectl_sampler(): return ['torch']",
        "returned str, expected Provider",
    ),
    "offers another role": (
        "@hookimpl\ndef enginectl_sampler(): return [Provider(Role.WEIGHTS, 'x', 'm:f')]",
        "enginectl_sampler returned a provider for the role 'weights'",
    ),
    "was written for another API": (
        "@hookimpl\ndef enginectl_sampler(): return [Provider(Role.SAMPLER, 'x', 'm:f', api=7)]",
        "sampler 'x' was written for API version 7, this core has 1",
    ),
    "takes a name of core's": (
        "@hookimpl\ndef enginectl_sampler(): return [Provider(Role.SAMPLER, 'torch', 'm:f')]",
        r"sampler 'torch' is already provided by 'torch' \(enginectl",
    ),
    "offers a name twice": (
        "@hookimpl\ndef enginectl_sampler(): return [Provider(Role.SAMPLER, 'x', 'm:f'), Provider(Role.SAMPLER, 'x', 'm:g')]",
        "sampler 'x' is offered twice",
    ),
    "has options that may change": (
        "class Options(msgspec.Struct, forbid_unknown_fields=True): ...\n"
        "@hookimpl\ndef enginectl_sampler(): return [Provider(Role.SAMPLER, 'x', 'm:f', config=Options)]",
        "must be a frozen msgspec.Struct",
    ),
    "has options that take anything": (
        "class Options(msgspec.Struct, frozen=True): ...\n"
        "@hookimpl\ndef enginectl_sampler(): return [Provider(Role.SAMPLER, 'x', 'm:f', config=Options)]",
        "forbid_unknown_fields=True",
    ),
    "has two classes of options": (
        "class A(msgspec.Struct, frozen=True, forbid_unknown_fields=True): ...\n"
        "class B(msgspec.Struct, frozen=True, forbid_unknown_fields=True): ...\n"
        "@hookimpl\ndef enginectl_sampler(): return [Provider(Role.SAMPLER, c.__name__, 'm:f', config=c) for c in (A, B)]",
        "share one config class",
    ),
}


@pytest.mark.parametrize(("code", "words"), BROKEN.values(), ids=BROKEN)
def test_a_plugin_that_cannot_be_used(
    code: str, words: str, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    """Law 23. Named: an error with its name, distribution and reason. Installed only: a warning, and it is listed.

    Nothing of it stays: pluggy kept the hooks of a plugin whose signature it had refused.
    """
    code += "\n@hookimpl\ndef enginectl_request_finished(request): raise AssertionError('still registered')\n"
    install("third-party", "0.3", bad=code)
    with caplog.at_level(logging.WARNING, "enginectl.plugins"):
        host = PluginHost()
    assert "'bad' (third-party 0.3)" in caplog.text
    with pytest.raises(PluginError, match=r"(?s)'bad' \(third-party 0\.3\).*" + words):
        PluginHost(["bad"])
    assert failure(host, "bad")
    assert all(entry.plugin.name != "bad" for entries in host.catalogue.values() for entry in entries.values())
    host.hook.enginectl_request_finished(request=None, finished=None)
    PluginHost(["torch"], only_named=True)  # and it does not stand in the way


def test_two_distributions_with_one_name(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    """The second is refused, whoever sorts first; core's own always wins."""
    install("b-dist", "2", same=ALPHA)
    install("a-dist", "1", same="", torch="")
    host = PluginHost()
    assert host.plugins["same"].distribution == "a-dist"
    assert host.plugins["torch"].is_core
    assert "name is taken by 'same' (a-dist 1)" in caplog.text
    with pytest.raises(PluginError, match=r"'same' \(b-dist 2\).*taken by 'same' \(a-dist 1\)"):
        PluginHost(["same"])


def test_named_plugins_win_their_roles_and_may_not_compete(install: Install) -> None:
    beta = ALPHA.replace("alpha", "beta").replace("rank=5", "rank=-1")
    install("third-party", alpha=ALPHA, beta=beta)
    assert PluginHost().select(Role.ATTENTION, MACHINE).chosen[0].provider.name == "alpha"
    named = PluginHost(["beta"])
    assert named.select(Role.ATTENTION, MACHINE).chosen[0].provider.name == "beta"
    assert named.select(Role.ATTENTION, MACHINE, "alpha").chosen[0].provider.name == "alpha"
    skipped = {name: why for name, _, why in PluginHost().select(Role.ATTENTION, MACHINE).skipped}
    assert skipped["beta"] == "serves only when named"
    hidden = PluginHost(["beta"], only_named=True)
    assert "alpha" not in hidden.plugins
    assert "torch" in hidden.plugins
    sampler = "\n@hookimpl\ndef enginectl_scheduler(): return Provider(Role.SCHEDULER, '{0}', 'm:f')\n"
    install("more", one=sampler.format("one"), two=sampler.format("two"))
    with pytest.raises(PluginError, match=r"'one'.* and 'two'.* both provide the role 'scheduler'; name one with"):
        PluginHost(["one", "two"]).select(Role.SCHEDULER, MACHINE)


def test_what_cannot_serve_here_is_skipped_or_refused(install: Install) -> None:
    """Unnamed: the next rank serves and the table says why. Named: an error with the reason."""
    refusing = """
    @hookimpl
    def enginectl_attention():
        return [Provider(Role.ATTENTION, "gpu", "m:f", rank=9, capabilities=Capabilities(devices=frozenset({"cuda"})))]
    @hookimpl
    def enginectl_sampler():
        return [Provider(Role.SAMPLER, "picky", "m:f", rank=9, unsupported=lambda machine: "needs 64 cores")]
    @hookimpl
    def enginectl_scheduler():
        return [Provider(Role.SCHEDULER, "crash", "m:f", rank=9, unsupported=lambda machine: 1 / 0)]
    """
    install("third-party", picky=refusing)
    host = PluginHost()
    for role, name, why, serves in (
        (Role.ATTENTION, "gpu", "needs cuda, this machine has cpu", "torch"),
        (Role.SAMPLER, "picky", "needs 64 cores", "torch"),
        (Role.SCHEDULER, "crash", "its check failed: ZeroDivisionError: division by zero", "fcfs"),
    ):
        selection = host.select(role, MACHINE)
        assert selection.chosen[0].provider.name == serves
        assert (name, "picky", why) in selection.skipped
        with pytest.raises(UnsupportedError, match=rf"{role.value} '{name}'.*\(third-party 1\.0\).*{why}"):
            host.select(role, MACHINE, name)
        with pytest.raises(UnsupportedError, match=why):
            PluginHost(["picky"]).select(role, MACHINE)


def test_a_plugins_own_section_is_typed_and_strict(install: Install) -> None:
    code = """
    class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        num_drafts: int = 4
        method: str = "a"
        roots: tuple[str, ...] = ()
        tickets: dict[str, int] | None = None
    @hookimpl
    def enginectl_sampler():
        return [Provider(Role.SAMPLER, "opt", "m:f", config=Options)]
    """
    install("third-party", opt=code)
    host = PluginHost()
    plugin = host.plugins["opt"]
    assert host.options(plugin, {}).num_drafts == 4
    options = host.options(plugin, {"opt": {"num-drafts": "7", "method": "b"}})
    assert msgspec.structs.asdict(options) == {"num_drafts": 7, "method": "b", "roots": (), "tickets": None}
    for text, found in (("/a", ("/a",)), ("/a,/b", ("/a", "/b")), ('["/a,b"]', ("/a,b",)), (["/c"], ("/c",))):
        assert host.options(plugin, {"opt": {"roots": text}}).roots == found
    assert host.options(plugin, {"opt": {"tickets": '{"a": 2}'}}).tickets == {"a": 2}
    for text, said in (("a=2", r"is 'a=2' \(expected"), ('{"a": "x"}', r"got `str` at tickets")):
        with pytest.raises(ConfigError, match=rf"^--opt\.tickets: tickets .*{said}.*allowed: a JSON object"):
            host.options(plugin, {"opt": {"tickets": text}}, {"plugins.opt.tickets": "--opt.tickets"})
    with pytest.raises(ConfigError, match=r"\[plugins\.opt\].*roots"):
        host.options(plugin, {"opt": {"roots": '["/a'}})
    with pytest.raises(ConfigError, match=r"\[plugins\.opt\].*no option named 'num_draft'; did you mean 'num_drafts'"):
        host.options(plugin, {"opt": {"num_draft": 1}})
    with pytest.raises(ConfigError, match=r"\[plugins\.opt\].*num_drafts"):
        host.options(plugin, {"opt": {"num_drafts": "many"}})
    with pytest.raises(ConfigError, match="takes no options"):
        host.options(host.plugins["paged"], {"paged": {"x": 1}})
    with pytest.raises(ConfigError, match="no plugin section named 'otp'; did you mean 'opt'"):
        host.check_sections(["otp"])


def test_core_offers_every_role_that_an_engine_needs() -> None:
    """Core has no private door: its parts come from entry points too."""
    host = PluginHost(only_named=True)
    assert all(plugin.is_core for plugin in host.plugins.values())
    for role in (Role.SCHEDULER, Role.KV_ALLOCATOR, Role.ATTENTION, Role.SAMPLER, Role.EXECUTOR, Role.DETOKENIZER):
        assert host.select(role, MACHINE).chosen, role


def test_two_hosts_know_nothing_of_each_other(install: Install) -> None:
    """Nothing is module-global."""
    install("third-party", alpha=ALPHA)
    with_alpha, without = PluginHost(["alpha"]), PluginHost(only_named=True)
    assert "alpha" in with_alpha.catalogue[Role.ATTENTION]
    assert "alpha" not in without.catalogue[Role.ATTENTION]


def test_describing_evaluates_and_imports_nothing(install: Install) -> None:
    """`enginectl plugins` answers without asking the machine or importing an implementation."""
    code = """
    def refuse(machine):
        raise AssertionError("evaluated")
    @hookimpl
    def enginectl_sampler():
        return [Provider(Role.SAMPLER, "lazy", "module_that_is_not_there:build", unsupported=refuse)]
    """
    install("third-party", lazy=code)
    rows: list[dict[str, Any]] = PluginHost().describe()
    assert any(row["name"] == "lazy" and row["state"] == "registered" for row in rows)
