"""The flags that configure an engine or its server: one line of help each. Types and defaults are the fields' own."""

from __future__ import annotations

ENGINE_FLAGS: dict[str, dict[str, str]] = {
    "Model": {
        "tokenizer": "Directory of the tokenizer, if not the model's own.",
        "dtype": "auto (the checkpoint's, or bfloat16 where the CPU has it), float32, bfloat16, float16.",
        "device": "auto, cpu, cuda, or cuda:N.",
        "max_model_len": "Most tokens of one sequence, prompt and output. Default: the model's.",
        "seed": "Base of the seeds drawn for requests that bring none.",
        "generation_config": "auto takes sampling defaults from the model, vllm ignores them.",
    },
    "Batching and KV cache": {
        "max_num_seqs": "Most sequences running at once.",
        "max_num_batched_tokens": "Token budget of a step. Default: 256 on a CPU, 8192 on a GPU.",
        "enable_chunked_prefill": "Whether a prompt may be spread over steps.",
        "long_prefill_token_threshold": "Most prompt tokens a step reads while other sequences decode. Default: no limit.",
        "scheduling_policy": "Scheduler by name: fcfs, priority, fair, or a plugin's. Default: fcfs.",
        "block_size": "Tokens per KV block, a power of two up to 256.",
        "kv_cache_dtype": "auto is the model's dtype.",
        "kv_cache_memory_bytes": "Memory for the KV cache, such as 4GiB.",
        "gpu_memory_utilization": "Share of a GPU's memory the engine may use.",
        "num_gpu_blocks_override": "Exact number of KV blocks, whatever the memory.",
        "enable_prefix_caching": "Reuse the KV blocks of equal prefixes. Default: on when a plugin provides it.",
        "prefix_caching_hash_algo": "sha256, sha256_cbor, xxhash, xxhash_cbor.",
        "max_num_queued_requests": "A fuller queue is answered with 503.",
        "max_num_queued_tokens": "More prompt tokens than this waiting are answered with 503. Default: no limit.",
        "max_logprobs": "Most alternatives a request may ask for.",
    },
    "Plugins": {
        "plugins": "Plugins that must load and serve; they win the roles they provide. Comma separated or repeated.",
        "only_plugins": "Hide every plugin that is neither named nor core's.",
        "speculative_config": "Speculative decoding: method and options, which go to that plugin's section.",
        "enable_lora": "Serve LoRA adapters.",
        "lora_modules": "Adapters by served name; several may follow.",
        "max_loras": "Adapters in one batch.",
        "max_lora_rank": "Largest rank of an adapter.",
        "max_cpu_loras": "Adapters kept in host memory. Default: as many as --max-loras.",
        "structured_outputs_config": "Grammar backend for structured outputs; auto chooses per request.",
    },
    "Execution": {
        "num_threads": "Compute threads on a CPU. Default: the cores this process may use.",
        "overlap_depth": "1 prepares the next step while the device works, 0 does not. Default: 1 on a GPU.",
        "enforce_eager": "No CUDA graphs: decode steps are launched kernel by kernel.",
        "step_timeout_s": "After so long without a sign of life the engine process is ended and started again.",
        "tensor_parallel_size": "Needs an executor plugin when above 1.",
        "pipeline_parallel_size": "Needs an executor plugin when above 1.",
        "data_parallel_size": "Needs an executor plugin when above 1.",
    },
    "Logs and traces": {
        "log_level": "debug, info, warning, error.",
        "log_format": "text, or json for one object a line.",
        "otlp_traces_endpoint": "OpenTelemetry collector for traces, such as http://127.0.0.1:4318.",
    },
}

SERVER_FLAGS: dict[str, dict[str, str]] = {
    "Server": {
        "host": "Address to listen on.",
        "port": "Port to listen on; 0 takes a free one.",
        "uds": "Unix socket to listen on instead.",
        "api_key": "Key that opens every route but /health. May be repeated.",
        "admin_api_key": "Key that opens administrative routes, which are off without it.",
        "served_model_name": "Names the base model answers to; the first is shown. Several may follow.",
        "chat_template": "Jinja file or text instead of the model's.",
        "response_role": "Role in answers.",
        "tool_call_parser": "Parser of tool calls, by name.",
        "enable_auto_tool_choice": "Let the model decide whether to call a tool.",
        "reasoning_parser": "Parser of reasoning, by name.",
        "root_path": "Path prefix behind a proxy.",
        "allowed_origins": "CORS: origins, comma separated.",
        "allowed_methods": "CORS: methods.",
        "allowed_headers": "CORS: headers.",
        "allow_credentials": "CORS: allow credentials.",
        "ssl_keyfile": "TLS key.",
        "ssl_certfile": "TLS certificate.",
        "ssl_ca_certs": "TLS certificate authorities of clients.",
        "ssl_cert_reqs": "Whether clients show a certificate: none, optional, required.",
        "ssl_keyfile_password": "Password of the TLS key.",
        "max_request_bytes": "A longer body is answered with 413.",
        "drain_timeout_s": "How long running requests may finish at shutdown.",
        "metrics_prefix": "First part of metric names; vllm keeps existing dashboards working.",
        "metrics_need_key": "Whether /metrics needs the API key too.",
        "log_requests": "One line per request, never its contents.",
    },
}

ROLE_PANEL = "Parts by name"

METAVARS = {
    "model": "MODEL",
    "dtype": "DTYPE",
    "lora_modules": "NAME=PATH…",
    "speculative_config": "JSON",
    "structured_outputs_config": "NAME",
    "plugins": "NAME,…",
    "served_model_name": "NAME…",
    "tokenizer": "DIR",
    "otlp_traces_endpoint": "URL",
    "chat_template": "FILE",
}
