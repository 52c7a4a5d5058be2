"""The backend over a slow stand-in for FlashInfer: what it plans and passes is what the kit's reference needs."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from enginectl.context import BuildContext, Gpu, Machine
from enginectl.errors import UnsupportedError
from enginectl.interfaces.model import LayerSpec
from enginectl.provider import Provider
from enginectl.testing.attention import AttentionConformance, Scene, context_for, layer_spec
from enginectl.testing.paging import Pages
from enginectl_attention_flashinfer import hooks
from enginectl_attention_flashinfer.attention import FlashInferAttention, Shape

REAL = hooks.enginectl_attention()[0]
_spec = importlib.util.spec_from_file_location("fake_flashinfer", Path(__file__).with_name("fake_flashinfer.py"))
assert _spec is not None
assert _spec.loader is not None
fake_flashinfer = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake_flashinfer)


def on_the_fake(recorder: Any) -> Provider:
    def factory(ctx: BuildContext) -> FlashInferAttention:
        assert ctx.model_spec is not None
        return FlashInferAttention(
            ctx.model_spec.layers,
            block_size=ctx.engine.block_size,
            device="cpu",
            dtype=getattr(torch, ctx.dtype),
            library=recorder.library(),
            workspace_bytes=64,
        )

    return dataclasses.replace(REAL, factory=factory)


class _WideHeads(AttentionConformance):
    """The kit with heads of a size that FlashInfer has."""

    def scene(self, provider: Provider, layers: Sequence[LayerSpec], device: str, dtype: str, block_size: int) -> Scene:
        if any(layer.chunk is not None for layer in layers):
            pytest.skip("flashinfer has no attention in chunks; building it is refused")
        if any(layer.head_dim != layer.v_head_dim for layer in layers):
            pytest.skip("flashinfer has no values of another width; building it is refused")
        wide = [msgspec.structs.replace(layer, head_dim=64, v_head_dim=64, scale=layer.scale / 2) for layer in layers]
        return super().scene(provider, wide, device, dtype, block_size)


class TestOnTheFake(_WideHeads):
    """Metadata and arguments, on a CPU."""

    @pytest.fixture
    def provider(self) -> Provider:
        """The stand-in computes by the reference itself."""
        return on_the_fake(fake_flashinfer.Recorder())


@pytest.mark.gpu
class TestOnGpu(_WideHeads):
    """FlashInfer itself."""

    @pytest.fixture
    def provider(self) -> Provider:
        """What the plugin registers."""
        pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
        return REAL

    @pytest.fixture
    def device(self) -> str:
        """The first GPU."""
        return "cuda"


def exercised(layer: LayerSpec | None = None) -> Any:
    """A recorder that has seen decode, prefill, both, and graphs of both."""
    recorder = fake_flashinfer.Recorder()
    wide = layer or layer_spec(head_dim=64, v_head_dim=64, window=8, soft_cap=2.0)
    scene = Scene(on_the_fake(recorder), [wide], block_size=4, device="cpu", dtype="float16")
    scene.step([(0, 9), (1, 5)])
    scene.step([(0, 1), (1, 3)])
    pages = Pages(block_size=4, num_blocks=50)
    for work in ([(0, 1), (1, 1)], [(0, 3), (1, 3)]):
        scene.backend.capture(pages.advance(work))
    return recorder


def test_every_call_binds_to_the_installed_signatures() -> None:
    """Keywords only, within the range of versions we declare."""
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer-python is not installed")
    library = importlib.import_module("flashinfer")
    calls = exercised().calls
    assert {(name, method) for name, method, _ in calls} == {
        (f"Batch{phase}WithPagedKVCacheWrapper", method)
        for phase in ("Decode", "Prefill")
        for method in ("__init__", "plan", "run")
    }
    for name, method, arguments in calls:
        inspect.signature(getattr(getattr(library, name), method)).bind(None, **arguments)


def test_one_csr_serves_all_layers_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of one group and window share it, however many there are."""
    from enginectl_attention_flashinfer import attention

    made = []
    plain = attention.make_pages
    monkeypatch.setattr(attention, "make_pages", lambda *a, **k: made.append(k["window"]) or plain(*a, **k))
    layer = layer_spec(head_dim=64, v_head_dim=64)
    layers = [layer, msgspec.structs.replace(layer, num_heads=2), layer, msgspec.structs.replace(layer, window=8)] * 3
    backend = on_the_fake(fake_flashinfer.Recorder()).build(
        context_for(layers, block_size=4, device="cpu", dtype="float16")
    )
    backend.prepare(Pages(block_size=4, num_blocks=50).advance([(0, 1), (1, 1)]))
    assert sorted(made, key=str) == [8, None]


