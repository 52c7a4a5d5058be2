"""Decode graphs: sizes, padding and routing, with a recorder that runs the call again instead of a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from enginectl import Engine, SamplingParams
from enginectl.builtin.attention_torch import TorchAttention
from enginectl.engine import graphs as graphs_module
from enginectl.engine.graphs import (
    DecodeGraphs,
    GraphRecorder,
    graph_sizes,
    make_graphs,
    offers_capture,
    record_graphs,
)
from enginectl.engine.phased_attention import PhasedAttention
from enginectl.interfaces.attention import AttentionBatch
from enginectl.interfaces.model import Kept
from enginectl.testing.toys import ConstantAdapters

COMMON: dict[str, Any] = {"attention": "torch", "op_set": "torch", "block_size": 4, "dtype": "float32"}
Reference = Callable[[str, Sequence[int], int], list[int]]


class FakeRecorder(GraphRecorder):
    """A graph's tensors stay in place, and a replay reads nothing but what the recorded call read."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def record(self, run: Callable[[], Kept]) -> tuple[Kept, Callable[[], None]]:
        """Replays fill the first result's tensors."""
        kept = run()
        self.sizes.append(len(next(x for x in (kept.hidden, kept.logits) if x is not None)))

        def replay() -> None:
            again = run()
            for target, source in ((kept.hidden, again.hidden), (kept.logits, again.logits)):
                if target is not None:
                    target.copy_(source)

        return kept, replay


class CapturingTorch(TorchAttention):
    """Core's backend with plans that can be brought up to date, rows of padding in the null block included."""

    def capture(self, batch: AttentionBatch) -> Any:
        """A holder of a plan."""
        return {"plan": super().prepare(batch), "rows": batch.num_seqs}

    def update(self, plan: Any, batch: AttentionBatch) -> None:
        """Plan anew for as many rows as were captured."""
        plan["plan"] = super().prepare(padded(batch, plan["rows"]))

    def write_kv(self, layer: int, k: Tensor, v: Tensor, plan: Any) -> None:
        """Through the holder."""
        super().write_kv(layer, k, v, plan["plan"] if isinstance(plan, dict) else plan)

    def attend(self, layer: int, q: Tensor, plan: Any, *, sinks: Tensor | None = None) -> Tensor:
        """Through the holder."""
        return super().attend(layer, q, plan["plan"] if isinstance(plan, dict) else plan, sinks=sinks)


def padded(batch: AttentionBatch, rows: int) -> AttentionBatch:
    more = rows - batch.num_seqs
    lens = np.concatenate([batch.seq_lens_host, np.ones(more, np.int32)])
    starts = np.arange(rows + 1, dtype=np.int32)
    return AttentionBatch(
        num_seqs=rows,
        num_tokens=rows,
        num_decodes=rows,
        max_query_len=1,
        max_seq_len=batch.max_seq_len,
        query_start=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(lens),
        block_tables=torch.nn.functional.pad(batch.block_tables, (0, 0, 0, more)),
        slot_mapping=torch.nn.functional.pad(batch.slot_mapping, (0, more)),
        query_start_host=starts,
        seq_lens_host=lens,
    )


def build_capturing(ctx: Any) -> CapturingTorch:
    layers, size = ctx.model_spec.layers, ctx.engine.block_size
    return CapturingTorch(layers, block_size=size, device="cpu", dtype=getattr(torch, ctx.dtype))


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 100, 256, 512, 1000])
def test_sizes_cover_every_batch_with_little_padding(most: int) -> None:
    """Up to max_num_seqs, or to the largest that is worth a graph."""
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, 512)
    for rows in range(1, sizes[-1] + 1):
        size = min(s for s in sizes if s >= rows)
        assert size < 2 * rows or size == 1
        assert rows < 8 or size * 2 <= rows * 3


