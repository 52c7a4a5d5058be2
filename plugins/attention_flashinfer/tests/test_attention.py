"""The backend over a slow stand-in for FlashInfer: what it plans and passes is what the kit's reference needs."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
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
from enginectl_attention_flashinfer.attention import FlashInferAttention, Shape, _loadable
from enginectl_attention_flashinfer.workspace import captured_bytes, eager_bytes

REAL = hooks.enginectl_attention()[0]
HERE = Path(__file__).resolve().parent
CHECKS = HERE.parents[2] / "bench" / "gpu"


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake_flashinfer = _module(HERE / "fake_flashinfer.py")
real_wrappers = _module(HERE / "real_wrappers.py")


def on_a_cpu(library: Any) -> Provider:
    """The backend over something that stands for FlashInfer, or for its kernels."""

    def factory(ctx: BuildContext) -> FlashInferAttention:
        assert ctx.model_spec is not None
        return FlashInferAttention(
            ctx.model_spec.layers,
            block_size=ctx.engine.block_size,
            device="cpu",
            dtype=getattr(torch, ctx.dtype),
            library=library,
            num_multiprocessors=1,
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
        return on_a_cpu(fake_flashinfer.Recorder().library())


class TestOnRealWrappers(_WideHeads):
    """FlashInfer's own Python, as installed, over kernels that are played on a CPU."""

    @pytest.fixture
    def provider(self, monkeypatch: pytest.MonkeyPatch) -> Provider:
        """Skips where FlashInfer is not installed."""
        library, _ = real_wrappers.real_library(monkeypatch)
        return on_a_cpu(library)


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


def exercise(library: Any, layers: Sequence[LayerSpec], dtype: str = "float16") -> None:
    """Decode, prefill, both, and graphs of both."""
    scene = Scene(on_a_cpu(library), layers, block_size=4, device="cpu", dtype=dtype)
    scene.step([(0, 9), (1, 5)])
    scene.step([(0, 1), (1, 3)])
    pages = Pages(block_size=4, num_blocks=50)
    for work in ([(0, 1), (1, 1)], [(0, 3), (1, 3)]):
        scene.backend.capture(pages.advance(work))


def kinds_of_layers(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, bool, bool]]:
    """(head size, window, soft cap) of everything that bench/gpu/check.py runs on FlashInfer."""
    monkeypatch.syspath_prepend(str(CHECKS))
    correctness, random_model = _module(CHECKS / "correctness.py"), _module(CHECKS / "random_model.py")
    layers = [correctness.layer_of(case) for case in correctness.CASES]
    layers = [layer for layer in layers if correctness.admits("flashinfer", layer, "bfloat16")]
    kinds = {(layer.head_dim, layer.window is not None, layer.soft_cap is not None) for layer in layers}
    kinds |= {(shape["head_dim"], False, False) for name, shape in random_model.SHAPES.items() if name != "tiny"}
    # The conformance kit, with heads of 64.
    return kinds | {(64, window, soft_cap) for window in (False, True) for soft_cap in (False, True)}


