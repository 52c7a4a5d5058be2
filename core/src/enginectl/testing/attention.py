"""Does an attention backend keep its contract? Subclass `AttentionConformance` and override the `provider` fixture.

    class TestMine(AttentionConformance):
        @pytest.fixture
        def provider(self):
            return hooks.enginectl_attention()[0]

The checks compare with `reference_attention`, which is slow and obvious. What the provider's capabilities exclude is
skipped. `attention_mutants` has three ways to be wrong, each under the name of the check that must notice it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from enginectl.config import EngineConfig
from enginectl.context import BuildContext, Machine
from enginectl.interfaces.attention import AttentionBackend, AttentionBatch
from enginectl.interfaces.model import LayerSpec, ModelSpec
from enginectl.provider import Provider
from enginectl.testing.paging import Pages
from enginectl.testing.tolerances import TOLERANCES


def reference_attention(q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec, sinks: Tensor | None = None) -> Tensor:
    """One sequence in float64, query by query and head by head.

    q: [num_queries, num_heads, head_dim], the last tokens of the sequence. k, v: [seq_len, num_kv_heads, …], all of it.
    """
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros(q.shape[0], layer.num_heads, layer.v_head_dim, dtype=torch.float64)
    for i in range(q.shape[0]):
        position = k.shape[0] - q.shape[0] + i
        first = 0
        if layer.window is not None:
            first = max(first, position - layer.window + 1)
        if layer.chunk is not None:
            first = max(first, position // layer.chunk * layer.chunk)
        for head in range(layer.num_heads):
            kv_head = head // (layer.num_heads // layer.num_kv_heads)
            scores = k[first : position + 1, kv_head] @ q[i, head] * layer.scale
            if layer.soft_cap is not None:
                scores = torch.tanh(scores / layer.soft_cap) * layer.soft_cap
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].double().view(1)])
            weights = scores.softmax(0)[: position + 1 - first]
            out[i, head] = weights @ v[first : position + 1, kv_head]
    return out


def layer_spec(**changes: Any) -> LayerSpec:
    """Four query heads over two KV heads of 16, scaled so that scores are large enough to matter."""
    fields: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "v_head_dim": 16, "scale": 0.4}
    return LayerSpec(**(fields | changes))


def context_for(layers: Sequence[LayerSpec], *, block_size: int, device: str, dtype: str) -> BuildContext:
    """A context in which an attention provider can be built."""
    spec = ModelSpec(
        architecture="Conformance", layers=tuple(layers), vocab_size=8, hidden_size=8, max_model_len=1 << 16
    )
    return BuildContext(
        engine=EngineConfig(model="none", block_size=block_size, dtype=dtype),
        machine=Machine(num_cores=1, memory_bytes=1 << 30, cpu_flags=frozenset()),
        device=device,
        dtype=dtype,
        model_spec=spec,
    )


class Scene:
    """A backend, a poisoned store, and the whole history of every sequence to check it by."""

    def __init__(
        self, provider: Provider, layers: Sequence[LayerSpec], *, block_size: int, device: str, dtype: str
    ) -> None:
        self.layers = tuple(layers)
        self.device = device
        self.dtype_name = dtype
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.random = torch.Generator().manual_seed(11)
        self.backend: AttentionBackend = provider.build(
            context_for(layers, block_size=block_size, device=device, dtype=dtype)
        )
        num_groups = 1 + max(layer.group for layer in layers)
        self.pages = Pages(block_size=block_size, num_blocks=400, num_groups=num_groups, device=device)
        self.store = [self._poisoned(layer, block_size) for layer in layers]
        self.backend.bind(self.store)
        self.history: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def _poisoned(self, layer: LayerSpec, block_size: int) -> tuple[Tensor, Tensor]:
        shape = (self.pages.num_blocks, block_size, layer.num_kv_heads)
        keys = torch.full((*shape, layer.head_dim), float("nan"), dtype=self.dtype, device=self.device)
        values = torch.full((*shape, layer.v_head_dim), float("inf"), dtype=self.dtype, device=self.device)
        return keys, values

    def noise(self, *shape: int) -> Tensor:
        """Seeded normal numbers, as the dtype rounds them, on the CPU."""
        return torch.randn(shape, generator=self.random).to(self.dtype)

    def step(self, work: Sequence[tuple[int, int]], *, sinks: Tensor | None = None) -> list[Tensor]:
        """Advance sequences: (sequence, number of tokens) each, single tokens first. Checks and returns each layer's
        output, [num_tokens, num_heads, v_head_dim] on the CPU.
        """
        batch = self.pages.advance(work, windows=self._windows())
        plan = self.backend.prepare(batch)
        return [self._run_layer(i, batch, plan, work, sinks) for i in range(len(self.layers))]

    def _windows(self) -> list[int | None]:
        """What each group's blocks may be freed by: the widest window of its layers."""
        groups = range(self.pages.num_groups)
        members = [[layer.window for layer in self.layers if layer.group == group] for group in groups]
        return [None if None in windows or not windows else max(w for w in windows if w) for windows in members]

    def _run_layer(
        self, index: int, batch: AttentionBatch, plan: Any, work: Sequence[tuple[int, int]], sinks: Tensor | None
    ) -> Tensor:
        layer = self.layers[index]
        q = self.noise(batch.num_tokens, layer.num_heads, layer.head_dim)
        k = self.noise(batch.num_tokens, layer.num_kv_heads, layer.head_dim)
        v = self.noise(batch.num_tokens, layer.num_kv_heads, layer.v_head_dim)
        self.backend.write_kv(index, strided(k.to(self.device)), strided(v.to(self.device)), plan)
        on_device = strided(q.to(self.device))
        device_sinks = None if sinks is None else sinks.to(self.device, self.dtype)
        out = self.backend.attend(index, on_device, plan, sinks=device_sinks)
        assert torch.equal(on_device.cpu(), q), "attend changed its queries"
        assert out.shape == (batch.num_tokens, layer.num_heads, layer.v_head_dim)
        assert out.dtype == self.dtype
        assert out.is_contiguous()
        self._check(index, q, k, v, out.cpu(), work, sinks)
        return out.cpu()

    def _check(
        self,
        index: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        work: Sequence[tuple[int, int]],
        sinks: Tensor | None,
    ) -> None:
        at = 0
        tolerance = TOLERANCES[self.dtype_name]
        for sequence, num_tokens in work:
            rows = slice(at, at + num_tokens)
            at += num_tokens
            old_k, old_v = self.history.get((sequence, index), (k[:0], v[:0]))
            keys, values = torch.cat([old_k, k[rows]]), torch.cat([old_v, v[rows]])
            self.history[sequence, index] = keys, values
            exact = reference_attention(q[rows], keys, values, self.layers[index], sinks)
            where = f"layer {index}, sequence {sequence}, {num_tokens} queries"
            allowed = tolerance.atol + tolerance.rtol * exact.abs()
            worst = ((out[rows].double() - exact).abs() / allowed).max().item()
            assert worst <= 1, f"{where}: an error is {worst:.2f} times the tolerance for {self.dtype_name}"


