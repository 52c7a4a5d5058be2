"""Where the configuration comes from: command line, `ENGINECTL_*` environment, `--config` TOML file, defaults.

The first source that gives a value wins; plugin options and roles are merged one by one. Every value remembers where it
came from. Nothing is ignored: an unknown key is an error that names its file or variable and the nearest known key.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec

from enginectl.config import EngineConfig, ServerConfig
from enginectl.config_aliases import expand_aliases
from enginectl.config_checks import validate_config, validate_logs, validate_server
from enginectl.config_values import Setting, convert, unknown_key
from enginectl.errors import ConfigError
from enginectl.logs import LogConfig
from enginectl.packages import canonical
from enginectl.provider import CARDINALITY, Cardinality, Role

ENV_PREFIX = "ENGINECTL_"
PLUGIN_PREFIX = "ENGINECTL_PLUGIN_"
CONFIG_VARIABLE = "ENGINECTL_CONFIG"
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "ENGINECTL_DEBUG", "ENGINECTL_DEMO_MODEL"})
"""Variables of ours that are not configuration fields."""

# Kubernetes sets these in every pod beside a service named `enginectl`. They are about the cluster, not for us.
_SERVICE_LINK = re.compile(r"ENGINECTL_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")

ROLE_KEYS = tuple(role.value for role in Role if CARDINALITY[role] is not Cardinality.MANY and role is not Role.PARSER)
"""Roles that one name can choose: each is a flag, a variable and a key. Parsers have flags of their own."""

_STRUCTS: tuple[type[msgspec.Struct], ...] = (EngineConfig, ServerConfig, LogConfig)
_NESTED = frozenset({"roles", "plugin_options"})


def field_types() -> dict[str, Any]:
    """Every flat key and its type. `roles` and `plugin_options` have spellings of their own."""
    return {f.name: f.type for s in _STRUCTS for f in msgspec.structs.fields(s) if f.name not in _NESTED}


@dataclass(frozen=True, slots=True)
class Resolved:
    """The configuration of a command, and where each value came from (field, `roles.x` or `plugins.x.y` to words)."""

    engine: EngineConfig
    server: ServerConfig
    logs: LogConfig
    origins: dict[str, str]


@dataclass(slots=True)
class Settings:
    """What one source gave, or several merged. values: by field. roles: by role. options: by (plugin, key), the
    plugin's name in canonical form so that one source can override another's spelling.
    """

    values: dict[str, Setting] = field(default_factory=dict)
    roles: dict[str, Setting] = field(default_factory=dict)
    options: dict[tuple[str, str], Setting] = field(default_factory=dict)

    def over(self, lower: Settings) -> Settings:
        """These settings, and those of a source of lower precedence where these are silent."""
        return Settings(
            {**lower.values, **self.values}, {**lower.roles, **self.roles}, {**lower.options, **self.options}
        )

    def put(self, key: str, setting: Setting, kind: str) -> None:
        """File a flat key under its field or role. Raises ConfigError for an unknown one."""
        name = key.replace("-", "_")
        if name in ROLE_KEYS:
            self.roles[name] = setting
        elif name == "structured_outputs_config":
            self.roles["grammar"] = Setting(_grammar_backend(setting), setting.where)
        elif name in field_types():
            self.values[name] = setting
        else:
            raise unknown_key(setting.where, kind, key, [*field_types(), *ROLE_KEYS])


def resolve(
    flags: Mapping[str, Any],
    *,
    plugin_flags: Mapping[str, Mapping[str, str]] | None = None,
    config_file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    installed: Sequence[str] | None = None,
) -> Resolved:
    """Merge every source into the configuration, expand aliases and check ranges.

    flags: field or role to the text given on the command line (lists for repeatable flags, bools for switches).
    plugin_flags: plugin to its options. config_file: default is the variable ENGINECTL_CONFIG. installed: names of the
    installed plugins, default this environment's.
    Raises ConfigError or PluginError; no plugin has been loaded.
    """
    if config_file is None and environ.get(CONFIG_VARIABLE):
        config_file = Path(environ[CONFIG_VARIABLE])
    names = installed_plugins() if installed is None else list(installed)
    merged = from_flags(flags, plugin_flags or {}).over(from_environ(environ))
    if config_file is not None:
        merged = merged.over(from_toml(config_file))
    return build(merged, names)


def build(settings: Settings, installed: Sequence[str]) -> Resolved:
    """Typed, checked structs from merged settings."""
    types = field_types()
    values = {name: convert(name, setting, types[name]) for name, setting in settings.values.items()}
    roles = {role: _text(f"roles.{role}", setting) for role, setting in settings.roles.items()}
    options: dict[str, dict[str, Any]] = {}
    for (plugin, key), setting in settings.options.items():
        options.setdefault(plugin, {})[key] = setting.value
    if not values.get("model"):
        raise ConfigError('no model: give MODEL on the command line, ENGINECTL_MODEL, or model = "…" in the file')
    origins = {name: setting.where for name, setting in settings.values.items()}
    origins |= {f"roles.{role}": setting.where for role, setting in settings.roles.items()}
    origins |= {f"plugins.{plugin}.{key}": s.where for (plugin, key), s in settings.options.items()}
    engine = EngineConfig(**_only(EngineConfig, values), roles=roles, plugin_options=options)
    server = ServerConfig(**_only(ServerConfig, values))
    engine = expand_aliases(engine, installed, origins)
    validate_config(engine, origins)
    validate_server(server, origins)
    logs = LogConfig(**_only(LogConfig, values))
    validate_logs(logs, origins)
    return Resolved(engine, server, logs, origins)


def engine_config(model: str, *, installed: Sequence[str] | None = None, **values: Any) -> EngineConfig:
    """The configuration of the Python API: fields of EngineConfig by keyword, strictly typed, aliases expanded.

    Raises ConfigError for an unknown keyword or a wrong value, PluginError for a plugin that is not installed.
    """
    settings = Settings()
    for name, value in {"model": model, **values}.items():
        where = f"Engine({name}=…)"
        if name == "roles":
            settings.roles.update({role: Setting(choice, where) for role, choice in _roles(value, where).items()})
        elif name == "plugin_options":
            for plugin, section in value.items():
                _put_options(settings, plugin, section, where)
        elif name not in EngineConfig.__struct_fields__:
            raise unknown_key(where, "option", name, EngineConfig.__struct_fields__)
        else:
            settings.values[name] = Setting(value, where)
    return build(settings, installed_plugins() if installed is None else installed).engine


def installed_plugins() -> list[str]:
    """Names of the installed plugins, core's included. Loads none of them."""
    return sorted({point.name for point in entry_points(group="enginectl")})