def test_modules_that_are_prebuilt_are_those_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By FlashInfer's own naming: no more, no fewer, none of `fa3`, which it would take on Hopper by itself."""
    library, modules = real_wrappers.real_library(monkeypatch)
    for head_dim, window, soft_cap in kinds_of_layers(monkeypatch):
        sizes = {"head_dim": head_dim, "v_head_dim": head_dim, "scale": head_dim**-0.5}
        bounds = {"window": 8 if window else None, "soft_cap": 2.0 if soft_cap else None}
        layers = [layer_spec(num_heads=heads, **sizes, **bounds) for heads in (8, 4)]  # with tensor cores and without
        for dtype in ("bfloat16", "float16"):
            exercise(library, layers, dtype)
    command = [sys.executable, str(CHECKS / "prebuild.py"), "--list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in listed if name.startswith("batch_")} == set(modules.asked)
    assert not any("sm90" in name for name in modules.asked)


def test_plans_are_one_a_step_and_shape_and_read_nothing_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers there are. What FlashInfer's planner gets is on the host already: see `Modules`."""
    library, modules = real_wrappers.real_library(monkeypatch)
    layer = layer_spec(head_dim=64, v_head_dim=64)
    backend = on_a_cpu(library).build(context_for([layer] * 5, block_size=4, device="cpu", dtype="float16"))
    pages = Pages(block_size=4, num_blocks=50)
    backend.prepare(pages.advance([(0, 1), (1, 1), (2, 7)]))
    assert len(modules.plans) == 2
    plan = backend.capture(pages.advance([(0, 1), (1, 1)]))
    backend.update(plan, pages.advance([(0, 1)]))
    assert len(modules.plans) == 4


def test_one_csr_serves_all_layers_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of one group and window share it, however many there are."""
    from enginectl_attention_flashinfer import attention

    made = []
    plain = attention.make_pages
    monkeypatch.setattr(attention, "make_pages", lambda *a, **k: made.append(k["window"]) or plain(*a, **k))
    layer = layer_spec(head_dim=64, v_head_dim=64)
    layers = [layer, msgspec.structs.replace(layer, num_heads=2), layer, msgspec.structs.replace(layer, window=8)] * 3
    backend = on_a_cpu(fake_flashinfer.Recorder().library()).build(
        context_for(layers, block_size=4, device="cpu", dtype="float16")
    )
    backend.prepare(Pages(block_size=4, num_blocks=50).advance([(0, 1), (1, 1)]))
    assert sorted(made, key=str) == [8, None]


@pytest.mark.parametrize("queries", [1, 3])
def test_a_captured_plan_is_planned_again_before_each_replay(queries: int) -> None:
    """Buffers stay in place; rows the batch lacks read the null block."""
    recorder = fake_flashinfer.Recorder()
    layer = layer_spec(head_dim=64, v_head_dim=64)
    backend = on_a_cpu(recorder.library()).build(context_for([layer], block_size=4, device="cpu", dtype="float16"))
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


def test_a_bucket_that_needs_more_scratch_has_it_and_later_ones_share_it() -> None:
    """The largest is captured first. Wrappers that are there already keep theirs: graphs hold its address."""
    recorder = fake_flashinfer.Recorder()
    layer = layer_spec(num_heads=8, head_dim=64, v_head_dim=64)
    provider = on_a_cpu(recorder.library())
    backend = provider.build(context_for([layer], block_size=4, device="cpu", dtype="float16"))
    pages = Pages(block_size=4, num_blocks=50)
    for rows in (6, 2):
        backend.capture(pages.advance([(i, 1) for i in range(rows)]))
    eager, _, large, small = [
        arguments["float_workspace_buffer"] for _, method, arguments in recorder.calls if method == "__init__"
    ]
    assert eager.numel() >= eager_bytes(layer, 1)
    assert large.numel() >= captured_bytes(layer, 1, num_rows=6, num_queries=1)
    assert small is large


@pytest.mark.parametrize("stride", [(64, 512), (1536, 64), (1540, 64), (1536, 100)])
def test_queries_are_copied_only_if_kernels_cannot_load_them(stride: tuple[int, int]) -> None:
    """They are a part of the fused projection's rows, where loads of 16 bytes find them."""
    q = torch.zeros(8000, dtype=torch.float16).as_strided((4, 8, 64), (*stride, 1))
    found = _loadable(q)
    is_aligned = not (stride[0] % 8 or stride[1] % 8)
    assert (found is q) == is_aligned
    moved = _loadable(torch.zeros(8000, dtype=torch.float16)[3:].as_strided((4, 8, 64), (*stride, 1), 3))
    assert moved.is_contiguous()
    assert not moved.data_ptr() % 16


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
    recorder = fake_flashinfer.Recorder()
    exercise(recorder.library(), [layer_spec(head_dim=64, v_head_dim=64)])
    planned = [arguments for _, method, arguments in recorder.calls if method == "plan"]
    assert all(np.diff(a.get("indptr", a.get("paged_kv_indptr"))).min() >= 1 for a in planned)
