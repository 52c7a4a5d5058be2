"""PluginHost: finds plugins, checks them, keeps the catalogue of providers, and selects one per role.

One host per engine and nothing module-global, so two engines in one process may use different plugins.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import msgspec
import pluggy

from enginectl.config_values import from_json, wrong_option
from enginectl.context import Machine
from enginectl.errors import ConfigError, PluginError, UnsupportedError, nearest, unknown
from enginectl.hookspecs import HookSpecs
from enginectl.packages import BRING, canonical, install_hint, role_hint
from enginectl.provider import API_VERSION, CARDINALITY, Cardinality, Provider, Role

ENTRY_POINT_GROUP = "enginectl"
CORE_DISTRIBUTION = "enginectl"

log = logging.getLogger("enginectl.plugins")

_MISSING = re.compile(r"Object missing required field `(\w+)`.*")
_OPTION = re.compile(r" - at `\$\.(\w+)")


@dataclass(slots=True)
class Plugin:
    """An entry point: its name, where it comes from, and why it cannot be used (error), if so.

    offered: what it brought, which is what it provides unless it was refused.
    """

    name: str
    distribution: str
    version: str
    target: str
    error: str | None = None
    providers: list[Provider] = field(default_factory=list)
    offered: list[Provider] = field(default_factory=list)

    @property
    def is_core(self) -> bool:
        """Whether it comes with the core distribution."""
        return self.distribution == CORE_DISTRIBUTION

    @property
    def origin(self) -> str:
        """`name (distribution version)`, for messages."""
        return f"{self.name!r} ({self.distribution} {self.version})"


@dataclass(frozen=True, slots=True)
class Entry:
    """A provider in the catalogue, and the plugin that brought it."""

    provider: Provider
    plugin: Plugin


@dataclass(frozen=True, slots=True)
class Selection:
    """What serves a role, and why the others do not: (provider name, plugin name, reason)."""

    chosen: tuple[Entry, ...]
    skipped: tuple[tuple[str, str, str], ...]


class PluginHost:
    """The plugins of one engine.

    named: plugins that must load and serve (`--plugins`). only_named: hide every other plugin that is not core's.
    Raises PluginError for a named plugin that is unknown, fails to load, clashes or was written for another API.
    """

    def __init__(self, named: Sequence[str] = (), *, only_named: bool = False) -> None:
        self.named = tuple(dict.fromkeys(named))
        self.plugins: dict[str, Plugin] = {}
        self.catalogue: dict[Role, dict[str, Entry]] = {role: {} for role in Role}
        self._manager = pluggy.PluginManager("enginectl")
        self._manager.add_hookspecs(HookSpecs)
        self._discover(only_named)
        self.hook = self._manager.hook

    # -- discovery -----------------------------------------------------------------------------------------------

    def _discover(self, only_named: bool) -> None:
        found = sorted(entry_points(group=ENTRY_POINT_GROUP), key=_discovery_order)
        names = [point.name for point in found]
        for name in self.named:
            if name not in names:
                raise PluginError(unknown("plugin", name, names, hint=f"{install_hint(name)}."))
        for point in found:
            distribution = point.dist.name if point.dist else "unknown"
            if only_named and distribution != CORE_DISTRIBUTION and point.name not in self.named:
                continue
            self._load(point)

    def _load(self, point: EntryPoint) -> None:
        dist = point.dist
        plugin = Plugin(point.name, dist.name if dist else "unknown", dist.version if dist else "?", point.value)
        if point.name in self.plugins:
            earlier = self.plugins[point.name]
            plugin.error = f"its name is taken by {earlier.origin}; uninstall one of the two"
            if point.name in self.named:
                raise PluginError(f"plugin {plugin.origin}: {plugin.error}")
            log.warning("plugin %s ignored: %s", plugin.origin, plugin.error)
            self.plugins[f"{point.name} ({plugin.distribution})"] = plugin
            return
        self.plugins[point.name] = plugin
        try:
            self.register(point.load(), plugin)
        except Exception as error:
            reason = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
            self._fail(plugin, reason, error)

    def _fail(self, plugin: Plugin, reason: str, cause: BaseException | None = None) -> None:
        plugin.error = reason
        plugin.providers = []
        if plugin.name in self.named:
            raise PluginError(_refusal(plugin, "or leave it out of --plugins")) from cause
        log.warning("plugin %s ignored: %s", plugin.origin, reason)

    def register(self, target: object, plugin: Plugin) -> None:
        """Register an object with hook implementations and put its providers into the catalogue.

        Raises PluginError, with nothing registered, if a hook is misspelt or a provider is not acceptable.
        """
        try:
            self._manager.register(target, name=plugin.name)
            self._check_hooks(target, plugin)
            providers = plugin.offered = self._collect(target)
            for provider in providers:
                self._check_provider(provider, providers)
        except Exception as error:
            if self._manager.has_plugin(plugin.name):  # pluggy keeps what it could not check
                self._manager.unregister(name=plugin.name)
            if isinstance(error, pluggy.PluginValidationError):
                raise PluginError(" ".join(str(error).split())) from error
            raise
        plugin.providers = providers
        self.plugins[plugin.name] = plugin
        for provider in providers:
            self.catalogue[provider.role][provider.name] = Entry(provider, plugin)

    def _check_hooks(self, target: object, plugin: Plugin) -> None:
        known = {name for name in vars(HookSpecs) if name.startswith("enginectl_")}
        for name in dir(target):
            if name.startswith("enginectl_") and name not in known:
                raise PluginError(f"{plugin.target}: unknown hook {name!r}{nearest(name, known)}")
        self._manager.check_pending()

    def _collect(self, target: object) -> list[Provider]:
        callers = self._manager.get_hookcallers(target) or []
        providers: list[Provider] = []
        roles = {f"enginectl_{role.value}": role for role in Role}
        for caller in callers:
            if caller.name not in roles:
                continue
            implementation = next(impl for impl in caller.get_hookimpls() if impl.plugin is target)
            offered: Any = implementation.function()
            for provider in [offered] if isinstance(offered, Provider) else list(offered or ()):
                if not isinstance(provider, Provider):
                    raise PluginError(f"{caller.name} returned {type(provider).__name__}, expected Provider")
                if provider.role is not roles[caller.name]:
                    raise PluginError(f"{caller.name} returned a provider for the role {provider.role.value!r}")
                providers.append(provider)
        return providers

    def _check_provider(self, provider: Provider, siblings: Sequence[Provider]) -> None:
        label = f"{provider.role.value} {provider.name!r}"
        if provider.api != API_VERSION:
            raise PluginError(f"{label} was written for API version {provider.api}, this core has {API_VERSION}")
        twins = [p for p in siblings if (p.role, p.name) == (provider.role, provider.name)]
        if len(twins) > 1:
            raise PluginError(f"{label} is offered twice by this plugin")
        taken = self.catalogue[provider.role].get(provider.name)
        if taken is not None:
            raise PluginError(
                f"{label} is already provided by {taken.plugin.origin}; two providers may not share a name"
            )
        if provider.config is not None:
            if (
                not provider.config.__struct_config__.frozen
                or not provider.config.__struct_config__.forbid_unknown_fields
            ):
                raise PluginError(
                    f"{label}: its config must be a frozen msgspec.Struct with forbid_unknown_fields=True"
                )
            if any(other.config not in (None, provider.config) for other in siblings):
                raise PluginError(f"{label}: all providers of a plugin share one config class")

    # -- selection -----------------------------------------------------------------------------------------------

    def named_for(self, role: Role) -> list[Entry]:
        """Providers of this role that come from named plugins, in the order in which they were named."""
        mine = self.catalogue[role].values()
        return [entry for name in self.named for entry in mine if entry.plugin.name == name]

    def entry(self, role: Role, name: str) -> Entry:
        """The provider of that name. Raises PluginError for an unknown one, with the nearest name."""
        entries = self.catalogue[role]
        if name not in entries:
            what = role.value.replace("_", " ")
            if (refused := self.refused(role, name)) is not None:
                raise PluginError(f"no {what} {name!r}: {refused}")
            raise PluginError(unknown(what, name, entries, hint=f"{install_hint(name)}."))
        return entries[name]

    def refused(self, role: Role, name: str) -> str | None:
        """Why the plugin of that name, or the one that brought a provider of that name, cannot be used; None if it can."""
        for plugin in self.plugins.values():
            names = {plugin.name, *(p.name for p in plugin.offered if p.role is role)}
            if plugin.error is not None and canonical(name) in map(canonical, names):
                return _refusal(plugin, "or choose another")
        return None

    def missing(self, role: Role, flag: str) -> PluginError:
        """The error for a flag that needs a role which no plugin provides: refused, or not installed."""
        brought = [p.name for plugin in self.plugins.values() for p in plugin.offered if p.role is role]
        for name in (*brought, *BRING[role.value]):
            refused = self.refused(role, name)
            if refused is not None:
                return PluginError(f"{flag}: {refused}")
        return PluginError(f"{flag}: no installed plugin provides the role {role.value!r}. {role_hint(role.value)}")

    def select(self, role: Role, machine: Machine, wanted: str | None = None, *, phase: str | None = None) -> Selection:
        """Who serves this role here. An explicit name wins, then named plugins, then the highest rank.

        phase: "prefill" or "decode", to leave out providers whose capabilities do not offer it.

        Raises PluginError if what was named cannot serve on this machine, or nothing can and the role is needed;
        a role that is optional and has no provider gives an empty selection.
        """
        if wanted is not None:
            entry = self.entry(role, wanted)
            self._require(role, entry, machine)
            if phase is not None and phase not in entry.provider.capabilities.phases:
                offered = ", ".join(sorted(entry.provider.capabilities.phases))
                raise UnsupportedError(f"{role.value} {wanted!r} does not serve the phase {phase!r}, only {offered}")
            return Selection((entry,), ())
        named = self.named_for(role)
        for entry in named:
            self._require(role, entry, machine)
        if CARDINALITY[role] is Cardinality.ONE and len({entry.plugin.name for entry in named}) > 1:
            origins = " and ".join(entry.plugin.origin for entry in named)
            raise PluginError(f"{origins} both provide the role {role.value!r}; name one with --{_flag(role)} NAME")
        usable, skipped = self._usable(role, machine, named, phase)
        if CARDINALITY[role] in (Cardinality.ONE, Cardinality.PER_PHASE) and usable:
            chosen, *others = usable
            skipped += [(e.provider.name, e.plugin.name, f"rank {e.provider.rank} is lower") for e in others]
            return Selection((chosen,), tuple(skipped))
        return Selection(tuple(usable), tuple(skipped))

    def _usable(
        self, role: Role, machine: Machine, named: Sequence[Entry], phase: str | None
    ) -> tuple[list[Entry], list[tuple[str, str, str]]]:
        usable: list[Entry] = []
        skipped: list[tuple[str, str, str]] = []
        for entry in self.catalogue[role].values():
            reason = unsupported_reason(entry.provider, machine)
            if reason is None and entry.provider.rank < 0 and entry not in named:
                reason = "serves only when named"
            if reason is None and phase is not None and phase not in entry.provider.capabilities.phases:
                reason = f"does not serve the phase {phase!r}"
            if reason is None:
                usable.append(entry)
            else:
                skipped.append((entry.provider.name, entry.plugin.name, reason))
        usable.sort(key=lambda e: (e not in named, -e.provider.rank, e.provider.name))
        return usable, skipped

    def _require(self, role: Role, entry: Entry, machine: Machine) -> None:
        reason = unsupported_reason(entry.provider, machine)
        if reason is not None:
            raise UnsupportedError(
                f"{role.value} {entry.provider.name!r} of plugin {entry.plugin.origin} cannot serve here: {reason}. "
                "`enginectl doctor` shows what this machine can run."
            )

    def options(
        self, plugin: Plugin, sections: dict[str, dict[str, Any]], origins: Mapping[str, str] | None = None
    ) -> Any:
        """The plugin's own section as its typed struct, or None if it declared none. Raises ConfigError.

        origins: `plugins.NAME.KEY` to the flag, variable or file that gave it, for the message.
        """
        config = next((provider.config for provider in plugin.providers if provider.config is not None), None)
        section = sections.get(plugin.name, {})
        if config is None:
            if section:
                raise ConfigError(f"[plugins.{plugin.name}]: the plugin {plugin.origin} takes no options")
            return None
        values = {key.replace("-", "_"): value for key, value in section.items()}
        kinds = {field.name: field.type for field in msgspec.structs.fields(config)}
        try:
            for key in values:
                if key not in config.__struct_fields__:
                    raise ConfigError(f"[plugins.{plugin.name}]: " + unknown("option", key, config.__struct_fields__))
            return msgspec.convert({k: from_json(v, kinds[k]) for k, v in values.items()}, config, strict=False)
        except msgspec.ValidationError as error:
            at = _OPTION.search(str(error))
            if at is not None and at[1] in values:
                where = (origins or {}).get(f"plugins.{plugin.name}.{at[1]}", f"[plugins.{plugin.name}]")
                raise ConfigError(wrong_option(where, at[1], values[at[1]], kinds[at[1]], str(error))) from error
            missing = _MISSING.fullmatch(str(error))
            advice = f"; give it as --{plugin.name}.{missing[1].replace('_', '-')}" if missing else ""
            raise ConfigError(f"[plugins.{plugin.name}]: {error}{advice}") from error

    def check_sections(self, sections: Iterable[str]) -> None:
        """Raise ConfigError for a section that belongs to no installed plugin."""
        for name in sections:
            if name not in self.plugins:
                raise ConfigError(unknown("plugin section", name, self.plugins, hint="Install the plugin first."))

    def check_choices(self, roles: Mapping[str, str], scheduling_policy: str | None = None) -> None:
        """Raise PluginError for a provider that was chosen by name and is not installed. Nothing is built."""
        for role, wanted in roles.items():
            phased = CARDINALITY[Role(role)] is Cardinality.PER_PHASE and "=" in wanted
            for name in [part.partition("=")[2] for part in wanted.split(",")] if phased else [wanted]:
                self.entry(Role(role), name)
        if scheduling_policy is not None and Role.SCHEDULER.value not in roles:
            self.entry(Role.SCHEDULER, scheduling_policy)

    # -- description ---------------------------------------------------------------------------------------------

    def describe(self) -> list[dict[str, str]]:
        """One row a provider, and one for each plugin that failed: role, name, plugin, distribution, version, state,
        error. Evaluates nothing on this machine; `enginectl doctor` does.
        """
        rows: list[dict[str, str]] = []
        for plugin in self.plugins.values():
            common = {"plugin": plugin.name, "distribution": plugin.distribution, "version": plugin.version}
            if plugin.error is not None:
                rows.append({"role": "-", "name": "-", **common, "state": "failed", "error": plugin.error})
            elif not plugin.providers:
                rows.append({"role": "-", "name": "-", **common, "state": "registered", "error": ""})
            for provider in plugin.providers:
                row = {"role": provider.role.value, "name": provider.name}
                rows.append({**row, **common, "state": "registered", "error": ""})
        return sorted(rows, key=lambda row: (row["state"] == "failed", row["role"], row["name"]))


def unsupported_reason(provider: Provider, machine: Machine) -> str | None:
    """Why a provider cannot serve on this machine; an exception in the check is a reason too."""
    devices = provider.capabilities.devices
    if devices is not None and machine.device not in devices and not (machine.device == "cuda" and "cpu" in devices):
        return f"needs {' or '.join(sorted(devices))}, this machine has {machine.device}"
    if provider.unsupported is None:
        return None
    try:
        return provider.unsupported(machine)
    except Exception as error:
        return f"its check failed: {type(error).__name__}: {error}"


def _refusal(plugin: Plugin, otherwise: str) -> str:
    stop = "" if plugin.error is not None and plugin.error.endswith("?") else "."
    return f"plugin {plugin.origin} cannot be used: {plugin.error}{stop} Fix or update that package, {otherwise}."


def _discovery_order(point: EntryPoint) -> tuple[bool, str, str]:
    distribution = point.dist.name if point.dist else "unknown"
    return (distribution != CORE_DISTRIBUTION, distribution, point.name)


def _flag(role: Role) -> str:
    return role.value.replace("_", "-")