def strided(x: Tensor) -> Tensor:
    """The same numbers, heads before tokens in memory, as models produce them."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


class AttentionConformance:
    """The checks. Override `provider`; override `device`, `dtype` and `block_size` to narrow them."""

    @pytest.fixture
    def provider(self) -> Provider:
        """The provider under test."""
        raise NotImplementedError("override the `provider` fixture")

    @pytest.fixture
    def device(self) -> str:
        """Where to run."""
        return "cpu"

    @pytest.fixture(params=["float32", "bfloat16", "float16"])
    def dtype(self, request: pytest.FixtureRequest, provider: Provider) -> str:
        """Every dtype the provider admits."""
        name: str = request.param
        if provider.capabilities.dtypes is not None and name not in provider.capabilities.dtypes:
            pytest.skip(f"{provider.name} does not compute in {name}")
        return name

    @pytest.fixture(params=[1, 4, 16])
    def block_size(self, request: pytest.FixtureRequest, provider: Provider) -> int:
        """Every block size the provider admits."""
        size: int = request.param
        if provider.capabilities.block_sizes is not None and size not in provider.capabilities.block_sizes:
            pytest.skip(f"{provider.name} does not read blocks of {size}")
        return size

    def scene(self, provider: Provider, layers: Sequence[LayerSpec], device: str, dtype: str, block_size: int) -> Scene:
        """A scene, unless the provider's capabilities exclude what these layers need."""
        can = provider.capabilities
        for layer in layers:
            if layer.soft_cap is not None and not can.soft_cap:
                pytest.skip(f"{provider.name} has no soft cap")
            if (layer.window is not None or layer.chunk is not None) and not can.sliding_window:
                pytest.skip(f"{provider.name} has no windows")
            if layer.sinks and not can.sinks:
                pytest.skip(f"{provider.name} has no sinks")
            if can.head_dims is not None and not {layer.head_dim, layer.v_head_dim} <= can.head_dims:
                pytest.skip(f"{provider.name} has no heads of {layer.head_dim} and {layer.v_head_dim}")
        return Scene(provider, layers, block_size=block_size, device=device, dtype=dtype)

    def test_decode_equals_reference(self, provider: Provider, device: str, dtype: str, block_size: int) -> None:
        """Single queries over contexts of very different lengths."""
        scene = self.scene(provider, [layer_spec()], device, dtype, block_size)
        scene.step([(0, 1), (1, 5), (2, 16), (3, 70)])
        for _ in range(3):
            scene.step([(0, 1), (1, 1), (2, 1), (3, 1)])

    def test_chunked_prefill_is_bottom_right_aligned(
        self, provider: Provider, device: str, dtype: str, block_size: int
    ) -> None:
        """A chunk sees everything before it, and itself causally; decodes and chunks share a step."""
        scene = self.scene(provider, [layer_spec()], device, dtype, block_size)
        scene.step([(0, 7), (1, 20)])
        scene.step([(0, 1), (1, 3), (2, 33)])
        scene.step([(1, 1), (0, 2), (2, 5)])

    def test_every_block_is_read(self, provider: Provider, device: str, dtype: str, block_size: int) -> None:
        """A context of many blocks in no order: leaving one out shows."""
        scene = self.scene(provider, [layer_spec()], device, dtype, block_size)
        scene.step([(0, 50), (1, 64)])
        scene.step([(1, 1), (0, 1)])

    def test_window_counts_the_query_itself(self, provider: Provider, device: str, dtype: str, block_size: int) -> None:
        """With a window of 8 a query sees itself and seven keys before it; blocks behind the window are null."""
        scene = self.scene(provider, [layer_spec(window=8)], device, dtype, block_size)
        scene.step([(0, 8), (1, 30)])
        scene.step([(0, 1), (1, 1)])
        scene.step([(0, 1), (1, 9)])
        scene.step([(0, 1), (1, 1)])

    def test_chunked_attention(self, provider: Provider, device: str, dtype: str, block_size: int) -> None:
        """With chunks of 8 a query sees its own aligned chunk only."""
        scene = self.scene(provider, [layer_spec(chunk=8)], device, dtype, block_size)
        scene.step([(0, 8), (1, 21)])
        scene.step([(0, 1), (1, 6)])
        scene.step([(0, 1), (1, 1)])

    def test_soft_cap_bites(self, provider: Provider, device: str, dtype: str, block_size: int) -> None:
        """Scores are squashed before the softmax, in a window too."""
        layers = [layer_spec(soft_cap=1.5, scale=2.0), layer_spec(soft_cap=1.5, scale=2.0, window=8)]
        scene = self.scene(provider, layers, device, dtype, block_size)
        scene.step([(0, 13), (1, 24)])
        scene.step([(0, 1), (1, 3)])

    def test_sinks_take_weight_and_give_no_value(
        self, provider: Provider, device: str, dtype: str, block_size: int
    ) -> None:
        """One extra logit a head, in the denominator only."""
        scene = self.scene(
            provider, [layer_spec(sinks=True), layer_spec(sinks=True, window=8)], device, dtype, block_size
        )
        sinks = torch.tensor([2.0, -1.0, 0.5, 3.0])
        scene.step([(0, 13), (1, 24)], sinks=sinks)
        scene.step([(0, 1), (1, 3)], sinks=sinks)

    def test_several_queries_a_row(self, provider: Provider, device: str, dtype: str, block_size: int) -> None:
        """Drafted tokens: rows with a few queries each, beside plain decodes."""
        if provider.capabilities.queries_per_seq == 1 and "prefill" not in provider.capabilities.phases:
            pytest.skip(f"{provider.name} takes one query a row")
        scene = self.scene(provider, [layer_spec()], device, dtype, block_size)
        scene.step([(0, 6), (1, 17), (2, 30)])
        scene.step([(0, 1), (1, 4), (2, 4)])
        scene.step([(2, 1), (0, 3), (1, 5)])

    @pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (3, 1), (14, 2)])
    def test_head_groups(
        self, provider: Provider, device: str, dtype: str, block_size: int, num_heads: int, num_kv_heads: int
    ) -> None:
        """One, three and seven query heads a KV head."""
        layers = [layer_spec(num_heads=num_heads, num_kv_heads=num_kv_heads)]
        scene = self.scene(provider, layers, device, dtype, block_size)
        scene.step([(0, 5), (1, 18)])
        scene.step([(0, 1), (1, 2)])

    def test_values_may_have_their_own_width(
        self, provider: Provider, device: str, dtype: str, block_size: int
    ) -> None:
        """Keys of 32 and values of 16, and layers that differ from each other."""
        scene = self.scene(provider, [layer_spec(head_dim=32), layer_spec(num_heads=2)], device, dtype, block_size)
        scene.step([(0, 5), (1, 18)])
        scene.step([(0, 1), (1, 1)])

    def test_groups_have_their_own_blocks(self, provider: Provider, device: str, dtype: str, block_size: int) -> None:
        """Full and windowed layers under two block tables."""
        layers = [layer_spec(), layer_spec(window=8, group=1), layer_spec()]
        scene = self.scene(provider, layers, device, dtype, block_size)
        scene.step([(0, 3), (1, 25)])
        scene.step([(0, 1), (1, 1)])

    def test_poisoned_pages_do_not_leak(self, provider: Provider, device: str, dtype: str, block_size: int) -> None:
        """The null block and slots nobody has written may hold NaN and inf: nothing of it arrives."""
        scene = self.scene(provider, [layer_spec(), layer_spec(window=8)], device, dtype, block_size)
        for outputs in (scene.step([(0, 2), (1, 19), (2, 40)]), scene.step([(0, 1), (1, 1), (2, 3)])):
            assert all(bool(torch.isfinite(out).all()) for out in outputs)

    def test_write_touches_its_slots_only(self, provider: Provider, device: str, dtype: str, block_size: int) -> None:
        """After a step exactly the slots of its tokens hold numbers."""
        scene = self.scene(provider, [layer_spec()], device, dtype, block_size)
        scene.step([(0, 5), (1, 11)])
        keys, values = scene.store[0]
        for stored in (keys, values):
            written = torch.isfinite(stored).flatten(2).all(-1).flatten().nonzero().flatten()
            assert sorted(written.tolist()) == sorted(scene.pages.slots_in_use(0))
