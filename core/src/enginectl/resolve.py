"""`auto` becomes a value here: device, dtype, lengths, budgets and the size of the KV pool."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from enginectl.config import EngineConfig
from enginectl.config_checks import check_blocks
from enginectl.context import Machine
from enginectl.errors import ConfigError, OutOfMemoryError, UnsupportedError
from enginectl.interfaces.kv import KVGroup, KVLayout
from enginectl.interfaces.model import LayerSpec, ModelSpec
from enginectl.interfaces.weights import Checkpoint
from enginectl.units import format_size, plural

log = logging.getLogger("enginectl.resolve")

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SHORT = {"float": "float32", "fp32": "float32", "bf16": "bfloat16", "half": "float16", "fp16": "float16"}
_CPU_BUDGET, _GPU_BUDGET = 256, 8192
_CPU_KV_SHARE = 0.4
_LEAST_BLOCKS = 2
_SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def check_supported(config: EngineConfig) -> None:
    """Refuse what a flag promises and no installed part provides."""
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        size = getattr(config, name)
        if size != 1:
            flag = "--" + name.replace("_", "-")
            raise UnsupportedError(f"{flag} {size}: no installed executor runs on more than one device; use 1")


def resolve_device(config: EngineConfig, machine: Machine) -> str:
    """`cuda:0` or `cpu`. Raises UnsupportedError for cuda on a machine without it."""
    if config.device == "auto":
        return "cuda:0" if machine.gpus else "cpu"
    if config.device.startswith("cuda"):
        if not machine.gpus:
            raise UnsupportedError(
                f"--device {config.device}: no NVIDIA GPU was found; use cpu, or see enginectl doctor"
            )
        return config.device if ":" in config.device else "cuda:0"
    if config.device != "cpu":
        raise ConfigError(f"--device {config.device!r} is not known; allowed: auto, cpu, cuda")
    return "cpu"


def resolve_overlap(config: EngineConfig, device: str) -> EngineConfig:
    """Depth 1 on a GPU, which answers later anyway; 0 on a CPU, whose cores the host would take."""
    depth = config.overlap_depth
    if depth is None:
        depth = 1 if device.startswith("cuda") else 0
    return msgspec.structs.replace(config, overlap_depth=depth)


def resolve_dtype(config: EngineConfig, checkpoint: Checkpoint, machine: Machine, device: str) -> str:
    """The checkpoint's own; on a CPU, 16-bit checkpoints run in bfloat16 where the CPU computes it, else float32."""
    wanted = _SHORT.get(config.dtype, config.dtype)
    if wanted != "auto":
        if wanted not in DTYPES:
            raise ConfigError(f"--dtype {config.dtype!r} is not known; allowed: auto, {', '.join(DTYPES)}")
        return wanted
    stored = checkpoint.dtype if checkpoint.dtype in DTYPES else "bfloat16"
    if device == "cpu" and DTYPES[stored] == 2:
        return "bfloat16" if {"avx512_bf16", "amx_bf16", "bf16"} & machine.cpu_flags else "float32"
    return stored


