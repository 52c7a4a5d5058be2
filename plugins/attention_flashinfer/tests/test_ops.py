"""The op set over a slow stand-in for FlashInfer's ops, against plain torch's."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from enginectl.builtin.native.block import PlainBlock
from enginectl.builtin.ops_torch import TorchOpSet
from enginectl.context import Machine
from enginectl.interfaces.ops import Block, BlockSpec, BlockWeights
from enginectl.testing.tolerances import TOLERANCES
from enginectl_attention_flashinfer import hooks
from enginectl_attention_flashinfer.ops import FlashInferBlock, FlashInferOpSet, fits

HERE = Path(__file__).resolve().parent


def _beside(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake_flashinfer = _beside("fake_flashinfer")
real_wrappers = _beside("real_wrappers")

PLAIN = BlockSpec(
    hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=64, eps=1e-5, rotary_dim=64
)
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": "head"},
    "gemma2": {"norm": "rms_plus_one", "norm_order": "sandwich", "activation": "gelu_tanh"},
    "gemma3": {"norm": "rms_plus_one", "norm_order": "sandwich", "activation": "gelu_tanh", "qk_norm": "head"},
    "olmo2": {"norm_order": "post", "qk_norm": "flat"},
    "granite": {"residual_scale": 0.25},
    "smollm3": {"no_rope": True},
    "partial": {"rotary_dim": 32},
    "wide": {"head_dim": 128, "rotary_dim": 128},
}
DTYPES = ["float16", "bfloat16"]


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device(), dtype)


def weights_of(spec: BlockSpec, dtype: torch.dtype) -> BlockWeights:
    """Of every tensor that the structure has."""
    hidden, middle, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q_size, kv_size = spec.num_heads * dim, spec.num_kv_heads * dim
    pre, post, flat = spec.norm_order != "post", spec.norm_order != "pre", spec.qk_norm == "flat"

    def norm(seed: int, size: int = hidden) -> Tensor:
        return noise(size, dtype=dtype, seed=seed) * 0.2 + 1

    return BlockWeights(
        qkv=noise(q_size + 2 * kv_size, hidden, dtype=dtype, seed=1) * 0.2,
        qkv_bias=noise(q_size + 2 * kv_size, dtype=dtype, seed=2) * 0.2,
        output=noise(hidden, q_size, dtype=dtype, seed=3) * 0.05,
        output_bias=None,
        gate_up=noise(2 * middle, hidden, dtype=dtype, seed=4) * 0.2,
        down=noise(hidden, middle, dtype=dtype, seed=5) * 0.1,
        attention_norm=norm(6) if pre else None,
        attention_post_norm=norm(7) if post else None,
        mlp_norm=norm(8) if pre else None,
        mlp_post_norm=norm(9) if post else None,
        q_norm=norm(10, q_size if flat else dim) if spec.qk_norm else None,
        k_norm=norm(11, kv_size if flat else dim) if spec.qk_norm else None,
    )


def run(block: Block, spec: BlockSpec, dtype: torch.dtype, num_tokens: int = 6) -> list[Tensor]:
    """Everything a block gives for the same rows."""
    hidden = noise(num_tokens, spec.hidden_size, dtype=dtype, seed=20)
    attended = noise(num_tokens, spec.num_heads * spec.head_dim, dtype=dtype, seed=21)
    angles = noise(num_tokens, spec.rotary_dim // 2, seed=22).repeat(1, 2)
    kept = hidden.clone()
    heads = block.before(hidden, angles.cos(), angles.sin())
    assert torch.equal(hidden, kept), "before() changed the hidden rows"
    return [*heads, block.after(hidden, attended)]


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("dtype_name", DTYPES)
def test_block_equals_plain_torch(name: str, dtype_name: str) -> None:
    """Every dense structure, strided q and k, in both dtypes."""
    dtype = getattr(torch, dtype_name)
    spec = msgspec.structs.replace(PLAIN, **CHANGES[name])
    weights = weights_of(spec, dtype)
    block = FlashInferOpSet(fake_flashinfer.Recorder().library()).block(spec, weights)
    assert isinstance(block, FlashInferBlock)
    plain = PlainBlock(spec, weights, TorchOpSet("cpu", dtype))
    for found, exact in zip(run(block, spec, dtype), run(plain, spec, dtype), strict=True):
        assert found.shape == exact.shape
        torch.testing.assert_close(found, exact, **TOLERANCES[dtype_name]._asdict())


@pytest.mark.parametrize("plus_one", [False, True])
def test_norm_equals_plain_torch(plus_one: bool) -> None:
    """As core's own blocks and heads use it; no rows make no launch."""
    rows, weight = noise(5, 48, dtype=torch.float16), noise(48, dtype=torch.float16, seed=1)
    found = FlashInferOpSet(fake_flashinfer.Recorder().library()).rms_norm(weight, 1e-6, plus_one=plus_one)
    exact = TorchOpSet("cpu", torch.float16).rms_norm(weight, 1e-6, plus_one=plus_one)
    torch.testing.assert_close(found(rows), exact(rows), **TOLERANCES["float16"]._asdict())
    assert found(rows[:0]).shape == (0, 48)


