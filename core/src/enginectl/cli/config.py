"""`enginectl config`: the configuration a command would run with, and where each value came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enginectl.cli.options import Invocation, takes_config

if TYPE_CHECKING:
    from enginectl.config_sources import Resolved

SECRETS = frozenset({"api_key", "admin_api_key", "ssl_keyfile_password"})
_SECTIONS = frozenset({"model", "plugins", "roles", "plugin_options", "lora_modules"})


@takes_config(server=True)
def config_command(
    invocation: Invocation,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of TOML.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Defaults too.")] = False,
) -> None:
    """Print the resolved configuration as TOML that --config accepts, with the source of each value.

    Takes the flags of `serve`. Keys are never printed: an `api_key` is shown as its source only.
    """
    from enginectl.cli.startup import check_plugins
    from enginectl.cli.tables import print_json

    resolved = invocation.resolve()
    check_plugins(resolved.engine, resolved.origins)
    if as_json:
        print_json(as_data(resolved))
    else:
        print("\n".join(as_toml(resolved, everything=everything)))


def as_data(resolved: Resolved) -> dict[str, Any]:
    """Values and origins as plain data; secrets are replaced by how many there are."""
    import msgspec

    values: dict[str, Any] = {}
    for struct in (resolved.engine, resolved.server, resolved.logs):
        values.update(msgspec.structs.asdict(struct))
    for alias in ("speculative_config", "otlp_traces_endpoint"):
        del values[alias]  # its plugin's section says it
    for name in SECRETS & set(values):
        values[name] = _hidden(values[name])
    origins = {
        name: resolved.origins.get(name, "default") for name in values if name not in ("roles", "plugin_options")
    }
    return {"values": values, "origins": {**origins, **resolved.origins}}


def as_toml(resolved: Resolved, *, everything: bool) -> Iterator[str]:
    """Lines of a TOML document that resolves to the same configuration (save secrets, which are comments)."""
    data = as_data(resolved)
    values, origins = data["values"], data["origins"]
    for name in ("model", *(name for name in values if name not in _SECTIONS)):
        origin = origins[name]
        if (origin == "default" and not everything) or name in SECRETS:
            if name in SECRETS and origin != "default":
                yield f"# {_kebab(name)} = {values[name]}  # {origin}"
            continue
        if values[name] is None:
            yield f"# {_kebab(name)} = auto  # {origin}"
        else:
            yield f"{_kebab(name)} = {_toml(values[name])}  # {origin}"
    if values["plugins"]:
        yield from ("", "[plugins]", f"require = {_toml(values['plugins'])}  # {origins['plugins']}")
    yield from _table("lora-modules", values["lora_modules"], lambda _: origins["lora_modules"], quote_keys=True)
    yield from _table("roles", values["roles"], lambda role: origins.get(f"roles.{role}", "default"))
    for plugin, section in values["plugin_options"].items():
        source = {key: origins.get(f"plugins.{plugin}.{key}", "default") for key in section}
        yield from _table(f"plugins.{plugin}", section, source.__getitem__)


def _table(header: str, table: Mapping[str, Any], origin: Any, *, quote_keys: bool = False) -> Iterator[str]:
    if not table:
        return
    yield from ("", f"[{header}]")
    for key, value in table.items():
        yield f"{_quoted(key) if quote_keys else _kebab(key)} = {_toml(value)}  # {origin(key)}"


def _toml(value: Any) -> str:
    """A TOML value. TOML's strings, numbers and booleans are JSON's; tables are written inline."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quoted(key)} = {_toml(entry)}" for key, entry in value.items()) + "}"
    return _quoted(value)


def _quoted(value: Any) -> str:
    # TOML has no surrogate pairs, so other scripts are written as they are.
    return json.dumps(value, ensure_ascii=False)


def _hidden(value: Any) -> str:
    count = len(value) if isinstance(value, tuple) else int(value is not None)
    return f"({count} hidden)" if count else "(none)"


def _kebab(name: str) -> str:
    return name.replace("_", "-")
