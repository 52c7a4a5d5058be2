"""Law 3: a batch that mixes the base and adapters is, row for row, what PEFT computes with each alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginectl import Engine, SamplingParams
from enginectl.machine import detect_machine
from enginectl.testing.tiny_adapters import ATTENTION, MLP, Tokens, peft_greedy, save_adapter

ADAPTERS: dict[str, dict[str, Any]] = {
    "r4": {"r": 4, "lora_alpha": 8},
    "r8_attention": {"r": 8, "lora_alpha": 8, "target_modules": ATTENTION},
    "r12_mlp": {"r": 12, "lora_alpha": 30, "target_modules": MLP},
    "r16_rslora": {"r": 16, "lora_alpha": 16, "use_rslora": True},
    "r24_patterns": {
        "r": 24,
        "lora_alpha": 24,
        "rank_pattern": {"q_proj": 6, r"layers\.1\.self_attn\.v_proj": 33},
        "alpha_pattern": {"down_proj": 60, "^model.layers.0.self_attn.q_proj": 3},
    },
    "r32_v_only": {"r": 32, "lora_alpha": 64, "target_modules": ["v_proj"]},
    "r48_all_linear": {"r": 48, "lora_alpha": 48, "target_modules": "all-linear"},
    "r64_regex": {"r": 64, "lora_alpha": 90, "target_modules": r"model\.layers\.[12]\..*\.(k|o|up)_proj"},
}
NAMES = (None, *ADAPTERS)
PATHS = {
    "native, fused": {"model_family": "native", "op_set": "cpu"},
    "native, separate": {"model_family": "native", "op_set": "torch"},
    "transformers": {"model_family": "transformers"},
}
"""Ways through the model."""

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "block_size": 4,
    "max_model_len": 96,
    "enable_lora": True,
    "max_loras": 8,
    "max_lora_rank": 64,
}


def workload() -> tuple[Tokens, list[int]]:
    """Prompts that begin alike and repeat themselves, and how many tokens each is to get."""
    random = np.random.default_rng(11)
    head = random.integers(3, 250, 18).tolist()
    prompts = []
    for i in range(4):
        tail = random.integers(3, 250, int(random.integers(2, 12))).tolist()
        prompts.append([*(head if i % 2 else []), *tail, *tail[:3]])
    return prompts, [14, 20, 9, 24]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter("llama", directory / name, seed=seed, **config)
        for seed, (name, config) in enumerate(ADAPTERS.items())
    }


@pytest.fixture(scope="module")
def expected(adapters: dict[str, Path]) -> dict[str | None, Tokens]:
    prompts, lengths = workload()
    found = {name: peft_greedy("llama", adapters.get(name or ""), prompts, lengths) for name in NAMES}
    for name in ADAPTERS:
        assert found[name] != found[None], f"{name} changes nothing"
    assert len({str(tokens) for tokens in found.values()}) == len(NAMES)
    return found


def run(
    engine: Engine, names: tuple[str | None, ...] = NAMES, *, speculation: str | int = "auto"
) -> dict[str | None, Tokens]:
    """Every prompt with every adapter, interleaved."""
    prompts, lengths = workload()
    pairs = [(name, i) for i in range(len(prompts)) for name in names]
    tickets = []
    for name, i in pairs:
        params = SamplingParams(temperature=0.0, max_tokens=lengths[i], ignore_eos=True, speculation=speculation)
        tickets += engine._submit(engine._requests([prompts[i]], params, {"adapter": name}))
    while not all(ticket.is_done for ticket in tickets):
        engine._step()
    found: dict[str | None, Tokens] = {name: [] for name in names}
    for (name, _), ticket in zip(pairs, tickets, strict=True):
        assert ticket.failure is None
        found[name].append([token for chunk in ticket.take() for token in chunk.token_ids])
    return found


def check_rest(engine: Engine) -> None:
    """Nothing is held any more."""
    backend = engine._assembled.parts["adapter"]
    assert backend.table.references == [0] * len(backend.table.slots)
    assert not backend.library._users
    assert engine.stats().num_blocks_in_use == 0
    engine.core.pool.check()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("path", PATHS)
def test_mixed_batch_equals_peft(
    path: str,
    depth: int,
    tiny: Callable[[str], Path],
    adapters: dict[str, Path],
    expected: dict[str | None, Tokens],
) -> None:
    """Chunks, a pool so small that rows are preempted, prefix hits and drafts, all together."""
    if path == "native, fused":
        hooks = pytest.importorskip("enginectl_attention_cpu.hooks", reason="its blocks are fused")
        if (reason := hooks.unsupported(detect_machine())) is not None:
            pytest.skip(reason)
    options = {
        **SMALL,
        **PATHS[path],
        "lora_modules": {name: str(directory) for name, directory in adapters.items()},
        "max_num_seqs": 16,
        "max_num_batched_tokens": 40,
        "num_gpu_blocks_override": 70,
        "overlap_depth": depth,
        "plugins": ["prefix-cache", "ngram"],
        "plugin_options": {"ngram": {"prompt_lookup_min": 1}},
    }
    with Engine(str(tiny("llama")), **options) as engine:
        assert {info.name: info.rank for info in engine.adapters} == {
            name: 33 if name == "r24_patterns" else config["r"] for name, config in ADAPTERS.items()
        }
        stores = {type(store).__name__ for store in engine._assembled.parts["adapter"]._stores}
        assert stores == {"CpuLowRank" if path == "native, fused" else "TorchStore"}
        for _ in range(2):
            assert run(engine, speculation=4) == expected
        stats = engine.stats()
        check_rest(engine)
    assert stats.num_preemptions > 0
    assert stats.prefix_hits > 0
    assert 0 < stats.num_accepted < stats.num_drafted


@pytest.mark.parametrize("family", ["native", "transformers"])
def test_more_adapters_than_slots(
    family: str,
    tiny: Callable[[str], Path],
    adapters: dict[str, Path],
    expected: dict[str | None, Tokens],
) -> None:
    """Two slots and room for three on the host: the others wait, and the base's rows pass them."""
    options = {
        **SMALL,
        "model_family": family,
        "lora_modules": {name: str(path) for name, path in adapters.items()},
        "max_loras": 2,
        "max_cpu_loras": 3,
        "max_num_seqs": 6,
        "only_plugins": True,
        "plugins": ["sgmv"],
    }
    with Engine(str(tiny("llama")), **options) as engine:
        assert run(engine) == expected
        library = engine._assembled.parts["adapter"].library
        assert library.num_weights <= 3
        assert library.num_reads > len(ADAPTERS), "weights were dropped and read again"
        check_rest(engine)


@pytest.mark.parametrize(
    ("base", "family", "targets"),
    [
        ("phi3", "native", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
        ("phi3", "transformers", "all-linear"),
        ("qwen3", "native", ATTENTION + MLP),
        ("gemma2", "native", ["q_proj", "v_proj", "up_proj"]),
        ("gpt2", "transformers", ["c_attn", "c_proj", "c_fc"]),
        ("mixtral", "native", ATTENTION),
        ("mixtral", "transformers", ATTENTION),
    ],
)
def test_other_architectures_equal_peft(
    base: str, family: str, targets: list[str] | str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """Bases that are stored fused, with windows and caps, with Conv1D, with experts."""
    prompts, lengths = workload()
    fan = {"fan_in_fan_out": True} if base == "gpt2" else {}
    adapter = save_adapter(base, tmp_path / "adapter", target_modules=targets, r=6, **fan)
    expected = {name: peft_greedy(base, path, prompts, lengths) for name, path in ((None, None), ("mine", adapter))}
    assert expected["mine"] != expected[None]
    options = {**SMALL, "model_family": family, "lora_modules": {"mine": str(adapter)}, "max_num_seqs": 8}
    with Engine(str(tiny(base)), **options) as engine:
        assert run(engine, (None, "mine")) == expected
