"""Decode steps as CUDA graphs: one a batch size of a fixed list, over buffers that stay in place.

A step in which every row computes one token is padded to the next size, copied into the buffers and replayed. Rows of
padding have slot 0, in the null block, which belongs to no sequence, and no adapter. Steps in which some row has an
adapter are replayed from graphs of their own, so that nothing is added to the others. All other steps run eagerly.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from enginectl.interfaces.adapter import AdapterBackend
from enginectl.interfaces.attention import AttentionBackend, AttentionBatch
from enginectl.interfaces.model import ForwardInput, Kept, Model

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger("enginectl.graphs")

MAX_GRAPH_ROWS = 512
"""Beyond, the device works longer than the host needs to launch."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then two sizes an octave: 12, 16, 24, 32 … so that at most a third of a step is padding."""
    most = min(max_num_seqs, MAX_GRAPH_ROWS)
    sizes = [1, 2, 4, 8]
    while sizes[-1] < most:
        last = sizes[-1]
        sizes.append(last * 3 // 2 if last.bit_count() == 1 else last * 4 // 3)
    return [*(size for size in sizes if size < most), most]


class GraphRecorder(ABC):
    """Records what a call does on the device, to be done again without Python."""

    @abstractmethod
    def record(self, run: Callable[[], Kept]) -> tuple[Kept, Callable[[], None]]:
        """Run once, under capture. Returns its result, whose tensors stay, and what fills them anew."""


class CudaRecorder(GraphRecorder):
    """torch's CUDA graphs, all in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def record(self, run: Callable[[], Kept]) -> tuple[Kept, Callable[[], None]]:
        """Warm up on a stream of its own first: kernels are compiled and libraries make their workspaces there."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            kept = run()
        self._pool = graph.pool()
        return kept, graph.replay


@dataclass(slots=True)
class _Graph:
    kept: Kept
    replay: Callable[[], None]


@dataclass(slots=True)
class _Bucket:
    """The graphs of one size over one plan. adapted: for steps with adapters, None where those run eagerly."""

    plan: Any
    plain: _Graph
    adapted: _Graph | None


class DecodeGraphs:
    """The graphs of one model. Made and recorded once the store is bound."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        recorder: GraphRecorder,
        *,
        sizes: Sequence[int],
        table_shape: tuple[int, int],
        max_model_len: int,
        device: torch.device,
        adapters: AdapterBackend | None = None,
    ) -> None:
        """table_shape: groups and columns of the block table."""
        self._model = model
        self._attention = attention
        self._recorder = recorder
        self._sizes = sorted(sizes)
        self._table_shape = table_shape
        self._max_model_len = max_model_len
        self._device = device
        self._adapters = adapters
        self._has_adapted = adapters is not None and adapters.graph_capture
        most = self._sizes[-1]
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._adapter_slots = torch.full((most,), -1, dtype=torch.int32, device=device)
        self._keep = torch.arange(most, device=device)
        self._buckets: dict[int, _Bucket] = {}
        self.num_replays = 0

    def record(self) -> None:
        """The largest first, so that smaller ones find its memory in the pool."""
        started = time.perf_counter()
        for size in reversed(self._sizes):
            self._buckets[size] = self._record(size)
        seconds = time.perf_counter() - started
        log.info("recorded %d decode graphs of up to %d rows in %.1f s", len(self._sizes), self._sizes[-1], seconds)

    def _record(self, size: int) -> _Bucket:
        plan = self._attention.capture(self._padding(size))
        adapted = self._recorded(size, plan, self._adapter_slots[:size]) if self._has_adapted else None
        return _Bucket(plan, self._recorded(size, plan, None), adapted)

    def _recorded(self, size: int, plan: Any, adapter_slots: Tensor | None) -> _Graph:
        step = ForwardInput(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            keep=self._keep[:size],
            plan=plan,
            adapter_slots=adapter_slots,
        )

        def forward() -> Kept:
            if self._adapters is not None:
                self._adapters.begin_step(adapter_slots)
            return self._model.forward(step)

        return _Graph(*self._recorder.record(forward))

    def _padding(self, size: int) -> AttentionBatch:
        """Rows of one token in the null block, that may grow to the longest sequence."""
        groups, width = self._table_shape
        ones, starts = np.ones(size, np.int32), np.arange(size + 1, dtype=np.int32)
        return AttentionBatch(
            num_seqs=size,
            num_tokens=size,
            num_decodes=size,
            max_query_len=1,
            max_seq_len=self._max_model_len,
            query_start=torch.from_numpy(starts).to(self._device),
            seq_lens=torch.from_numpy(ones).to(self._device),
            block_tables=torch.zeros((groups, size, width), dtype=torch.int32, device=self._device),
            slot_mapping=torch.zeros((groups, size), dtype=torch.int64, device=self._device),
            query_start_host=starts,
            seq_lens_host=ones,
        )

    def size_for(self, num_rows: int) -> int | None:
        """The smallest size that holds these rows, or None if there is none."""
        at = bisect_left(self._sizes, num_rows)
        return self._sizes[at] if at < len(self._sizes) else None

    def serves(self, num_tokens: NDArray[np.int32], *, with_adapters: bool = False) -> bool:
        """Whether a step with these token counts is a decode step that has a graph. with_adapters: some row has one."""
        if not self._buckets or (with_adapters and not self._has_adapted):
            return False
        return num_tokens.size <= self._sizes[-1] and int(num_tokens.max()) == 1

    def run(
        self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, adapter_slots: Tensor | None = None
    ) -> Kept:
        """Replay. What it keeps is overwritten by the next replay of the same graph.

        token_ids, positions: [num_rows] int64. adapter_slots: [num_rows] int32, or None if no row has an adapter.
        """
        rows = batch.num_seqs
        size = self.size_for(rows)
        assert size is not None, f"no graph for {rows} rows"
        bucket = self._buckets[size]
        graph = bucket.plain
        if adapter_slots is not None:
            assert bucket.adapted is not None, "steps with adapters run eagerly"
            graph = bucket.adapted
            self._fill(self._adapter_slots, adapter_slots, size, -1)
        self._fill(self._token_ids, token_ids, size, 0)
        self._fill(self._positions, positions, size, 0)
        self._attention.update(bucket.plan, batch)
        graph.replay()
        self.num_replays += 1
        kept = graph.kept
        return Kept(
            hidden=None if kept.hidden is None else kept.hidden[:rows],
            logits=None if kept.logits is None else kept.logits[:rows],
        )

    @staticmethod
    def _fill(buffer: Tensor, values: Tensor, size: int, padding: int) -> None:
        """A step's values, and padding up to the size."""
        buffer[: len(values)].copy_(values, non_blocking=True)
        buffer[len(values) : size].fill_(padding)


def recorder_for(device: torch.device) -> GraphRecorder | None:
    """What records on this device, or None where steps run eagerly."""
    return CudaRecorder(device) if device.type == "cuda" else None


def offers_capture(attention: AttentionBackend) -> bool:
    """Whether the backend overrides `capture` and `update`."""
    kind = type(attention)
    return kind.capture is not AttentionBackend.capture and kind.update is not AttentionBackend.update


def record_graphs(graphs: DecodeGraphs) -> DecodeGraphs | None:
    """Record, or say why decode steps run eagerly: some models wait for the device inside the forward."""
    try:
        with torch.inference_mode():
            graphs.record()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        log.warning("decode steps run without CUDA graphs, slower at small batches: %s", reason)
        return None
    return graphs