def resolve_lengths(config: EngineConfig, spec: ModelSpec, layout: KVLayout | None) -> EngineConfig:
    """max_model_len and the token budget. With a layout, a length nobody asked for shrinks to what the pool holds."""
    length = config.max_model_len
    if length is None:
        length = spec.max_model_len
    elif length > spec.max_model_len:
        raise ConfigError(f"--max-model-len {length} is more than the model was made for ({spec.max_model_len})")
    budget = config.max_num_batched_tokens or (_CPU_BUDGET if config.device == "cpu" else _GPU_BUDGET)
    if not config.enable_chunked_prefill and budget < length:
        if config.max_num_batched_tokens is not None:
            raise ConfigError(
                f"--no-enable-chunked-prefill needs --max-num-batched-tokens of at least --max-model-len ({length}), "
                f"found {budget}"
            )
        budget = length
    if layout is None:
        if budget < config.max_num_seqs:
            log.warning(
                "max_num_batched_tokens is %d, less than max_num_seqs, %d: so many sequences can run, and only %d of them "
                "advance in a step; raise one or lower the other",
                budget,
                config.max_num_seqs,
                budget,
            )
        # The model's own maximum stays open until the pool is sized.
        return msgspec.structs.replace(config, max_num_batched_tokens=budget)
    capacity = (layout.num_blocks - 1) * layout.block_size
    if length > capacity:
        if config.num_gpu_blocks_override is not None:
            check_blocks(config.num_gpu_blocks_override, config.block_size, length)
        if config.max_model_len is not None:
            needed = -(-length // layout.block_size) * sum(group.bytes_per_block for group in layout.groups)
            raise OutOfMemoryError(
                f"the KV pool holds {capacity} tokens, fewer than --max-model-len {length}; lower it, or "
                f"{_more_memory(needed, config, spec)}"
            )
        log.warning("max_model_len lowered from %d to %d, what the KV pool holds", length, capacity)
        length = capacity
    return msgspec.structs.replace(config, max_model_len=length, max_num_batched_tokens=budget)


def kv_groups(layers: Iterable[LayerSpec], block_size: int, itemsize: int) -> tuple[KVGroup, ...]:
    """Layers by group. Layers of one group share a block table."""
    groups = []
    for _, members in itertools.groupby(sorted(enumerate(layers), key=lambda p: p[1].group), key=lambda p: p[1].group):
        pairs = list(members)
        size = sum(layer.num_kv_heads * (layer.head_dim + layer.v_head_dim) for _, layer in pairs)
        groups.append(KVGroup(tuple(i for i, _ in pairs), None, size * block_size * itemsize))
    return tuple(groups)


def size_pool(
    config: EngineConfig,
    spec: ModelSpec,
    machine: Machine,
    more: Sequence[LayerSpec] = (),
    measure: Callable[[], int] | None = None,
) -> KVLayout:
    """How many blocks fit beside the rows' recurrent state. more: a speculator's own layers, under the same block ids.

    measure: bytes for KV on a device with memory of its own; it is asked unless the configuration says them.

    Raises OutOfMemoryError when not even one sequence of 2 blocks does.
    """
    itemsize = DTYPES[config.kv_cache_dtype]
    groups = kv_groups((*spec.layers, *more), config.block_size, itemsize)
    bytes_per_block = sum(group.bytes_per_block for group in groups)
    state = config.max_num_seqs * spec.state_bytes_per_row
    longest = -(-(config.max_model_len or spec.max_model_len) // config.block_size)
    useful = max(config.max_num_seqs * longest, _LEAST_BLOCKS)
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
        wanted = num_blocks * bytes_per_block + state
        if measure is None and wanted > machine.memory_bytes:
            raise OutOfMemoryError(
                f"--num-gpu-blocks-override {num_blocks} takes {format_size(wanted)}, and this process may use "
                f"{format_size(machine.memory_bytes)}; lower it"
            )
    else:
        memory = config.kv_cache_memory_bytes
        if memory is None:
            memory = int(machine.memory_bytes * _CPU_KV_SHARE) if measure is None else measure()
        memory -= state
        least = _more_memory(_LEAST_BLOCKS * bytes_per_block, config, spec)
        if memory < 0:
            raise OutOfMemoryError(
                f"{format_size(memory + state)} for the KV cache are less than the recurrent state of --max-num-seqs "
                f"{config.max_num_seqs} ({format_size(spec.state_bytes_per_row)} a sequence); lower it, or {least}"
            )
        num_blocks = min(memory // bytes_per_block if bytes_per_block else useful, useful)
        if num_blocks < _LEAST_BLOCKS:
            raise OutOfMemoryError(
                f"{format_size(memory)} for the KV cache hold {num_blocks} {plural(num_blocks, 'block')} of "
                f"{config.block_size} {plural(config.block_size, 'token')} ({format_size(bytes_per_block)} each), at least "
                f"{_LEAST_BLOCKS} are needed; {least}"
            )
    layout = KVLayout(groups, config.block_size, num_blocks + 1, config.kv_cache_dtype)
    _report(layout, config, spec, bytes_per_block)
    return layout


def _more_memory(kv_bytes: int, config: EngineConfig, spec: ModelSpec) -> str:
    """What to do so that so much KV fits beside the rows' recurrent state, on this device."""
    needed = kv_bytes + config.max_num_seqs * spec.state_bytes_per_row
    share = ", or --gpu-memory-utilization" if config.device.startswith("cuda") else ""
    return f"raise --kv-cache-memory-bytes to {needed} ({format_size(needed)}) at least{share}"


def _report(layout: KVLayout, config: EngineConfig, spec: ModelSpec, bytes_per_block: int) -> None:
    tokens = (layout.num_blocks - 1) * layout.block_size
    length = min(config.max_model_len or spec.max_model_len, tokens)
    if size := spec.state_bytes_per_row:
        rows = config.max_num_seqs
        log.info("recurrent state: %s for %d rows (%d bytes each)", format_size(rows * size), rows, size)
    log.info(
        "KV pool: %d tokens in %d blocks of %d (%s, %d bytes a token); sequences that fit: %d of %d tokens, %d of 2048",
        tokens,
        layout.num_blocks - 1,
        layout.block_size,
        format_size((layout.num_blocks - 1) * bytes_per_block),
        bytes_per_block // layout.block_size,
        tokens // length,
        length,
        tokens // 2048,
    )


def eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """EOS is a set: generation_config's, the configuration's and the tokenizer's, in that order."""
    found: list[int] = []
    for source in (checkpoint.generation_config, checkpoint.config):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    directory = checkpoint.tokenizer_dir()
    if directory is not None:
        found += _tokenizer_eos(directory)
    return tuple(dict.fromkeys(int(token) for token in found))


def _tokenizer_eos(directory: Path) -> list[int]:
    """The id of the token that tokenizer_config.json calls eos_token; empty if it names none that is in the vocabulary."""
    named = _read_json(directory / "tokenizer_config.json")
    token = named.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        return []
    added = [(int(number), entry) for number, entry in named.get("added_tokens_decoder", {}).items()]
    if not added:
        added = [(entry["id"], entry) for entry in _added_tokens(directory / "tokenizer.json")]
    return [number for number, entry in added if entry.get("content") == content]


class _TokenizerFile(msgspec.Struct):
    """What is wanted of a tokenizer.json. The vocabulary, megabytes of it, is skipped over."""

    added_tokens: list[dict[str, Any]] = []


def _added_tokens(path: Path) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).added_tokens
    except (OSError, msgspec.MsgspecError):
        return []


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def sampling_defaults(checkpoint: Checkpoint, config: EngineConfig) -> dict[str, Any]:
    """What the model's generation_config says about sampling, for requests that do not."""
    if config.generation_config not in ("auto", "vllm"):
        raise ConfigError(f"--generation-config {config.generation_config!r} is not known; allowed: auto, vllm")
    if config.generation_config == "vllm":
        return {}
    given = checkpoint.generation_config
    return {name: given[name] for name in _SAMPLING_DEFAULTS if given.get(name) is not None}