def use_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginectl.builtin.attention_torch.build", build_capturing)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_greedy_through_graphs_equals_hugging_face(
    name: str, depth: int, tiny: Callable[[str], Path], hugging_face: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 1: decode steps replay, padded to the next size; chunks and mixed steps run eagerly."""
    recorder, replays = FakeRecorder(), count_replays(monkeypatch)
    monkeypatch.setattr(graphs_module, "recorder_for", lambda device: recorder)
    use_capturing(monkeypatch)
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 250, random.integers(1, 40)).tolist() for _ in range(9)]
    options = {"max_num_seqs": 7, "max_num_batched_tokens": 24, "overlap_depth": depth, **COMMON}
    with Engine(str(tiny(name)), **options) as engine:
        params = [SamplingParams(temperature=0.0, max_tokens=n) for n in range(6, 24, 2)]
        outputs = engine.generate(prompts, params)
        num_steps = engine.stats().num_steps
    assert recorder.sizes == [7, 4, 2, 1], "the largest first"
    assert 0 < len(replays) < num_steps, "some steps replay, others do not"
    assert set(replays) - {1, 2, 4, 7}, "some replays have padding"
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        assert one.max_tokens is not None
        assert list(output.outputs[0].token_ids) == hugging_face(name, prompt, one.max_tokens)


def count_replays(monkeypatch: pytest.MonkeyPatch, *, with_slots: bool = False) -> list[int]:
    """Rows of each replay, or of those with adapters."""
    found: list[int] = []
    plain = DecodeGraphs.run

    def run(self: DecodeGraphs, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, *slots: Any) -> Kept:
        if not with_slots or slots[0] is not None:
            found.append(batch.num_seqs)
        return plain(self, token_ids, positions, batch, *slots)

    monkeypatch.setattr(DecodeGraphs, "run", run)
    return found


def two_adapters() -> ConstantAdapters:
    toy = ConstantAdapters(48, "model.layers.1.mlp.down_proj", num_slots=2, scale=1.5)
    for seed, name in enumerate(("one", "two")):
        toy.load(name, str(seed))
    return toy


@pytest.mark.parametrize("captures", [True, False])
def test_steps_with_adapters_have_graphs_of_their_own(
    captures: bool, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 3: a graph reads its rows' slots from one buffer, whoever they are; a backend that cannot has eager steps."""
    random = np.random.default_rng(1)
    prompts = [random.integers(3, 250, random.integers(1, 9)).tolist() for _ in range(5)]

    def answers(toy: ConstantAdapters) -> list[list[int]]:
        options = {name: value for name, value in COMMON.items() if name != "op_set"}
        options |= {"max_num_seqs": 7, "model_family": "transformers", "adapter": toy}
        found = []
        with Engine(str(tiny("llama")), **options) as engine:
            # In turn, so that rows take other slots in the same graph; then together, then nobody has one.
            for names in (("one",), ("two",), ("one", None, "two"), (None,)):
                requests = []
                for at, name in enumerate(names):
                    params = SamplingParams(temperature=0.0, max_tokens=6 + 2 * at)
                    requests += engine._requests(prompts[at : at + 2], params, {"adapter": name})
                tickets = engine._submit(requests)
                while not all(ticket.is_done for ticket in tickets):
                    engine._step()
                found += [[t for chunk in ticket.take() for t in chunk.token_ids] for ticket in tickets]
        return found

    eager = answers(two_adapters())
    recorder, toy = FakeRecorder(), two_adapters()
    replays, with_slots = count_replays(monkeypatch), count_replays(monkeypatch, with_slots=True)
    toy.graph_capture = captures
    monkeypatch.setattr(graphs_module, "recorder_for", lambda device: recorder)
    use_capturing(monkeypatch)
    assert answers(toy) == eager
    assert recorder.sizes == ([7, 7, 4, 4, 2, 2, 1, 1] if captures else [7, 4, 2, 1])
    assert len(replays) > len(with_slots), "steps without adapters are replayed either way"
    assert bool(with_slots) == captures


def test_prompt_logprobs_are_the_same_with_graphs(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of single tokens that keeps other rows than all of them, in order, runs eagerly."""
    params = SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=1, logprobs=1)
    prompts = [[5], [6, 7], list(range(10, 30))]

    def answers() -> list[Any]:
        with Engine(str(tiny("llama")), max_num_seqs=3, max_num_batched_tokens=3, **COMMON) as e:
            return [(o.prompt_logprobs, o.outputs[0].logprobs) for o in e.generate(prompts, params)]

    eager = answers()
    replays = count_replays(monkeypatch)
    monkeypatch.setattr(graphs_module, "recorder_for", lambda device: FakeRecorder())
    use_capturing(monkeypatch)
    assert answers() == eager
    assert replays


def test_the_largest_graph_and_all_plans_are_what_recording_is_measured_by(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the pool, before it is sized."""
    use_capturing(monkeypatch)
    recorder = FakeRecorder()
    monkeypatch.setattr(graphs_module, "recorder_for", lambda device: recorder)
    with Engine(str(tiny("llama")), max_num_seqs=7, enforce_eager=True, **COMMON) as engine:
        runner: Any = engine.core.executor
        graphs = make_graphs(
            runner.model,
            runner._attention,
            None,
            torch.device("cpu"),
            num_rows=7,
            table_shape=(1, 8),
            block_size=4,
        )
        assert graphs is not None
        assert record_graphs(graphs, largest_only=True) is graphs
        assert recorder.sizes == [7]
        assert len(graphs._plans) == 3
        graphs.clear()
        assert not graphs.serves(np.ones(3, np.int32))


def test_two_backends_are_recorded_by_the_one_that_decodes(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 1: `--attention decode=…,prefill=…` ran every decode step eagerly."""
    prompts, params = [[5, 6, 7], [8], list(range(10, 30))], SamplingParams(temperature=0.0, max_tokens=8)
    with Engine(str(tiny("llama")), max_num_seqs=3, **COMMON) as engine:
        expected = [output.outputs[0].token_ids for output in engine.generate(prompts, params)]
        layers: Any = engine._assembled.parts["attention"]._layers
    decode, prefill = (
        kind(layers, block_size=4, device="cpu", dtype=torch.float32) for kind in (CapturingTorch, TorchAttention)
    )
    options = {name: value for name, value in COMMON.items() if name != "attention"}
    replays = count_replays(monkeypatch)
    monkeypatch.setattr(graphs_module, "recorder_for", lambda device: FakeRecorder())
    with Engine(str(tiny("llama")), max_num_seqs=3, attention=PhasedAttention(decode, prefill), **options) as engine:
        assert [output.outputs[0].token_ids for output in engine.generate(prompts, params)] == expected
    assert replays


def test_backends_without_capture_are_known() -> None:
    """By overriding both methods."""
    assert not offers_capture(TorchAttention([], block_size=4, device="cpu", dtype=torch.float32))
    capturing = CapturingTorch([], block_size=4, device="cpu", dtype=torch.float32)
    assert offers_capture(capturing)
    plain = TorchAttention([], block_size=4, device="cpu", dtype=torch.float32)
    assert offers_capture(PhasedAttention(capturing, plain))
    assert not offers_capture(PhasedAttention(plain, capturing))
