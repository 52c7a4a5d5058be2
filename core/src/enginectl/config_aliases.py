"""Words people bring along: flags that select a plugin or fill its section."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import msgspec

from enginectl.config import EngineConfig
from enginectl.errors import ConfigError, PluginError, unknown
from enginectl.packages import PACKAGES, canonical, install_hint
from enginectl.plugins import PluginHost
from enginectl.provider import Role

METHODS = {"draft_model": "draft", "[ngram]": "ngram"}
"""Speculative methods whose plugin has another name. Every other method is its plugin's name."""

ASKED_FOR = {Role.SPECULATOR: "--speculative-config", Role.ADAPTER: "--enable-lora"}
"""Roles that stay empty unless somebody asks, and the flag that does."""


def expand_aliases(
    config: EngineConfig, installed: Sequence[str], origins: MutableMapping[str, str] | None = None
) -> EngineConfig:
    """A configuration in which aliases have become plugins, options and roles, under the plugins' own names.

    origins: gains an entry for whatever an alias sets. Raises ConfigError, or PluginError for a plugin that is not
    installed, with the package that brings it.
    """
    origins = {} if origins is None else origins
    plugins = tuple(dict.fromkeys(plugin_name(name, installed, _where(origins, "plugins")) for name in config.plugins))
    options: dict[str, dict[str, Any]] = {}
    method: dict[str, Any] | None = None
    for given, section in config.plugin_options.items():
        first = next(iter(section), "")
        name = plugin_name(given, installed, origins.get(f"plugins.{given}.{first}", f"[plugins.{given}]"))
        options.setdefault(name, {}).update(section)
        for key in section:
            if name != given and f"plugins.{given}.{key}" in origins:
                origins[f"plugins.{name}.{key}"] = origins.pop(f"plugins.{given}.{key}")
    for field, name, section in _aliases(config, installed, origins):
        where = _where(origins, field)
        for key in set(section) & set(options.get(name, {})):
            if section[key] != options[name][key]:
                raise ConfigError(
                    f"{where}: {key} is {section[key]!r}, and {options[name][key]!r} in "
                    f"{origins.get(f'plugins.{name}.{key}', f'[plugins.{name}]')}; give it once"
                )
        plugins = tuple(dict.fromkeys((*plugins, name)))
        options[name] = {**options.get(name, {}), **section}
        origins["plugins"] = f"{origins['plugins']}, {where}" if "plugins" in origins else where
        origins.update({f"plugins.{name}.{key}": where for key in section})
        if field == "speculative_config":
            method = {"method": name}
    roles = {role: name for role, name in config.roles.items() if name != "auto"}
    return msgspec.structs.replace(
        config,
        plugins=plugins,
        plugin_options=options,
        roles=roles,
        speculative_config=method,
        otlp_traces_endpoint=None,
    )


def _aliases(
    config: EngineConfig, installed: Sequence[str], origins: MutableMapping[str, str]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Fields that mean a plugin: the field, which plugin, and the options for it."""
    field = "speculative_config"
    if config.speculative_config is not None:
        yield field, *speculative_plugin(config.speculative_config, installed, _where(origins, field))
    field = "otlp_traces_endpoint"
    if config.otlp_traces_endpoint is not None:
        yield field, plugin_name("otel", installed, _where(origins, field)), {"endpoint": config.otlp_traces_endpoint}


def speculative_plugin(
    config: dict[str, Any], installed: Sequence[str], where: str = "speculative_config"
) -> tuple[str, dict[str, Any]]:
    """The plugin that a `speculative_config` means, and its options."""
    options = {key: value for key, value in config.items() if key != "method"}
    method = config.get("method", "draft" if "model" in config else None)
    if not isinstance(method, str) or not method:
        raise ConfigError(
            f'{where}: method is {method!r}; allowed: a speculator plugin such as "ngram" or "draft", '
            'as in {"method": "ngram", "num_speculative_tokens": 4}'
        )
    wanted = METHODS.get(method, method)
    try:
        return plugin_name(wanted, installed, where), options
    except PluginError:
        if any(canonical(wanted) == canonical(name) for name in PACKAGES):
            raise
        raise unknown_method(method, PluginHost(), where) from None


def unknown_method(method: str, host: PluginHost, where: str) -> PluginError:
    """The error for a speculative method that no speculator plugin has the name of."""
    if (refused := host.refused(Role.SPECULATOR, method)) is not None:
        return PluginError(f"{where}: {refused}")
    names = {entry.plugin.name for entry in host.catalogue[Role.SPECULATOR].values()}
    return PluginError(f"{where}: {unknown('speculative method', method, names, hint=install_hint(method))}")


def check_method(config: EngineConfig, host: PluginHost) -> None:
    """Raise PluginError if the plugin that `speculative_config` means speculates on nothing."""
    method = (config.speculative_config or {}).get("method")
    if method is not None and all(entry.plugin.name != method for entry in host.catalogue[Role.SPECULATOR].values()):
        raise unknown_method(method, host, "--speculative-config")


def plugin_name(given: str, installed: Iterable[str], where: str) -> str:
    """The installed plugin of that name, whatever its dashes and case. Raises PluginError if there is none."""
    names = list(installed)
    for name in names:
        if canonical(name) == canonical(given):
            return name
    raise PluginError(f"{where}: {unknown('plugin', given, names, hint=install_hint(given))}")


def check_promises(config: EngineConfig, host: PluginHost) -> None:
    """Raise PluginError if a flag promises what no installed plugin provides."""
    for wanted, flag, role in (
        (config.enable_lora, "--enable-lora", Role.ADAPTER),
        (config.enable_prefix_caching, "--enable-prefix-caching", Role.PREFIX_INDEX),
    ):
        if wanted and not host.catalogue[role]:
            raise host.missing(role, flag)


def _where(origins: MutableMapping[str, str], name: str) -> str:
    return origins.get(name, name)
