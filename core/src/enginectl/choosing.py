"""Who serves which role: picked by name, plugin and rank, and checked against each other before a weight is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from enginectl.building import build_part, check_factory
from enginectl.config import EngineConfig
from enginectl.config_aliases import check_method
from enginectl.config_checks import model_path
from enginectl.context import BuildContext, Machine
from enginectl.errors import ConfigError, ModelError, PluginError, UnsupportedError
from enginectl.interfaces.model import ModelFamily, ModelSpec
from enginectl.interfaces.weights import Checkpoint, WeightsSource
from enginectl.negotiate import check_capabilities, check_state
from enginectl.plugins import Entry, PluginHost, unsupported_reason
from enginectl.provider import OPTIONAL_ROLES, Role
from enginectl.resolve import resolve_lengths, resolve_overlap

log = logging.getLogger("enginectl.compose")

PHASES = ("decode", "prefill")

_BESIDE = frozenset({Role.DETOKENIZER, Role.FRONTEND, Role.PARSER, Role.OBSERVER})


@dataclass(slots=True)
class Chooser:
    """Picks providers, opens the checkpoint, and remembers who was chosen and who was not.

    overrides: role to an object of the caller's own, used as it is. progress: told each stage of start-up.
    """

    config: EngineConfig
    machine: Machine
    host: PluginHost
    overrides: Mapping[str, Any] = field(default_factory=dict)
    progress: Callable[[str], None] = log.info
    table: list[tuple[str, str, str, str, str]] = field(default_factory=list)
    skipped: list[tuple[str, str, str]] = field(default_factory=list)
    chosen: dict[Role, Entry] = field(default_factory=dict)
    attention: dict[str, Entry] = field(default_factory=dict)

    def _check_names(self) -> None:
        check_method(self.config, self.host)
        self.host.check_sections(self.config.plugin_options)
        for role in (*self.config.roles, *self.overrides):
            if role not in set(Role):
                raise ConfigError(f"no role named {role!r}; roles: {', '.join(Role)}")
        self.host.check_choices(self.config.roles, self.config.scheduling_policy)
        for role in self.overrides:
            if role in _BESIDE:
                raise ConfigError(f"a {role} lives beside the engine, not in it; it cannot be given as an object here")

    def _pick(self, role: Role) -> Entry | None:
        wanted = self.config.roles.get(role.value)
        if role is Role.SCHEDULER and wanted is None:
            wanted = self.config.scheduling_policy
        selection = self.host.select(role, self.machine, wanted)
        self.skipped += [(role.value, name, reason) for name, _, reason in selection.skipped]
        if not selection.chosen:
            if role in OPTIONAL_ROLES:
                return None
            reasons = "; ".join(f"{name}: {reason}" for name, _, reason in selection.skipped) or "none is installed"
            raise PluginError(f"no {role.value} can serve here ({reasons})")
        self.chosen[role] = selection.chosen[0]
        return selection.chosen[0]

    def _pick_attention(self) -> None:
        """A backend for each phase: `NAME`, or `decode=NAME,prefill=NAME`; else the best that offers the phase."""
        wanted = self.config.roles.get(Role.ATTENTION.value)
        names = dict.fromkeys(PHASES, wanted)
        if wanted is not None and "=" in wanted:
            names = dict(part.partition("=")[::2] for part in wanted.split(","))
            if set(names) != set(PHASES):
                raise ConfigError(f"--attention {wanted}: give NAME, or decode=NAME,prefill=NAME")
        for phase in PHASES:
            selection = self.host.select(Role.ATTENTION, self.machine, names[phase], phase=phase)
            self.skipped += [(Role.ATTENTION.value, name, reason) for name, _, reason in selection.skipped]
            if not selection.chosen:
                raise PluginError(f"no attention backend can serve the phase {phase!r} here")
            self.attention[phase] = selection.chosen[0]
        self.chosen[Role.ATTENTION] = self.attention["prefill"]

    def _pick_optional(self, role: Role, asked: bool | None, flag: str) -> Entry | None:
        """asked: True means it must be there, False that it must not, None that it may."""
        if asked is False:
            why = f"not asked for: {flag} or its plugin by name turns it on"
            self.skipped += [(role.value, name, why) for name in self.host.catalogue[role]]
            return None
        entry = self._pick(role)
        if entry is None and asked:
            reasons = "; ".join(f"{name}: {reason}" for of, name, reason in self.skipped if of == role.value)
            if reasons:
                raise UnsupportedError(
                    f"{flag}: no installed {role.value} can serve here ({reasons}); `enginectl doctor` shows what this "
                    "machine can run"
                )
            raise self.host.missing(role, flag)
        return entry

    def _wants_prefix_cache(self, spec: ModelSpec) -> bool | None:
        """As configured; off, unless it was asked for, where blocks are not all that a prefix leaves behind."""
        asked = self.config.enable_prefix_caching
        named = self.host.named_for(Role.PREFIX_INDEX) or Role.PREFIX_INDEX.value in self.config.roles
        if asked is None and not named and spec.state_bytes_per_row:
            log.info("the prefix cache is off: %s carries a recurrent state beside its blocks", spec.architecture)
            return False
        return asked

    def _pick_op_set(self, family: ModelFamily) -> None:
        """Only for a family that is written in one; naming one that nobody would use is an error."""
        if family.needs_op_set:
            if Role.OP_SET.value not in self.overrides and self._pick(Role.OP_SET) is None:
                raise PluginError(f"{type(family).__name__} needs an op set, and none can serve here")
        elif Role.OP_SET.value in self.config.roles or Role.OP_SET.value in self.overrides:
            raise ConfigError(f"an op set was given, and {type(family).__name__} uses none; try --model-family native")

    def _choose(self, ctx: BuildContext, spec: ModelSpec, family: ModelFamily) -> BuildContext:
        """Pick every part of cardinality one and intersect what they can do, before a weight is loaded."""
        config = self.config
        self._pick_op_set(family)
        if Role.ATTENTION.value not in self.overrides:
            self._pick_attention()
        for role in (Role.SCHEDULER, Role.KV_ALLOCATOR, Role.SAMPLER, Role.EXECUTOR):
            if role.value not in self.overrides:
                self._pick(role)
        if Role.PREFIX_INDEX.value not in self.overrides:
            self._pick_optional(Role.PREFIX_INDEX, self._wants_prefix_cache(spec), "--enable-prefix-caching")
        if Role.SPECULATOR.value not in self.overrides:
            wanted = config.speculative_config is not None or bool(self.host.named_for(Role.SPECULATOR))
            asked = wanted or Role.SPECULATOR.value in config.roles
            self._pick_optional(Role.SPECULATOR, asked or False, "--speculative-config")
        if Role.ADAPTER.value not in self.overrides:
            asked = config.enable_lora or bool(self.host.named_for(Role.ADAPTER)) or Role.ADAPTER.value in config.roles
            self._pick_optional(Role.ADAPTER, asked, "--enable-lora")
        check_capabilities(self.chosen, spec, ctx)
        check_state(spec, {*self.chosen, *map(Role, self.overrides)})
        if config.enable_chunked_prefill and not spec.takes_chunks:
            log.warning("chunked prefill is off: %s cannot read a prompt in parts", spec.architecture)
            config = msgspec.structs.replace(config, enable_chunked_prefill=False)
        if self.attention:
            check_capabilities({Role.ATTENTION: self.attention["decode"]}, spec, ctx)
        self._check_factories()
        config = resolve_overlap(msgspec.structs.replace(config, device=ctx.device), ctx.device)
        config = resolve_lengths(config, spec, None)
        kv_dtype = ctx.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        if kv_dtype != ctx.dtype:
            raise ConfigError(f"--kv-cache-dtype {kv_dtype}: the attention backend stores {ctx.dtype} here; use auto")
        adapters = Role.ADAPTER in self.chosen or Role.ADAPTER.value in self.overrides
        config = msgspec.structs.replace(config, kv_cache_dtype=kv_dtype, dtype=ctx.dtype, enable_lora=adapters)
        return ctx.with_(engine=config, model_spec=spec)

    def _check_factories(self) -> None:
        """Import what will be built once the weights are loaded: a wrong name there would cost that time."""
        several = [entry for role in (Role.LOGITS_PROCESSOR, Role.GRAMMAR) for entry in self._serving(role)]
        for entry in (*self.chosen.values(), *self.attention.values(), *several):
            check_factory(entry)

    def _open(self) -> Checkpoint:
        path = model_path(self.config.model)
        if (given := self._given(Role.WEIGHTS)) is not None:
            if not given.matches(path):
                raise ModelError(f"{str(path)!r} is not in the format that {type(given).__name__} reads")
            read: Checkpoint = given.open(path)
            return read
        entry, source = self.find_source(path)
        self._record(Role.WEIGHTS, entry)
        self.progress(f"opening {path.name}")
        return source.open(path)

    def find_source(self, path: Path) -> tuple[Entry, WeightsSource]:
        """Who reads what is there. Raises ModelError if nobody does."""
        wanted = self.config.roles.get(Role.WEIGHTS.value)
        usable = [self.host.entry(Role.WEIGHTS, wanted)] if wanted else self._serving(Role.WEIGHTS)
        ctx = BuildContext(self.config, self.machine)
        for entry in usable:
            source: WeightsSource = build_part(entry, self._with_options(ctx, entry))
            if source.matches(path):
                return entry, source
        names = ", ".join(entry.provider.name for entry in usable)
        raise ModelError(
            f"{str(path)!r} is no model that an installed weights source reads ({names}); give a directory with config.json "
            "and *.safetensors, or a .gguf file"
        )

    def _family(self, ctx: BuildContext, checkpoint: Checkpoint) -> ModelFamily:
        kind = checkpoint.config.get("model_type", "unknown")
        if (given := self._given(Role.MODEL_FAMILY)) is not None:
            if (reason := given.refuses(checkpoint)) is not None:
                raise ModelError(f"{type(given).__name__} cannot run {kind!r} exactly ({reason})")
            mine: ModelFamily = given
            return mine
        wanted = self.config.roles.get(Role.MODEL_FAMILY.value)
        usable = [self.host.entry(Role.MODEL_FAMILY, wanted)] if wanted else self._serving(Role.MODEL_FAMILY)
        reasons = []
        for entry in usable:
            family: ModelFamily = build_part(entry, self._with_options(ctx, entry))
            reason = family.refuses(checkpoint)
            if reason is None:
                self.chosen[Role.MODEL_FAMILY] = entry
                self._record(Role.MODEL_FAMILY, entry)
                return family
            reasons.append(f"{entry.provider.name}: {reason}")
            self.skipped.append((Role.MODEL_FAMILY.value, entry.provider.name, reason))
        raise ModelError(f"no model family can run {kind!r} exactly ({'; '.join(reasons)})")

    def _serving(self, role: Role) -> list[Entry]:
        """Every provider of the role that can serve here, named ones first, then by rank."""
        entries = [e for e in self.host.catalogue[role].values() if not unsupported_reason(e.provider, self.machine)]
        named = self.host.named_for(role)
        entries = [e for e in entries if e in named or e.provider.rank >= 0]
        return sorted(entries, key=lambda e: (e not in named, -e.provider.rank, e.provider.name))

    def _with_options(self, ctx: BuildContext, entry: Entry) -> BuildContext:
        return ctx.with_(options=self.host.options(entry.plugin, self.config.plugin_options))

    def _record(self, role: Role, entry: Entry) -> None:
        plugin = entry.plugin
        self.table.append((role.value, entry.provider.name, plugin.name, plugin.distribution, plugin.version))

    def _given(self, role: Role) -> Any:
        """The caller's own object for this role, or None."""
        part = self.overrides.get(role.value)
        for each in part if isinstance(part, list | tuple) else [part] if part is not None else []:
            self.table.append((role.value, type(each).__name__, "-", type(each).__module__, "-"))
        return part
