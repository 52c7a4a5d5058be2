"""The configuration: frozen, strict, built once. `auto` values are resolved into a new value by `compose`.

Precedence: command line, `ENGINECTL_*` environment, `--config` TOML file, defaults (`config_sources.py` merges them).
"""

from __future__ import annotations

from typing import Any

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the engine process needs to know. Lengths are in tokens, sizes in bytes where the name says so.

    model: directory or file with weights. tokenizer: directory, default the model's own.
    dtype: auto (the checkpoint's, or bfloat16 where the CPU has it), float32, bfloat16, float16.
    device: auto, cpu, cuda. max_model_len: most tokens of one sequence, default the model's.
    max_num_seqs: most rows running at once. max_num_batched_tokens: token budget of a step; auto is 256 on a CPU and
    8192 on a GPU. enable_chunked_prefill: when off, a prompt must fit one step whole.
    long_prefill_token_threshold: most prompt tokens a step reads while other rows decode, so that long prompts do not
    stretch the time between their tokens; None is no limit but the step's.
    block_size: tokens a KV block. kv_cache_dtype: auto is the model's dtype.
    kv_cache_memory_bytes: bytes for KV on any device. gpu_memory_utilization: share of a GPU's memory the engine may
    use. num_gpu_blocks_override: exact number of KV blocks, whatever the memory.
    enable_prefix_caching: None means on when a prefix-index plugin is installed.
    prefix_caching_hash_algo: sha256, sha256_cbor, xxhash, xxhash_cbor. scheduling_policy: a scheduler's name.
    overlap_depth: 0 runs host and device in turn; 1 prepares the next step while the device works; auto is 1 on a GPU
    and 0 on a CPU. enforce_eager: no CUDA graphs; decode steps are launched kernel by kernel.
    seed: base of the seeds drawn for requests that bring none; None draws it from the system.
    num_threads: compute threads on a CPU, auto is the cores the process may use.
    plugins: entry points that must load and serve. only_plugins: hide every other plugin that is not core's.
    roles: role to provider name, e.g. {"attention": "triton"}. plugin_options: plugin to its own section.
    enable_lora, max_loras, max_lora_rank, max_cpu_loras, lora_modules: adapters (need a plugin for the role).
    speculative_config: method and its options (needs a plugin for the role).
    tensor_parallel_size, pipeline_parallel_size, data_parallel_size: refused above 1 unless an executor can.
    max_num_queued_requests, max_num_queued_tokens: a fuller queue is answered with 503.
    max_logprobs: most alternatives a request may ask for. step_timeout_s: after so long without a
    sign of life while requests are open, the engine process counts as hung, is ended and started again.
    generation_config: auto takes sampling defaults from the model, vllm ignores them.
    otlp_traces_endpoint: collector that gets a span of each request, by OTLP over HTTP (needs `enginectl[otel]`).
    """

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int | None = None
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool | None = None
    prefix_caching_hash_algo: str = "sha256"
    scheduling_policy: str | None = None
    overlap_depth: int | None = None
    enforce_eager: bool = False
    seed: int | None = None
    num_threads: int | None = None
    plugins: tuple[str, ...] = ()
    only_plugins: bool = False
    roles: dict[str, str] = {}
    plugin_options: dict[str, dict[str, Any]] = {}
    enable_lora: bool = False
    max_loras: int = 4
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_modules: dict[str, str] = {}
    speculative_config: dict[str, Any] | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    max_num_queued_requests: int = 4096
    max_num_queued_tokens: int | None = None
    max_logprobs: int = 20
    step_timeout_s: float = 300.0
    generation_config: str = "auto"
    otlp_traces_endpoint: str | None = None


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP side of `enginectl serve`.

    host, port: where to listen. uds: a Unix socket path instead. api_key: keys, any of which opens every route but
    /health. admin_api_key: opens administrative routes, which are off without it. served_model_name: names the base
    answers to, first is shown. chat_template: file or text instead of the model's. response_role: role in answers.
    root_path: behind a proxy. allowed_origins …: CORS. ssl_*: passed to uvicorn; ssl_cert_reqs
    says whether clients show certificates of ssl_ca_certs: none, optional, required. max_request_bytes: a longer body is
    413. drain_timeout_s: how long running requests may finish at shutdown. metrics_prefix: `enginectl` or e.g. `vllm`.
    metrics_need_key: /metrics needs the API key too. log_requests: one line per request, never its contents.
    tool_call_parser, enable_auto_tool_choice, reasoning_parser: parsers by name.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_key: tuple[str, ...] = ()
    admin_api_key: str | None = None
    served_model_name: tuple[str, ...] = ()
    chat_template: str | None = None
    response_role: str = "assistant"
    root_path: str = ""
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: str = "none"
    ssl_keyfile_password: str | None = None
    max_request_bytes: int = 32 * 1024 * 1024
    drain_timeout_s: float = 30.0
    metrics_prefix: str = "enginectl"
    metrics_need_key: bool = False
    log_requests: bool = True
    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool = False
    reasoning_parser: str | None = None