@pytest.mark.parametrize("queries", [1, 3])
def test_a_captured_plan_is_planned_again_before_each_replay(queries: int) -> None:
    """Buffers stay in place; rows the batch lacks read the null block."""
    recorder = fake_flashinfer.Recorder()
    layer = layer_spec(head_dim=64, v_head_dim=64)
    backend = on_the_fake(recorder).build(context_for([layer], block_size=4, device="cpu", dtype="float16"))
    store = (torch.zeros(60, 4, 2, 64).half(), torch.zeros(60, 4, 2, 64).half())
    backend.bind([store])
    pages = Pages(block_size=4, num_blocks=60)
    pages.advance([(i, 6) for i in range(4)])
    largest = pages.advance([(i, queries) for i in range(4)])
    largest.block_tables = torch.nn.functional.pad(largest.block_tables, (0, 3))
    plan = backend.capture(largest)
    for rows in (4, 2, 3):
        batch = pages.advance([(i, queries) for i in range(rows)])
        num_plans = sum(method == "plan" for _, method, _ in recorder.calls)
        backend.update(plan, batch)
        assert sum(method == "plan" for _, method, _ in recorder.calls) == num_plans + 1
        q = torch.randn(4 * queries, 4, 64).half()
        k, v = torch.randn(4 * queries, 2, 64).half(), torch.randn(4 * queries, 2, 64).half()
        backend.write_kv(0, k, v, plan)
        out = backend.attend(0, q, plan)
        eager = backend.attend(0, q[: rows * queries], backend.prepare(batch))
        assert torch.equal(out[: rows * queries], eager)
        assert torch.isfinite(out).all()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "wanted"), [(8, 8, False), (6, 2, False), (14, 2, True), (8, 2, True), (20, 4, True)]
)
def test_tensor_cores_serve_groups_without_a_plain_kernel(num_heads: int, num_kv_heads: int, wanted: bool) -> None:
    """Qwen2-0.5B has seven query heads a KV head."""
    layer = layer_spec(num_heads=num_heads, num_kv_heads=num_kv_heads)
    assert Shape.of(layer).use_tensor_cores is wanted


def test_sizes_that_capabilities_cannot_exclude_are_refused() -> None:
    """Chunks, and values of another width."""
    for layer in (layer_spec(chunk=8), layer_spec(head_dim=64)):
        with pytest.raises(UnsupportedError, match="use --attention triton"):
            REAL.build(context_for([layer], block_size=4, device="cuda", dtype="float16"))
    with pytest.raises(UnsupportedError, match="needs an NVIDIA GPU"):
        REAL.build(context_for([layer_spec()], block_size=4, device="cpu", dtype="float16"))


@pytest.mark.parametrize(
    ("capability", "version", "reason"),
    [
        (None, "0.6.14", "needs an NVIDIA GPU, and none was found"),
        ((7, 5), "0.6.14", "Test GPU has 7.5"),
        ((9, 0), None, "not installed"),
        ((9, 0), "0.6.3", "found 0.6.3"),
        ((9, 0), "0.8.0", "found 0.8.0"),
        ((9, 0), "0.6.4", None),
        ((8, 0), "0.7.4", None),
    ],
)
def test_unsupported_says_why(capability: tuple[int, int] | None, version: str | None, reason: str | None) -> None:
    """Law 23: no GPU, not installed, or a version out of range."""
    gpus = () if capability is None else (Gpu("Test GPU", capability, 1 << 34),)
    versions = {} if version is None else {"flashinfer-python": version}
    machine = Machine(num_cores=1, memory_bytes=1, cpu_flags=frozenset(), gpus=gpus, versions=versions)
    found = hooks.unsupported(machine)
    assert (reason in (found or "")) if reason else found is None


def test_padding_rows_have_as_many_keys_as_queries() -> None:
    """A captured row that is not used still makes sense to the kernel: one page of the null block."""
    recorder = exercised(layer_spec(head_dim=64, v_head_dim=64))
    planned = [arguments for _, method, arguments in recorder.calls if method == "plan"]
    assert all(np.diff(a.get("indptr", a.get("paged_kv_indptr"))).min() >= 1 for a in planned)
