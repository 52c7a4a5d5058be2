"""Config and catalogue to an engine: the only place that wires parts together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from enginectl.config import EngineConfig
from enginectl.config_aliases import check_method
from enginectl.config_checks import check_adapter_paths, check_memory, model_path
from enginectl.context import BuildContext, LoadedModel, Machine
from enginectl.engine.admission import Admission
from enginectl.engine.batch import RowTable
from enginectl.engine.client import EngineInfo
from enginectl.engine.core_loop import EngineCore
from enginectl.engine.deferred import DeferredExecutor
from enginectl.engine.grammar import GrammarHost
from enginectl.engine.ledger import BlockPool
from enginectl.engine.phased_attention import PhasedAttention
from enginectl.engine.profile_run import measure_kv
from enginectl.engine.speculation import SpeculationController
from enginectl.engine.threads import leave_cores_to
from enginectl.errors import ConfigError, ModelError, PluginError, RequestError, UnsupportedError
from enginectl.interfaces.adapter import AdapterBackend
from enginectl.interfaces.attention import AttentionBackend
from enginectl.interfaces.executor import Executor
from enginectl.interfaces.kv import KVLayout
from enginectl.interfaces.model import Model, ModelFamily, ModelSpec
from enginectl.interfaces.speculator import Speculator
from enginectl.interfaces.weights import Checkpoint
from enginectl.kv_memory import CudaMemory, KVMemory, use_cuda
from enginectl.machine import detect_machine, seen_from
from enginectl.negotiate import check_capabilities, check_state
from enginectl.plugins import Entry, PluginHost, unsupported_reason
from enginectl.provider import OPTIONAL_ROLES, Role
from enginectl.resolve import (
    check_supported,
    resolve_device,
    resolve_dtype,
    resolve_lengths,
    resolve_overlap,
    size_pool,
)

log = logging.getLogger("enginectl.compose")

PHASES = ("decode", "prefill")

_PACKAGES = {
    Role.PREFIX_INDEX: "enginectl-prefix-cache",
    Role.ADAPTER: "enginectl-lora-sgmv",
    Role.SPECULATOR: "enginectl-spec-ngram or enginectl-spec-draft",
}


_BESIDE = frozenset({Role.DETOKENIZER, Role.FRONTEND, Role.PARSER, Role.OBSERVER})


@dataclass(slots=True)
class Assembled:
    """A wired engine: the loop, what it reports, and what must be closed."""

    core: EngineCore
    info: EngineInfo
    config: EngineConfig
    host: PluginHost
    parts: dict[str, Any]
    executor: Executor
    grammars: GrammarHost | None = None

    def close(self) -> None:
        """Free the device and stop threads."""
        try:
            self.core.drain()
        finally:
            self.executor.close()
            if self.grammars is not None:
                self.grammars.close()


@dataclass(slots=True)
class Composer:
    """Builds the engine side, role by role, and remembers who was chosen.

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

    def compose(self) -> Assembled:
        """Open, negotiate, load, size, wire. Raises EnginectlError with the reason; nothing stays behind."""
        self._check_names()
        check_supported(self.config)
        check_adapter_paths(self.config)
        check_memory(self.config, self.machine)
        checkpoint = self._open()
        device = resolve_device(self.config, self.machine)
        self.machine = seen_from(self.machine, device)
        dtype = resolve_dtype(self.config, checkpoint, self.machine, device)
        memory = self._kv_memory(device)
        ctx = BuildContext(self.config, self.machine, device=device, dtype=dtype, checkpoint=checkpoint)
        family = self._family(ctx, checkpoint)
        spec = family.spec(checkpoint, ctx)
        ctx = self._choose(ctx, spec, family)
        config = ctx.engine
        self.progress(f"loading weights of {Path(config.model).name} ({dtype} on {device})")
        if family.needs_op_set:
            ctx.parts["op_set"] = self._build(Role.OP_SET, ctx)
        with nullcontext() if memory is None else memory.loading("the weights"):
            model = family.load(checkpoint, ctx)
        ctx = ctx.with_(model=model, model_spec=model.spec)
        attention = self._build_attention(ctx)
        model.use_attention(attention)
        ctx.parts["attention"] = attention
        speculator: Speculator | None = self._build(Role.SPECULATOR, ctx.with_(load_model=self._loader(ctx)))
        leave_cores_to(ctx.parts.get("op_set"))
        ctx.parts["speculator"] = speculator
        ctx.parts["adapter"] = self._build_adapters(ctx, model)
        self.progress("sizing the KV pool")
        own_layers = () if speculator is None else speculator.kv_layers()
        measure = None if memory is None else partial(measure_kv, ctx, memory)
        layout = size_pool(config, model.spec, self.machine, own_layers, measure)
        config = resolve_lengths(config, model.spec, layout)
        ctx = ctx.with_(engine=config, kv_layout=layout)
        return self._wire(ctx, layout)

    def _kv_memory(self, device: str) -> KVMemory | None:
        """Made before anything is loaded; None on a device without memory of its own."""
        if not device.startswith("cuda"):
            return None
        use_cuda(device)
        return KVMemory(CudaMemory(device), self.config.gpu_memory_utilization)

    # -- choosing ------------------------------------------------------------------------------------------------

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

    def _build_attention(self, ctx: BuildContext) -> AttentionBackend:
        decode, prefill = self.attention.get("decode"), self.attention.get("prefill")
        if decode is None or prefill is None or decode == prefill:
            backend: AttentionBackend = self._build(Role.ATTENTION, ctx)
            return backend
        backends = []
        for entry in (decode, prefill):
            backends.append(entry.provider.build(self._with_options(ctx, entry)))
            self._record(Role.ATTENTION, entry)
        return PhasedAttention(*backends)

    def _pick_optional(self, role: Role, asked: bool | None, flag: str) -> Entry | None:
        """asked: True means it must be there, False that it must not, None that it may."""
        if asked is False:
            return None
        entry = self._pick(role)
        if entry is None and asked:
            raise PluginError(f"{flag} needs a {role.value} plugin and none is installed; install {_PACKAGES[role]}")
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
        config = resolve_overlap(msgspec.structs.replace(config, device=ctx.device), ctx.device)
        config = resolve_lengths(config, spec, None)
        kv_dtype = ctx.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        if kv_dtype != ctx.dtype:
            raise ConfigError(f"--kv-cache-dtype {kv_dtype}: the attention backend stores {ctx.dtype} here; use auto")
        adapters = Role.ADAPTER in self.chosen or Role.ADAPTER.value in self.overrides
        config = msgspec.structs.replace(config, kv_cache_dtype=kv_dtype, dtype=ctx.dtype, enable_lora=adapters)
        return ctx.with_(engine=config, model_spec=spec)

    def _open(self) -> Checkpoint:
        path = model_path(self.config.model)
        if (given := self._given(Role.WEIGHTS)) is not None:
            if not given.matches(path):
                raise ModelError(f"{str(path)!r} is not in the format that {type(given).__name__} reads")
            read: Checkpoint = given.open(path)
            return read
        wanted = self.config.roles.get(Role.WEIGHTS.value)
        usable = [self.host.entry(Role.WEIGHTS, wanted)] if wanted else self._serving(Role.WEIGHTS)
        ctx = BuildContext(self.config, self.machine)
        for entry in usable:
            source = entry.provider.build(self._with_options(ctx, entry))
            if source.matches(path):
                self._record(Role.WEIGHTS, entry)
                self.progress(f"opening {path.name}")
                opened: Checkpoint = source.open(path)
                return opened
        names = ", ".join(entry.provider.name for entry in usable)
        raise ModelError(f"{str(path)!r} is in no format that an installed weights source reads ({names})")

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
            family: ModelFamily = entry.provider.build(self._with_options(ctx, entry))
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

    # -- building ------------------------------------------------------------------------------------------------

    def _with_options(self, ctx: BuildContext, entry: Entry) -> BuildContext:
        return ctx.with_(options=self.host.options(entry.plugin, self.config.plugin_options))

    def _record(self, role: Role, entry: Entry) -> None:
        plugin = entry.plugin
        self.table.append((role.value, entry.provider.name, plugin.name, plugin.distribution, plugin.version))

    def _build(self, role: Role, ctx: BuildContext) -> Any:
        if (part := self._given(role)) is not None:
            return part
        entry = self.chosen.get(role)
        if entry is None:
            return None
        part = entry.provider.build(self._with_options(ctx, entry))
        self._record(role, entry)
        return part

    def _given(self, role: Role) -> Any:
        """The caller's own object for this role, or None."""
        part = self.overrides.get(role.value)
        for each in part if isinstance(part, list | tuple) else [part] if part is not None else []:
            self.table.append((role.value, type(each).__name__, "-", type(each).__module__, "-"))
        return part

    def _build_adapters(self, ctx: BuildContext, model: Model) -> AdapterBackend | None:
        """Before the KV pool takes what memory is left on the device. An adapter that cannot be loaded is an error."""
        adapters: AdapterBackend | None = self._build(Role.ADAPTER, ctx)
        if adapters is None:
            return None
        adapters.attach(model)
        for name, path in self.config.lora_modules.items():
            self.progress(f"loading adapter {name}")
            try:
                adapters.load(name, path)
            except RequestError as error:
                raise ConfigError(f"--lora-modules {name}={path}: {error}") from error
        return adapters

    def _build_all(self, role: Role, ctx: BuildContext) -> dict[str, Any]:
        """Everyone who serves the role, by name; the caller's own objects come last."""
        parts: dict[str, Any] = {}
        for entry in self._serving(role):
            parts[entry.provider.name] = entry.provider.build(self._with_options(ctx, entry))
            self._record(role, entry)
        given = self._given(role)
        if given is not None:
            for part in given if isinstance(given, list | tuple) else [given]:
                name = str(getattr(part, "name", type(part).__name__))
                parts[name if name not in parts else f"{name}-{len(parts)}"] = part
        return parts

    def _loader(self, ctx: BuildContext) -> Callable[[str], LoadedModel]:
        """Loads a second model through the parts that serve the first."""

        def load(path: str) -> LoadedModel:
            if Role.ATTENTION.value in self.overrides:
                raise UnsupportedError(
                    f"attention was given as an object, which serves one model; it cannot serve {path!r} as well. "
                    "Choose a backend by name."
                )
            shared = {role: part for role, part in self.overrides.items() if role in (Role.WEIGHTS, Role.MODEL_FAMILY)}
            config = msgspec.structs.replace(self.config, model=path)
            other = Composer(config, self.machine, self.host, shared, self.progress, attention=self.attention)
            other.chosen.update(self.chosen)
            return other.load_beside(ctx)

        return load

    def load_beside(self, ctx: BuildContext) -> LoadedModel:
        """This composer's model in the device and dtype of another's, with attention of its own."""
        checkpoint = self._open()
        family = self._family(ctx, checkpoint)
        # Adapters add to the first model only.
        engine = msgspec.structs.replace(ctx.engine, enable_lora=False)
        mine = ctx.with_(engine=engine, checkpoint=checkpoint, model=None, parts=dict(ctx.parts))
        spec = family.spec(checkpoint, mine)
        for entry in self.attention.values():
            check_capabilities({Role.ATTENTION: entry}, spec, mine)
        if family.needs_op_set and mine.parts.get("op_set") is None:
            self._pick_op_set(family)
            mine.parts["op_set"] = self._build(Role.OP_SET, mine)
        self.progress(f"loading weights of {Path(self.config.model).name} ({mine.dtype} on {mine.device})")
        model = family.load(checkpoint, mine.with_(model_spec=spec))
        if model.reads_rows:
            raise UnsupportedError(
                f"{spec.architecture} cannot draft: it keeps track of the engine's rows; use another"
            )
        attention = self._build_attention(mine.with_(model=model, model_spec=model.spec))
        model.use_attention(attention)
        return LoadedModel(checkpoint, model, attention)

    def _wire(self, ctx: BuildContext, layout: KVLayout) -> Assembled:
        config, spec = ctx.engine, ctx.model_spec
        assert spec is not None, "the model is loaded"
        assert config.max_model_len is not None, "resolved"
        assert config.max_num_batched_tokens is not None, "resolved"
        parts = ctx.parts
        parts["kv_allocator"] = self._build(Role.KV_ALLOCATOR, ctx)
        parts["prefix_index"] = self._build(Role.PREFIX_INDEX, ctx)
        parts["scheduler"] = self._build(Role.SCHEDULER, ctx)
        parts["logits_processor"] = list(self._build_all(Role.LOGITS_PROCESSOR, ctx).values())
        parts["sampler"] = self._build(Role.SAMPLER, ctx)
        backends = self._build_all(Role.GRAMMAR, ctx)
        grammars = GrammarHost(backends) if backends else None
        self._check_hidden(parts["speculator"], ctx.model)
        executor: Executor = self._build(Role.EXECUTOR, ctx)
        if config.overlap_depth and not executor.is_asynchronous:
            executor = DeferredExecutor(executor)
        self.progress(f"allocating {layout.num_blocks - 1} KV blocks of {layout.block_size} tokens")
        executor.allocate(layout)
        speculator: Speculator | None = parts["speculator"]
        max_drafts = 0 if speculator is None else speculator.max_drafts
        controller = None
        if speculator is not None and speculator.is_adaptive:
            controller = SpeculationController(config.max_num_seqs, max_drafts, config.max_num_batched_tokens)
        pool = BlockPool(layout.num_blocks, parts["kv_allocator"], parts["prefix_index"])
        core = EngineCore(
            scheduler=parts["scheduler"],
            pool=pool,
            executor=executor,
            table=RowTable(config.max_num_seqs, config.max_model_len, config.block_size),
            admission=Admission(
                pool,
                block_size=config.block_size,
                chunked_prefill=config.enable_chunked_prefill,
                adapters=parts["adapter"],
                grammars=grammars,
                max_drafts=max_drafts,
                vocab_size=spec.vocab_size,
                checks=(*parts["logits_processor"], parts["sampler"]),
            ),
            block_size=config.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_drafts=max_drafts,
            max_prefill=config.long_prefill_token_threshold,
            num_lookahead=max_drafts if speculator is not None and speculator.kv_layers() else 0,
            speculation=controller,
            overlap_depth=config.overlap_depth or 0,
        )
        return Assembled(core, self._info(ctx, layout), config, self.host, parts, executor, grammars)

    @staticmethod
    def _check_hidden(speculator: Speculator | None, model: Model | None) -> None:
        assert model is not None, "the model is loaded"
        if speculator is not None and speculator.reads_hidden and not model.keeps_hidden:
            raise UnsupportedError(
                f"speculator {type(speculator).__name__} reads hidden states, which model {model.spec.architecture} "
                f"({type(model).__name__}) does not keep; choose another --model-family or speculator"
            )

    def _info(self, ctx: BuildContext, layout: KVLayout) -> EngineInfo:
        from enginectl.resolve import eos_token_ids, sampling_defaults

        config, spec, checkpoint = ctx.engine, ctx.model_spec, ctx.checkpoint
        assert spec is not None, "the model is loaded"
        assert checkpoint is not None, "the checkpoint is open"
        directory = config.tokenizer or checkpoint.tokenizer_dir()
        adapter = ctx.parts["adapter"]
        bytes_per_block = sum(group.bytes_per_block for group in layout.groups)
        return EngineInfo(
            model=config.model,
            architecture=spec.architecture,
            dtype=ctx.dtype,
            device=ctx.device,
            max_model_len=config.max_model_len or spec.max_model_len,
            vocab_size=spec.vocab_size,
            eos_token_ids=eos_token_ids(checkpoint),
            bos_token_id=checkpoint.config.get("bos_token_id"),
            sampling_defaults=sampling_defaults(checkpoint, config),
            num_kv_tokens=(layout.num_blocks - 1) * layout.block_size,
            kv_bytes_per_token=bytes_per_block // layout.block_size,
            block_size=layout.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens or 0,
            table=tuple(self.table),
            skipped=tuple(dict.fromkeys(self.skipped)),
            tokenizer_dir=str(directory) if directory is not None else None,
            adapters=tuple(info.name for info in adapter.list()) if adapter is not None else (),
        )


def compose(
    config: EngineConfig,
    *,
    machine: Machine | None = None,
    host: PluginHost | None = None,
    overrides: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = log.info,
) -> Assembled:
    """Assemble the engine side of `config`. overrides: role name to an object of one's own."""
    if machine is None:
        machine = detect_machine()
    host = host or PluginHost(config.plugins, only_named=config.only_plugins)
    return Composer(config, machine, host, overrides or {}, progress).compose()
