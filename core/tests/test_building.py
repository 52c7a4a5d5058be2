"""A plugin whose part cannot be built, or does not fit its role, is named at start-up with the reason."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from enginectl import builtin
from enginectl.building import INTERFACES, build_part, interface_of, misfit
from enginectl.builtin.allocator_paged import PagedAllocator
from enginectl.compose import compose
from enginectl.config import EngineConfig
from enginectl.context import BuildContext, Machine
from enginectl.errors import ConfigError, EnginectlError, ModelError, OutOfMemoryError, PluginError
from enginectl.hookspecs import hookimpl
from enginectl.interfaces.scheduler import Scheduler
from enginectl.plugins import Entry, Plugin, PluginHost
from enginectl.provider import Provider, Role
from enginectl.testing.tiny_models import save_tiny_model

MACHINE = Machine(num_cores=1, memory_bytes=1 << 30, cpu_flags=frozenset())
PLUGIN = Plugin("lottery", "acme-lottery", "1.2", "acme:plugin")


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("building") / "llama")


def build(factory: Callable[[BuildContext], Any] | str, role: Role = Role.SCHEDULER) -> Any:
    ctx = BuildContext(EngineConfig(model="M"), MACHINE)
    return build_part(Entry(Provider(role, "lottery", factory), PLUGIN), ctx)


class Lottery(Scheduler):
    """Lacks `remove`."""

    def add(self, request: Any, *, resumed: bool) -> None: ...

    def __len__(self) -> int:
        return 0

    def candidates(self, now: float) -> Iterator[Any]:
        return iter(())


class Drawn(Lottery):
    """Complete."""

    def remove(self, request: Any) -> None: ...


def no_license(ctx: BuildContext) -> Scheduler:
    raise ValueError("no license file.")


def incomplete(ctx: BuildContext) -> Any:
    return Lottery()  # type: ignore[abstract]


@pytest.fixture
def factories(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("lottery_factories")
    module.build = lambda ctx: Drawn()  # type: ignore[attr-defined]
    module.number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lottery_factories", module)


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("factory", "words", "cause"),
    [
        (no_license, "ValueError: no license file", ValueError),
        ("lottery_factories:biuld", "AttributeError: .* has no attribute 'biuld'", AttributeError),
        ("lottery_factories:number", "TypeError: the factory of scheduler 'lottery' is not callable: 3", TypeError),
        ("not_installed_anywhere:build", "ModuleNotFoundError: .*'not_installed_anywhere'", ModuleNotFoundError),
        (incomplete, "TypeError: Can't instantiate abstract class Lottery .*remove", TypeError),
    ],
    ids=["raises", "misspelt", "no factory", "no module", "abstract"],
)
def test_a_part_that_cannot_be_built_names_its_plugin(factory: Any, words: str, cause: type[Exception]) -> None:
    """Law 23. It was the bare error, with exit status 1 and without the plugin."""
    start = r"^plugin 'lottery' \(acme-lottery 1\.2\) could not build its scheduler: "
    with pytest.raises(PluginError, match=f"{start}{words}.*; fix or update .* with --scheduler$") as caught:
        build(factory)
    assert isinstance(caught.value.__cause__, cause)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize("error", [ConfigError, ModelError, OutOfMemoryError])
def test_what_a_factory_says_on_purpose_passes_unchanged(error: type[EnginectlError]) -> None:
    raised = error("as it is")

    def factory(ctx: BuildContext) -> Any:
        raise raised

    with pytest.raises(error) as caught:
        build(factory)
    assert caught.value is raised


@pytest.mark.parametrize("error", [MemoryError("of 1 GiB"), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_factory_without_memory_is_no_fault_of_the_plugin(error: Exception) -> None:
    def factory(ctx: BuildContext) -> Any:
        raise error

    with pytest.raises(OutOfMemoryError, match=r"'lottery' \(acme-lottery 1\.2\) could not .*; lower --max-num-seqs"):
        build(factory)


def with_method(base: type, name: str, method: Any) -> object:
    return type("Odd", (base,), {name: method})()


MISFITS = {
    "lacks a keyword": (
        "add",
        lambda self, request: None,
        r"Odd\.add takes \(request\), and .* \(request, \*, resumed\)",
    ),
    "asks for more": ("remove", lambda self, request, why: None, r"Odd\.remove takes \(request, why\), and"),
    "renames": (
        "candidates",
        lambda self, time: iter(()),
        r"Odd\.candidates takes \(time\), and is called with \(now\)",
    ),
    "turns around": ("victims", lambda self, now, running: running, r"Odd\.victims takes \(now, running\)"),
    "by position": ("finished", lambda self, request, now, /: None, r"Odd\.finished takes \(request, now, /\)"),
    "by name": ("refused", lambda self, *, request, reason, now: True, r"Odd\.refused takes"),
    "forgets self": ("__len__", lambda: 0, r"Odd\.__len__ takes no self"),
    "is no method": ("grant", 3, r"Odd\.grant is a int, not a method"),
}


@pytest.mark.parametrize(("name", "method", "words"), MISFITS.values(), ids=MISFITS)
def test_a_method_that_does_not_take_what_it_is_given_is_refused(name: str, method: Any, words: str) -> None:
    """Law 23. The start passed, and each request then killed the engine."""
    odd = with_method(Drawn, name, method)
    start = r"^plugin 'lottery' \(acme-lottery 1\.2\) cannot serve as scheduler: "
    with pytest.raises(PluginError, match=f"{start}{words}.*; fix or update"):
        build(lambda ctx: odd)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("add", lambda self, *args, **kwargs: None),
        ("add", lambda self, request, resumed=False, *, more=1: None),
        ("remove", staticmethod(lambda request: None)),
        ("victims", lambda self, running, now=0.0, **rest: running),
        ("another", lambda self, what, ever: None),
    ],
)
def test_a_method_that_takes_more_fits(name: str, method: Any) -> None:
    assert misfit(with_method(Drawn, name, method), Scheduler) is None


def test_what_is_no_part_at_all_is_refused() -> None:
    with pytest.raises(PluginError, match="its factory returned None, expected a Scheduler"):
        build(lambda ctx: None)
    with pytest.raises(PluginError, match="object has no 'add', which Scheduler asks for"):
        build(lambda ctx: object())


def test_a_property_that_is_a_method_is_refused() -> None:
    class Ledger(PagedAllocator):
        def num_free(self) -> int:  # type: ignore[override]
            return 1

    with pytest.raises(PluginError, match=r"as kv allocator: Ledger\.num_free is a method; KVAllocator has a property"):
        build(lambda ctx: Ledger(4), Role.KV_ALLOCATOR)


def test_every_role_has_an_interface() -> None:
    assert set(INTERFACES) == set(Role)
    assert all(isinstance(interface_of(role), type) for role in Role)


def subclasses(cls: Any) -> Iterator[Any]:
    for child in cls.__subclasses__():
        yield child
        yield from subclasses(child)


def test_every_part_of_ours_fits() -> None:
    """Those of core and of every plugin here that can be imported on this machine."""
    host, roles = PluginHost(), set()
    for module in pkgutil.walk_packages(builtin.__path__, "enginectl.builtin."):
        importlib.import_module(module.name)
    for entries in host.catalogue.values():
        for entry in entries.values():
            try:
                entry.provider.load_factory()
            except ImportError:
                continue
    for role in Role:
        interface = interface_of(role)
        for cls in subclasses(interface):
            if cls.__module__.startswith("enginectl") and not getattr(cls, "__abstractmethods__", None):
                assert misfit(cls.__new__(cls), interface) is None
                roles.add(role)
    assert roles >= set(Role) - {Role.PARSER, Role.GRAMMAR}


@pytest.mark.parametrize("role", [Role.SCHEDULER, Role.LOGITS_PROCESSOR])
def test_a_wrong_factory_is_found_before_weights_are_loaded(role: Role, tiny_llama: Path) -> None:
    host = PluginHost(only_named=True)

    class Late:
        pass

    provider = Provider(role, "late", "enginectl.builtin.scheduler_fcfs:biuld", rank=99)
    setattr(Late, f"enginectl_{role.value}", hookimpl(lambda self: provider))
    host.register(Late(), Plugin("late", "test", "1", "test"))
    stages: list[str] = []
    roles = {"scheduler": "late"} if role is Role.SCHEDULER else {}
    config = EngineConfig(model=str(tiny_llama), device="cpu", dtype="float32", roles=roles, max_num_seqs=2)
    with pytest.raises(PluginError, match=r"'late' \(test 1\) could not build its .* no attribute 'biuld'"):
        compose(config, machine=MACHINE, host=host, progress=stages.append)
    assert [stage.split()[0] for stage in stages] == ["opening"]


def test_an_installed_part_that_cannot_serve_is_not_said_to_be_missing(tiny_llama: Path) -> None:
    """`--enable-lora` said that no installed plugin provides the role."""
    host = PluginHost(only_named=True)

    class Adapters:
        @hookimpl
        def enginectl_adapter(self) -> Provider:
            return Provider(Role.ADAPTER, "picky", "nowhere:build", unsupported=lambda machine: "needs a moon")

    host.register(Adapters(), Plugin("picky", "test", "1", "test"))
    config = EngineConfig(model=str(tiny_llama), device="cpu", dtype="float32", max_num_seqs=2, enable_lora=True)
    with pytest.raises(
        PluginError, match=r"--enable-lora: no installed adapter can serve here \(picky: needs a moon\)"
    ):
        compose(config, machine=MACHINE, host=host)
