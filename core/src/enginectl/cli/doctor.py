"""`enginectl doctor`: what this machine can run, and why not the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from enginectl.context import Machine
    from enginectl.plugins import PluginHost

COLUMNS = ("role", "name", "plugin", "distribution", "serves", "reason")
MIN_MEMORY_BYTES = 1 << 30


def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
) -> None:
    """Look at this machine and say which providers can serve on it, and why the others cannot."""
    from enginectl.cli.startup import discover_quietly
    from enginectl.cli.tables import print_json, print_table
    from enginectl.machine import detect_machine

    machine = detect_machine()
    rows = provider_rows(discover_quietly(), machine)
    notes = machine_notes(machine)
    if as_json:
        print_json({"machine": machine_facts(machine), "providers": rows, "notes": notes})
        return
    print_table([{"fact": k, "value": _words(k, v)} for k, v in machine_facts(machine).items()], ("fact", "value"))
    print()
    print_table(rows, COLUMNS)
    for note in notes:
        print(f"\nnote: {note}")


def machine_facts(machine: Machine) -> dict[str, Any]:
    """The machine as plain data, in the order it is shown."""
    interesting = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")
    return {
        "cores": machine.num_cores,
        "memory_bytes": machine.memory_bytes,
        "cpu_features": [flag for flag in interesting if flag in machine.cpu_flags],
        "gpus": [
            {
                "name": gpu.name,
                "compute_capability": ".".join(map(str, gpu.compute_capability)),
                "memory_bytes": gpu.memory_bytes,
            }
            for gpu in machine.gpus
        ],
        "compiler": machine.has_compiler,
        "versions": machine.versions,
    }


def provider_rows(host: PluginHost, machine: Machine) -> list[dict[str, str]]:
    """One row a provider: whether it serves, unless told otherwise, and why not; plugins that failed come last."""
    from enginectl.config_aliases import ASKED_FOR
    from enginectl.plugins import unsupported_reason
    from enginectl.provider import CARDINALITY, Cardinality, Role

    rows: list[dict[str, str]] = []
    for role in Role:
        entries = sorted(host.catalogue[role].values(), key=lambda e: (-e.provider.rank, e.provider.name))
        by_model = role in (Role.WEIGHTS, Role.MODEL_FAMILY)  # the first that recognises the model
        single = CARDINALITY[role] in (Cardinality.ONE, Cardinality.PER_PHASE) and not by_model
        taken: str | None = None
        for entry in entries:
            provider = entry.provider
            reason = unsupported_reason(provider, machine)
            serves = "no" if reason else "yes"
            if reason is None and provider.rank < 0:
                serves, reason = "if named", "serves only when named"
            elif reason is None and role in ASKED_FOR:
                serves, reason = "if named", f"serves when asked for with {ASKED_FOR[role]}"
            elif reason is None and single and taken is not None:
                serves, reason = "if named", f"{taken} ranks higher"
            elif reason is None:
                taken = provider.name
            rows.append(
                {
                    "role": role.value,
                    "name": provider.name,
                    "plugin": entry.plugin.name,
                    "distribution": f"{entry.plugin.distribution} {entry.plugin.version}",
                    "serves": serves,
                    "reason": reason or "",
                }
            )
    return rows + [
        {
            "role": "-",
            "name": "-",
            "plugin": plugin.name,
            "distribution": f"{plugin.distribution} {plugin.version}",
            "serves": "no",
            "reason": f"failed to load: {plugin.error}",
        }
        for plugin in host.plugins.values()
        if plugin.error
    ]


def machine_notes(machine: Machine) -> list[str]:
    """What the owner of this machine may want to change."""
    from enginectl.units import format_size

    notes: list[str] = []
    torch = machine.versions.get("torch")
    if torch is None:
        notes.append("torch is not installed: no model can run. pip install torch")
    elif machine.gpus and torch.endswith("+cpu"):
        notes.append(f"there is a GPU, but torch {torch} is a CPU build; install one with CUDA to use it")
    if machine.memory_bytes < MIN_MEMORY_BYTES:
        notes.append(f"only {format_size(machine.memory_bytes)} of memory is left for this process")
    if not machine.has_compiler:
        notes.append("no C++ compiler on PATH: parts that compile at start-up (torch.compile on a CPU) cannot")
    return notes


def _words(name: str, value: Any) -> str:
    from enginectl.units import format_size

    if name.endswith("_bytes"):
        return format_size(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(key, entry)}" for key, entry in value.items()) or "none"
    if isinstance(value, list):
        return "; ".join(_words("", entry) for entry in value) or "none"
    return str(value)
