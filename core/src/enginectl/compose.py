"""Config and catalogue to an engine: the only place that wires parts together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from enginectl.building import build_part
from enginectl.choosing import Chooser
from enginectl.config import EngineConfig
from enginectl.config_checks import check_adapter_paths, check_memory
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
from enginectl.errors import ConfigError, RequestError, UnsupportedError
from enginectl.interfaces.adapter import AdapterBackend
from enginectl.interfaces.attention import AttentionBackend
from enginectl.interfaces.executor import Executor
from enginectl.interfaces.kv import KVLayout
from enginectl.interfaces.model import Model
from enginectl.interfaces.speculator import Speculator
from enginectl.kv_memory import CudaMemory, KVMemory, use_cuda
from enginectl.machine import detect_machine, seen_from
from enginectl.negotiate import check_capabilities
from enginectl.plugins import PluginHost
from enginectl.provider import Role
from enginectl.resolve import (
    check_supported,
    resolve_device,
    resolve_dtype,
    resolve_lengths,
    size_pool,
)

log = logging.getLogger("enginectl.compose")


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
class Composer(Chooser):
    """Builds the engine side, role by role."""

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
        beside: list[LoadedModel] = []
        load_model = self._loader(ctx, beside)
        speculator: Speculator | None = self._build(Role.SPECULATOR, ctx.with_(load_model=load_model))
        leave_cores_to(ctx.parts.get("op_set"))
        ctx.parts["speculator"] = speculator
        ctx.parts["adapter"] = self._build_adapters(ctx, model)
        self.progress("sizing the KV pool")
        own_layers = () if speculator is None else speculator.kv_layers()
        measure = None if memory is None else partial(measure_kv, ctx, memory, beside)
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

    def _build_attention(self, ctx: BuildContext) -> AttentionBackend:
        decode, prefill = self.attention.get("decode"), self.attention.get("prefill")
        if decode is None or prefill is None or decode == prefill:
            backend: AttentionBackend = self._build(Role.ATTENTION, ctx)
            return backend
        backends = []
        for entry in (decode, prefill):
            backends.append(build_part(entry, self._with_options(ctx, entry)))
            self._record(Role.ATTENTION, entry)
        return PhasedAttention(*backends)

    def _build(self, role: Role, ctx: BuildContext) -> Any:
        if (part := self._given(role)) is not None:
            return part
        entry = self.chosen.get(role)
        if entry is None:
            return None
        part = build_part(entry, self._with_options(ctx, entry))
        self._record(role, entry)
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
            parts[entry.provider.name] = build_part(entry, self._with_options(ctx, entry))
            self._record(role, entry)
        given = self._given(role)
        if given is not None:
            for part in given if isinstance(given, list | tuple) else [given]:
                name = str(getattr(part, "name", type(part).__name__))
                parts[name if name not in parts else f"{name}-{len(parts)}"] = part
        return parts

    def _loader(self, ctx: BuildContext, beside: list[LoadedModel]) -> Callable[[str], LoadedModel]:
        """Loads a second model through the parts that serve the first, and notes it in `beside`."""

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
            beside.append(other.load_beside(ctx))
            return beside[-1]

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
        num_threads = config.num_threads or self.machine.num_cores
        grammars = GrammarHost(backends, num_threads=num_threads) if backends else None
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
