"""Ranges of configuration values, checked once, whatever the source."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginectl.config import EngineConfig, ServerConfig
from enginectl.context import Machine
from enginectl.errors import ConfigError, ModelError, UnsupportedError, nearest
from enginectl.logs import FORMATS, LEVELS, LogConfig
from enginectl.units import format_size, plural

BUILTIN_EXECUTOR = "local"


@dataclass(frozen=True, slots=True)
class Range:
    """What a value may be: a test, and the same in words."""

    allows: Callable[[Any], bool]
    words: str


def _at_least(least: float) -> Range:
    return Range(lambda value: value >= least, f"{least} or more")


def _count_to(most: int) -> Range:
    """Arrays are made that long, or threads started: what nobody means would take the machine down."""
    return Range(lambda value: 1 <= value <= most, f"1 to {most}")


def _one_of(*names: str) -> Range:
    return Range(lambda value: value in names, ", ".join(names))


_POSITIVE = Range(lambda value: value > 0, "more than 0")

ENGINE_RANGES: dict[str, Range] = {
    "dtype": _one_of("auto", "float32", "bfloat16", "float16"),
    "device": Range(
        lambda value: re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is not None, "auto, cpu, cuda, or cuda:N"
    ),
    "max_model_len": _at_least(1),
    "max_num_seqs": _count_to(1 << 16),
    "max_num_batched_tokens": _count_to(1 << 20),
    "long_prefill_token_threshold": _at_least(1),
    "block_size": Range(lambda n: 1 <= n <= 256 and n & (n - 1) == 0, "a power of two from 1 to 256"),
    "kv_cache_dtype": _one_of("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"),
    "kv_cache_memory_bytes": _at_least(1),
    "gpu_memory_utilization": Range(lambda share: 0 < share <= 1, "more than 0, at most 1"),
    "num_gpu_blocks_override": _at_least(2),
    "prefix_caching_hash_algo": _one_of("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"),
    "overlap_depth": Range(lambda depth: depth in (0, 1), "0, 1, or auto"),
    "seed": Range(lambda seed: 0 <= seed < 1 << 64, "a whole number from 0 to 2**64 - 1"),
    "num_threads": _count_to(1024),
    "max_loras": _at_least(1),
    "max_lora_rank": _at_least(1),
    "max_cpu_loras": _at_least(1),
    "tensor_parallel_size": _at_least(1),
    "pipeline_parallel_size": _at_least(1),
    "data_parallel_size": _at_least(1),
    "max_num_queued_requests": _at_least(1),
    "max_num_queued_tokens": _at_least(1),
    "max_logprobs": _at_least(0),
    "step_timeout_s": _POSITIVE,
    "generation_config": _one_of("auto", "vllm"),
}

SERVER_RANGES: dict[str, Range] = {
    "port": Range(lambda port: 0 <= port <= 65535, "0 (any free port) to 65535"),
    "max_request_bytes": _at_least(1),
    "drain_timeout_s": _at_least(0),
    "ssl_cert_reqs": _one_of("none", "optional", "required"),
    "metrics_prefix": Range(
        lambda text: re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", text) is not None, "letters, digits and underscores"
    ),
    "root_path": Range(lambda path: path == "" or path.startswith("/"), "empty, or a path that starts with /"),
}

LOG_RANGES: dict[str, Range] = {"log_level": _one_of(*LEVELS), "log_format": _one_of(*FORMATS)}


def validate_config(config: EngineConfig, origins: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for a value out of range or two that contradict each other. origins: field to its source."""
    where = origins or {}
    _check_ranges(config, ENGINE_RANGES, where)
    batched, longest = config.max_num_batched_tokens, config.max_model_len
    if not config.enable_chunked_prefill and batched is not None and longest is not None and batched < longest:
        raise ConfigError(
            f"max_num_batched_tokens is {batched}, less than max_model_len, {longest}, and chunked prefill is off: a "
            "prompt must fit one step whole. Turn chunked prefill on or raise max_num_batched_tokens."
        )
    if config.long_prefill_token_threshold is not None and not config.enable_chunked_prefill:
        raise ConfigError(
            f"long_prefill_token_threshold is {config.long_prefill_token_threshold}, and chunked prefill is off: a prompt "
            "that may not be spread over steps cannot be slowed. Turn chunked prefill on or leave the threshold out."
        )
    if config.num_gpu_blocks_override is not None and config.max_model_len is not None:
        check_blocks(config.num_gpu_blocks_override, config.block_size, config.max_model_len)
    _check_adapters(config)
    scheduler = config.roles.get("scheduler")
    if scheduler and config.scheduling_policy and scheduler != config.scheduling_policy:
        raise ConfigError(
            f"scheduling_policy is {config.scheduling_policy!r} and roles.scheduler is {scheduler!r}; give one of them"
        )
    _check_parallel(config)


def check_blocks(num_blocks: int, block_size: int, max_model_len: int) -> None:
    """Raise ConfigError if a number of blocks somebody chose cannot hold one sequence."""
    if num_blocks * block_size < max_model_len:
        raise ConfigError(
            f"--num-gpu-blocks-override {num_blocks}: {num_blocks} blocks of {block_size} {plural(block_size, 'token')} hold fewer than "
            f"max_model_len, {max_model_len}; give at least {-(-max_model_len // block_size)}, or lower --max-model-len"
        )