# -- the sources ---------------------------------------------------------------------------------------------------


def from_flags(flags: Mapping[str, Any], plugin_flags: Mapping[str, Mapping[str, str]]) -> Settings:
    """Settings of the command line. None and empty lists were not given."""
    settings = Settings()
    for name, value in flags.items():
        if value is None or value in ([], ()):
            continue
        where = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
        settings.put(name, Setting(value, where, textual=not isinstance(value, bool)), "flag")
    for plugin, section in plugin_flags.items():
        for key, value in section.items():
            settings.options[canonical(plugin), key.replace("-", "_")] = Setting(
                value, f"--{plugin}.{key}", textual=True
            )
    return settings


def from_environ(environ: Mapping[str, str]) -> Settings:
    """Settings of the `ENGINECTL_*` variables."""
    settings = Settings()
    for variable in sorted(environ):
        value = environ[variable]
        if not variable.startswith(ENV_PREFIX) or variable in OTHER_VARIABLES or _is_service_link(variable, value):
            continue
        where = f"environment variable {variable}"
        if variable.startswith(PLUGIN_PREFIX):
            plugin, separator, key = variable.removeprefix(PLUGIN_PREFIX).lower().partition("__")
            if not separator or not plugin or not key:
                raise ConfigError(f"{where}: plugin options are spelt {PLUGIN_PREFIX}<NAME>__<KEY>")
            settings.options[plugin, key] = Setting(value, where, textual=True)
        else:
            settings.put(variable.removeprefix(ENV_PREFIX).lower(), Setting(value, where, textual=True), "variable")
    return settings


def from_toml(path: Path) -> Settings:
    """Settings of a TOML file: flat keys in kebab or snake case, `[roles]`, `[plugins]` with a section per plugin.

    `plugins = ["a", "b"]` names plugins that must serve; a file with sections says `[plugins] require = ["a", "b"]`.
    """
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not a TOML file: {error}") from error
    settings = Settings()
    where = str(path)
    for key, value in document.items():
        name = key.replace("-", "_")
        if name == "roles":
            settings.roles.update({role: Setting(choice, where) for role, choice in _roles(value, where).items()})
        elif name == "plugins" and isinstance(value, Mapping):
            _put_plugin_tables(settings, value, where)
        else:
            settings.put(key, Setting(value, where), "key")
    return settings


def _put_plugin_tables(settings: Settings, table: Mapping[str, Any], where: str) -> None:
    for plugin, section in table.items():
        if plugin == "require":
            settings.values["plugins"] = Setting(section, f"{where} [plugins]")
        else:
            _put_options(settings, plugin, section, f"{where} [plugins.{plugin}]")


def _put_options(settings: Settings, plugin: str, section: Any, where: str) -> None:
    if not isinstance(section, Mapping):
        raise ConfigError(f"{where}: {plugin} is {section!r}; allowed: a table of the plugin's options")
    for key, value in section.items():
        settings.options[canonical(plugin), key.replace("-", "_")] = Setting(value, where)


def _roles(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: roles is {value!r}; allowed: a table of role = provider")
    roles = {key.replace("-", "_"): choice for key, choice in value.items()}
    for role in roles:
        if role not in ROLE_KEYS:
            raise unknown_key(where, "role", role, ROLE_KEYS)
    return roles


def _grammar_backend(setting: Setting) -> Any:
    """The backend in `--structured-outputs-config.backend NAME`, the same as JSON, or a TOML table."""
    value = setting.value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{setting.where}: not JSON: {error}") from error
    if isinstance(value, Mapping):
        for key in value:
            if key != "backend":
                raise unknown_key(f"{setting.where}: structured_outputs_config", "key", key, ["backend"])
        value = value.get("backend", "auto")
    return value


def _text(name: str, setting: Setting) -> str:
    if not isinstance(setting.value, str) or not setting.value:
        raise ConfigError(f"{setting.where}: {name} is {setting.value!r}; allowed: a provider's name")
    return setting.value


def _is_service_link(variable: str, value: str) -> bool:
    return _SERVICE_LINK.fullmatch(variable) is not None or (
        variable == "ENGINECTL_PORT" and re.match(r"(tcp|udp|sctp)://", value) is not None
    )


def _only(struct: type[msgspec.Struct], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in struct.__struct_fields__ if name in values}
