"""A chosen provider becomes a part, and the part is checked against its role's interface.

Whatever goes wrong here is the plugin's own, so the message names it.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from enginectl.context import BuildContext
from enginectl.errors import EnginectlError, OutOfMemoryError, PluginError
from enginectl.plugins import Entry
from enginectl.provider import CARDINALITY, Cardinality, Role

INTERFACES: dict[Role, str] = {
    Role.SCHEDULER: "scheduler:Scheduler",
    Role.KV_ALLOCATOR: "kv:KVAllocator",
    Role.PREFIX_INDEX: "kv:PrefixIndex",
    Role.ATTENTION: "attention:AttentionBackend",
    Role.LOGITS_PROCESSOR: "sampler:LogitsProcessor",
    Role.SAMPLER: "sampler:Sampler",
    Role.SPECULATOR: "speculator:Speculator",
    Role.ADAPTER: "adapter:AdapterBackend",
    Role.GRAMMAR: "grammar:GrammarBackend",
    Role.MODEL_FAMILY: "model:ModelFamily",
    Role.OP_SET: "ops:OpSet",
    Role.WEIGHTS: "weights:WeightsSource",
    Role.DETOKENIZER: "detokenizer:Detokenizer",
    Role.EXECUTOR: "executor:Executor",
    Role.FRONTEND: "frontend:Frontend",
    Role.PARSER: "parser:OutputParser",
    Role.OBSERVER: "observer:Observer",
}
"""Role to `module:class` below `enginectl.interfaces`."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def build_part(entry: Entry, ctx: BuildContext) -> Any:
    """The provider's object, fit for its role. Raises PluginError with the plugin, the reason and what to do.

    What the factory raises on purpose, an EnginectlError, passes as it is.
    """
    try:
        part = entry.provider.build(ctx)
    except EnginectlError:
        raise
    except Exception as error:
        raise _not_built(entry, error) from error
    check_fit(entry, part)
    return part


def check_factory(entry: Entry) -> None:
    """Import the provider's factory without calling it, so that a wrong name is found before weights are loaded."""
    try:
        entry.provider.load_factory()
    except EnginectlError:
        raise
    except Exception as error:
        raise _not_built(entry, error) from error


def check_fit(entry: Entry, part: object) -> None:
    """Raise PluginError for a method of the interface that is missing or does not take what the interface says."""
    role = entry.provider.role
    reason = misfit(part, interface_of(role))
    if reason is not None:
        what = f"plugin {entry.plugin.origin} cannot serve as {_words(role)}"
        raise PluginError(f"{what}: {reason}; {_advice(role)}")


def interface_of(role: Role) -> type:
    """The class that a part of this role implements."""
    module, _, name = INTERFACES[role].partition(":")
    interface: type = getattr(importlib.import_module(f"enginectl.interfaces.{module}"), name)
    return interface


def misfit(part: object, interface: type) -> str | None:
    """Why calls that the interface allows would fail on this part, or None."""
    cls = type(part)
    if part is None:
        return f"its factory returned None, expected a {interface.__name__}"
    for name, wanted in _members(interface).items():
        found = inspect.getattr_static(part, name, None)
        if found is wanted:
            continue
        if found is None and not hasattr(part, name):
            return f"{cls.__name__} has no {name!r}, which {interface.__name__} asks for"
        if isinstance(wanted, property):
            if inspect.isroutine(found):
                return f"{cls.__name__}.{name} is a method; {interface.__name__} has a property of that name"
            continue
        reason = _mismatch(getattr(part, name), wanted)
        if reason is not None:
            return f"{cls.__name__}.{name}{reason}"
    return None


def _members(interface: type) -> dict[str, Any]:
    """Public and abstract methods and properties, the nearest definition of each."""
    abstract: frozenset[str] = getattr(interface, "__abstractmethods__", frozenset())
    members: dict[str, Any] = {}
    for base in interface.__mro__[:-1]:
        for name, member in vars(base).items():
            is_contract = name in abstract or not name.startswith("_")
            if is_contract and (isinstance(member, property) or inspect.isfunction(member)):
                members.setdefault(name, member)
    return members


def _mismatch(method: Any, wanted: Any) -> str | None:
    if not callable(method):
        return f" is a {type(method).__name__}, not a method"
    try:
        found = inspect.signature(method)
    except (TypeError, ValueError):
        # Without a parameter for self, or compiled and without a signature.
        return " takes no self" if inspect.ismethod(method) else None
    _, *parameters = inspect.signature(wanted).parameters.values()
    if _takes_all_calls(found, parameters):
        return None
    asked = inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters])
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    return f" takes {inspect.Signature(plain)}, and is called with {asked}"


def _takes_all_calls(found: inspect.Signature, parameters: list[inspect.Parameter]) -> bool:
    """With and without what has a default, and wherever the arguments by position end and those by name begin."""
    required = [p for p in parameters if p.default is inspect.Parameter.empty]
    try:
        for given in (parameters, required):
            ordered = [p.name for p in given if p.kind in _POSITIONAL]
            named = [p.name for p in given if p.kind is inspect.Parameter.KEYWORD_ONLY]
            for split in range(len(ordered) + 1):
                found.bind(*ordered[:split], **dict.fromkeys([*ordered[split:], *named]))
    except TypeError:
        return False
    return True


def _not_built(entry: Entry, error: Exception) -> EnginectlError:
    role = entry.provider.role
    said = str(error).rstrip(".")
    reason = f"{type(error).__name__}: {said}" if said else type(error).__name__
    what = f"plugin {entry.plugin.origin} could not build its {_words(role)}: {reason}"
    if (
        isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    ):  # torch's, which is not imported here
        return OutOfMemoryError(f"{what}; lower --max-num-seqs or --max-num-batched-tokens, or free memory")
    return PluginError(f"{what}; {_advice(role)}")


def _words(role: Role) -> str:
    return role.value.replace("_", " ")


def _advice(role: Role) -> str:
    if CARDINALITY[role] in (Cardinality.ONE, Cardinality.PER_PHASE):
        return f"fix or update that package, or choose another with --{role.value.replace('_', '-')}"
    return "fix, update or uninstall that package"