def test_rope_table_is_made_once_a_step() -> None:
    """Layers of a step share it; the next step, and another RoPE of the same step, have their own."""
    recorder = fake_flashinfer.Recorder()
    ops = FlashInferOpSet(recorder.library())
    blocks = [ops.block(PLAIN, weights_of(PLAIN, torch.float16)) for _ in range(2)]
    hidden = noise(3, 32, dtype=torch.float16)
    steps = [(noise(3, 64, seed=seed), noise(3, 64, seed=seed + 1)) for seed in (30, 40)]
    for cos, sin in steps:
        for block in blocks:
            assert block is not None
            block.before(hidden, cos, sin)
    tables = [call["cos_sin_cache"] for name, _, call in recorder.calls if "rope" in name]
    assert tables[0] is tables[1]
    assert tables[2] is tables[3]
    for table, (cos, sin) in zip(tables[::2], steps, strict=True):
        assert torch.equal(table, torch.cat((cos[:, :32], sin[:, :32]), 1))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 4, "top_k": 2},
        {"head_dim": 80, "rotary_dim": 80},
        {"rotary_dim": 24},
        {"intermediate_size": 44},
        {"hidden_size": 36},
    ],
)
def test_structures_the_kernels_do_not_take_are_left_to_core(changes: dict[str, Any]) -> None:
    """Experts, heads of other sizes, and rows that are no whole vectors: they would read beside their rows."""
    spec = msgspec.structs.replace(PLAIN, **changes)
    assert not fits(spec)
    ops = FlashInferOpSet(fake_flashinfer.Recorder().library())
    assert ops.block(spec, weights_of(PLAIN, torch.float16)) is None


@pytest.mark.parametrize("dtype_name", DTYPES)
def test_flashinfers_own_ops_take_what_they_are_given(dtype_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python as installed, over kernels that are played; the modules it asks for are those that are prebuilt."""
    library, asked = real_wrappers.real_ops(monkeypatch, fake_flashinfer.OPS)
    dtype = getattr(torch, dtype_name)
    for changes in CHANGES.values():
        spec = msgspec.structs.replace(PLAIN, **changes)
        weights = weights_of(spec, dtype)
        block = FlashInferOpSet(library).block(spec, weights)
        assert block is not None
        plain = PlainBlock(spec, weights, TorchOpSet("cpu", dtype))
        for found, exact in zip(run(block, spec, dtype), run(plain, spec, dtype), strict=True):
            torch.testing.assert_close(found, exact, **TOLERANCES[dtype_name]._asdict())
    command = [sys.executable, str(HERE.parents[2] / "bench" / "gpu" / "prebuild.py"), "--list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert asked == {name for name in listed if not name.startswith("batch_")}


def test_unsupported_without_cuda() -> None:
    """Law 23: the provider says why, and stands behind Triton's."""
    (provider,) = hooks.enginectl_op_set()
    assert provider.unsupported is not None
    machine = Machine(num_cores=1, memory_bytes=1, cpu_flags=frozenset(), gpus=(), versions={})
    assert "needs an NVIDIA GPU" in (provider.unsupported(machine) or "")
    assert provider.capabilities.dtypes == {"float16", "bfloat16"}
    assert provider.rank < 50


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("dtype_name", DTYPES)
def test_block_on_the_gpu_equals_plain_torch(name: str, dtype_name: str) -> None:
    """FlashInfer itself, on rows of its own device."""
    library = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    dtype = getattr(torch, dtype_name)
    spec = msgspec.structs.replace(PLAIN, **CHANGES[name])
    with torch.device("cuda"):
        weights = weights_of(spec, dtype)
        block = FlashInferOpSet(library).block(spec, weights)
        assert block is not None
        plain = PlainBlock(spec, weights, TorchOpSet("cuda", dtype))
        for found, exact in zip(run(block, spec, dtype), run(plain, spec, dtype), strict=True):
            torch.testing.assert_close(found, exact, **TOLERANCES[dtype_name]._asdict())