def check_memory(config: EngineConfig, machine: Machine) -> None:
    """Raise ConfigError if more is asked for KV than the machine has."""
    wanted = config.kv_cache_memory_bytes
    on_gpu = config.device.startswith("cuda") or (config.device == "auto" and machine.gpus)
    here = max((gpu.memory_bytes for gpu in machine.gpus), default=0) if on_gpu else machine.memory_bytes
    if wanted is not None and here and wanted > here:
        where = "the largest GPU has" if on_gpu else "this process may use"
        raise ConfigError(
            f"--kv-cache-memory-bytes is {format_size(wanted)}, and {where} {format_size(here)}; lower it, and leave room "
            "for the weights"
        )


def model_path(model: str) -> Path:
    """Where the model is. Raises ModelError if nothing is there."""
    path = Path(model).expanduser()
    if not path.exists():
        raise ModelError(
            f"no model at {str(path)!r}; give a directory with config.json and *.safetensors, or a .gguf file (models are "
            "not downloaded)"
        )
    return path


def check_tokenizer(config: EngineConfig) -> None:
    """Raise ConfigError if the tokenizer that was asked for is not there."""
    if config.tokenizer is not None and not Path(config.tokenizer).expanduser().is_dir():
        raise ConfigError(f"--tokenizer {config.tokenizer}: no such directory; give one with tokenizer.json")


def check_adapter_paths(config: EngineConfig) -> None:
    """Raise ConfigError for an adapter that is not where it is said to be."""
    for name, path in config.lora_modules.items():
        place = Path(path).expanduser()
        if not (place / "adapter_config.json").is_file():
            found = (
                "no adapter_config.json in" if place.is_dir() else "no directory" if place.exists() else "nothing at"
            )
            raise ConfigError(
                f"--lora-modules {name}={path}: {found} {path!r}; give the directory with adapter_config.json"
            )


def validate_server(config: ServerConfig, origins: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for a value out of range or two that contradict each other."""
    _check_ranges(config, SERVER_RANGES, origins or {})
    check_keys(config)
    if (config.ssl_keyfile is None) != (config.ssl_certfile is None):
        raise ConfigError("ssl_keyfile and ssl_certfile belong together; one of them is missing")
    if config.ssl_certfile is None and (config.ssl_ca_certs is not None or config.ssl_keyfile_password is not None):
        raise ConfigError(
            "ssl_ca_certs and ssl_keyfile_password need ssl_certfile and ssl_keyfile: there is no TLS yet"
        )
    if (config.ssl_ca_certs is not None) != (config.ssl_cert_reqs != "none"):
        raise ConfigError(
            f"ssl_cert_reqs is {config.ssl_cert_reqs} and ssl_ca_certs is {config.ssl_ca_certs or 'not given'}: clients are "
            "asked for certificates of those authorities with both, or with neither"
        )
    if config.enable_auto_tool_choice and config.tool_call_parser is None:
        raise ConfigError("enable_auto_tool_choice needs a tool_call_parser: without one no call would be recognised")


def check_keys(config: ServerConfig) -> None:
    """Raise ConfigError for keys that would open nothing, or more than they should."""
    keys = config.api_key if config.admin_api_key is None else (*config.api_key, config.admin_api_key)
    if any(not key.strip() for key in keys):
        raise ConfigError("an API key is empty; leave the option out to serve without keys")
    if config.admin_api_key is not None and config.admin_api_key in config.api_key:
        raise ConfigError("admin_api_key must differ from every api_key, whose holders would be administrators")


def validate_logs(config: LogConfig, origins: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for a level or format that does not exist."""
    _check_ranges(config, LOG_RANGES, origins or {})


def _check_ranges(
    config: EngineConfig | ServerConfig | LogConfig, ranges: Mapping[str, Range], origins: Mapping[str, str]
) -> None:
    for name, allowed in ranges.items():
        value = getattr(config, name)
        if value is not None and not allowed.allows(value):
            close = nearest(value, allowed.words.split(", ")) if isinstance(value, str) else ""
            where = f"{origins[name]}: " if name in origins else ""
            raise ConfigError(f"{where}{name} is {value!r}; allowed: {allowed.words}{close.removesuffix(';')}")


def _check_adapters(config: EngineConfig) -> None:
    if config.lora_modules and not config.enable_lora:
        raise ConfigError(f"lora_modules names {', '.join(config.lora_modules)}, but enable_lora is off; turn it on")
    if config.max_cpu_loras is not None and config.max_cpu_loras < config.max_loras:
        raise ConfigError(
            f"max_cpu_loras is {config.max_cpu_loras}, less than max_loras, {config.max_loras}: every adapter on the "
            "device is kept on the CPU too. Raise it."
        )


def _check_parallel(config: EngineConfig) -> None:
    """The built-in executor drives one device; a plugin's, when it is named, judges for itself."""
    if config.roles.get("executor", BUILTIN_EXECUTOR) != BUILTIN_EXECUTOR:
        return
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        size = getattr(config, name)
        if size > 1:
            raise UnsupportedError(
                f"{name} is {size}: no installed executor provides it (installed: {BUILTIN_EXECUTOR}, one device). "
                "Leave it at 1, or install an executor plugin and name it with --executor."
            )
