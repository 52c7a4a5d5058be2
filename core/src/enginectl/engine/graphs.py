"""Decode steps as CUDA graphs: one a batch size of a fixed list, over buffers that stay in place.

A step in which every row computes one token is padded to the next size, copied into the buffers and replayed. Rows of
padding have slot 0, in the null block, which belongs to no sequence, and no adapter. Steps in which some row has an
adapter are replayed from graphs of their own, so that nothing is added to the others. All other steps run eagerly.
"""

from __future__ import annotations

import logging
import time
import warnings
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from enginectl.engine.phased_attention import PhasedAttention
from enginectl.errors import EngineDeadError
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
        """Run once, under capture. Returns its result, whose tensors stay, and what fills them anew.

        Raises RuntimeError for what cannot be recorded.
        """

    def clear(self) -> None:
        """Give back what recordings that nobody holds took. Raises RuntimeError if the device is lost."""


class CudaRecorder(GraphRecorder):
    """torch's CUDA graphs, all in one memory pool and on one stream.

    Libraries keep a workspace for each stream they have run on (cuBLAS: 32 MiB on Hopper), so that it is a single one;
    and it is ours, because torch's own belongs to the device on which it was first used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def record(self, run: Callable[[], Kept]) -> tuple[Kept, Callable[[], None]]:
        """Run twice before: kernels are compiled and workspaces made, then nothing may wait for the device.

        Other threads may go on using theirs.
        """
        before = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):  # torch.cuda.graph alone does not leave the stream if the capture fails
            self._stream.wait_stream(before)
            run()
            _refuse_waits(run)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                kept = run()
        before.wait_stream(self._stream)
        self._pool = graph.pool()
        return kept, graph.replay

    def clear(self) -> None:
        """Also asks the device whether it still works."""
        self._pool = None
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def _refuse_waits(run: Callable[[], object]) -> None:
    """Raise RuntimeError if the call waits for the device. A capture that fails of it leaves torch's allocator unable to
    give memory back, so this is asked first.
    """
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # not "error", which would reach other threads
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for found in caught:
        if "synchronizing CUDA operation" in str(found.message):
            raise RuntimeError(f"the forward waits for the GPU ({found.filename}:{found.lineno})")


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
        self._plans: list[Any] = []
        self.num_replays = 0

    def record(self, *, largest_only: bool = False) -> None:
        """The largest first, so that smaller ones find its memory in the pool.

        largest_only: record that one, and make the others' plans, which is nearly all the memory that they take.
        """
        started = time.perf_counter()
        for size in reversed(self._sizes):
            plan = self._attention.capture(self._padding(size))
            if largest_only and self._buckets:
                self._plans.append(plan)
                continue
            adapted = self._recorded(size, plan, self._adapter_slots[:size]) if self._has_adapted else None
            self._buckets[size] = _Bucket(plan, self._recorded(size, plan, None), adapted)
        count, seconds = len(self._buckets), time.perf_counter() - started
        log.info("recorded %d decode graphs of up to %d rows in %.1f s", count, self._sizes[-1], seconds)

    def clear(self) -> None:
        """Drop what was recorded. Raises RuntimeError if the device is lost."""
        self._buckets.clear()
        self._plans.clear()
        self._recorder.clear()

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
    """Whether the backend, or the one of two that decodes, overrides `capture` and `update`."""
    kind = type(attention.decode if isinstance(attention, PhasedAttention) else attention)
    return kind.capture is not AttentionBackend.capture and kind.update is not AttentionBackend.update


def make_graphs(
    model: Model,
    attention: AttentionBackend,
    adapters: AdapterBackend | None,
    device: torch.device,
    *,
    num_rows: int,
    table_shape: tuple[int, int],
    block_size: int,
) -> DecodeGraphs | None:
    """Graphs to record for so many rows, or None where nothing is recorded. table_shape: see `DecodeGraphs`."""
    recorder = recorder_for(device)
    if recorder is None or model.reads_rows or not offers_capture(attention):
        return None
    return DecodeGraphs(
        model,
        attention,
        recorder,
        sizes=graph_sizes(num_rows),
        table_shape=table_shape,
        max_model_len=table_shape[1] * block_size,
        device=device,
        adapters=adapters,
    )


def record_graphs(graphs: DecodeGraphs, *, largest_only: bool = False) -> DecodeGraphs | None:
    """Record, or say why decode steps run eagerly: some models wait for the device inside the forward.

    Raises EngineDeadError if the device did not survive it.
    """
    try:
        with torch.inference_mode():
            graphs.record(largest_only=largest_only)
        return graphs
    except torch.OutOfMemoryError:
        reason = "no memory is left for them; lower --gpu-memory-utilization, --kv-cache-memory-bytes or --max-num-seqs"
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
    # Only now that the error, which holds on to tensors, is gone.
    try:
        graphs.clear()
    except RuntimeError as lost:
        raise EngineDeadError(
            f"the GPU was lost while decode steps were recorded ({reason}); --enforce-eager records none"
        ) from lost
    log.warning("decode steps run without CUDA graphs, slower at small batches: %s", reason)
    return None
