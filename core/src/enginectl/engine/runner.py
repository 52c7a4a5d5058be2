"""The runner: a step plan in, tokens out. Owns the model, the KV store, the row arrays and all that reads logits."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from enginectl.builtin.sampling.logprobs import token_logprobs
from enginectl.context import BuildContext
from enginectl.engine.grammar import GrammarRows
from enginectl.engine.graphs import DecodeGraphs, graph_sizes, offers_capture, record_graphs, recorder_for
from enginectl.engine.rows import IntRows, Packed, RunnerRows
from enginectl.engine.verify import usable_drafts, verify
from enginectl.errors import OutOfMemoryError
from enginectl.interfaces.adapter import AdapterBackend
from enginectl.interfaces.attention import AttentionBackend, AttentionBatch
from enginectl.interfaces.executor import Executor, NewRow, StepHandle, StepPlan, StepResult
from enginectl.interfaces.kv import KVLayout
from enginectl.interfaces.model import ForwardInput, Kept, LayerSpec, Model
from enginectl.interfaces.sampler import LogitsProcessor, RowParts, SampleBatch, Sampler
from enginectl.interfaces.speculator import DraftBatch, DraftStore, Speculator
from enginectl.types import TokenLogprobs
from enginectl.units import format_size

log = logging.getLogger("enginectl.runner")

_NO_ROWS = np.zeros(0, np.int32)


class DoneHandle(StepHandle):
    """A step that ran during launch: its result, or what it raised."""

    __slots__ = ("_error", "_result")

    def __init__(self, result: StepResult | None, error: Exception | None = None) -> None:
        self._result = result
        self._error = error

    def wait(self) -> StepResult:
        """At once."""
        if self._error is not None:
            raise self._error
        assert self._result is not None, "a step has a result or an error"
        return self._result


class LocalRunner(Executor):
    """One device in this process; a step runs during `launch`."""

    def __init__(
        self,
        *,
        model: Model,
        attention: AttentionBackend,
        sampler: Sampler,
        processors: Sequence[LogitsProcessor],
        rows: RunnerRows,
        speculator: Speculator | None = None,
        adapters: AdapterBackend | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.rows = rows
        self.kv: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._attention = attention
        self._sampler = sampler
        self._processors = list(processors)
        self._speculator = speculator
        self._adapters = adapters
        self._grammars = GrammarRows(len(rows.prompt_lens), model.spec.vocab_size)
        self._device = torch.device(device)
        self._dtype = dtype
        self._wants_hidden = speculator is not None and speculator.reads_hidden
        self._row_parts = (*self._processors, sampler)
        self._broken_rows: dict[int, str] = {}
        self._drafts_for = np.zeros(len(rows.prompt_lens), np.bool_)
        self._num_failed_proposals = 0
        # Bound once: the step calls these directly.
        self._forward = model.forward
        self._graphs: DecodeGraphs | None = None
        self._sample_tokens = sampler.sample
        self._prepare_attention = attention.prepare

    def allocate(self, layout: KVLayout) -> None:
        """Two tensors a layer, [num_blocks, block_size, num_kv_heads, head_dim], zeroed."""
        self.kv = [self._pages(layer, layout) for layer in self.model.spec.layers]
        self._attention.bind(self.kv)
        self.model.bind(self.kv, len(self.rows.prompt_lens))
        self._graphs = self._record_graphs()
        if self._speculator is not None:
            own = [self._pages(layer, layout) for layer in self._speculator.kv_layers()]
            rows = self.rows
            self._speculator.bind(
                DraftStore(
                    kv=own,
                    block_table=rows.block_table,
                    num_blocks=rows.num_blocks,
                    block_size=rows.block_size,
                    prompt_lens=rows.prompt_lens,
                    processors=self._processors,
                    sampler=self._sampler,
                )
            )

    def _record_graphs(self) -> DecodeGraphs | None:
        """Graphs of decode steps, on devices that have them. With adapters a step differs by its tokens' slots."""
        recorder = recorder_for(self._device)
        excluded = self._adapters is not None or self.model.reads_rows
        if recorder is None or excluded or not offers_capture(self._attention):
            return None
        groups, num_rows, width = self.rows.block_table.shape
        graphs = DecodeGraphs(
            self.model,
            self._attention,
            recorder,
            sizes=graph_sizes(num_rows),
            table_shape=(groups, width),
            max_model_len=width * self.rows.block_size,
            device=self._device,
        )
        return record_graphs(graphs)

    def _pages(self, layer: LayerSpec, layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (layout.num_blocks, layout.block_size, layer.num_kv_heads)
        return self._zeros((*shape, layer.head_dim)), self._zeros((*shape, layer.v_head_dim))

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        try:
            if self._device.type == "cpu":  # calloc: pages are committed when first written
                size = int(np.prod(shape)) * self._dtype.itemsize
                return torch.from_numpy(np.zeros(size, np.uint8)).view(self._dtype).view(shape)
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        except (MemoryError, torch.OutOfMemoryError) as error:
            size = int(np.prod(shape)) * self._dtype.itemsize
            raise OutOfMemoryError(
                f"no memory for {format_size(size)} of KV cache on {self._device}; lower --kv-cache-memory-bytes, "
                "--gpu-memory-utilization or --max-model-len"
            ) from error

    # -- a step --------------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> StepHandle:
        """Apply the differences, run the step."""
        self._apply(plan)
        try:
            with torch.inference_mode():
                return DoneHandle(self._run(plan))
        except Exception as error:
            return DoneHandle(None, error)

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.removed:
            self._remove_row(row)
        for new in plan.added:
            self._add_row(new)
        if plan.block_ids is not None:
            assert plan.block_rows is not None, "the three come together"
            assert plan.block_columns is not None, "the three come together"
            self.rows.set_blocks(plan.block_rows, plan.block_columns, plan.block_ids)

    def _add_row(self, new: NewRow) -> None:
        """A part that raises breaks this row alone, and is not asked to remove what it did not add."""
        self.rows.add(new)
        added: list[RowParts] = []
        try:
            for part in self._row_parts:
                part.add_row(new.row, new.params, new.seed, new.choice, new.prompt_len)
                added.append(part)
            if new.grammar is not None:
                self._grammars.add_row(new.row, new.grammar, new.token_ids[new.prompt_len :], new.eos_token_ids)
        except Exception as error:
            self._broken_rows[new.row] = f"{type(error).__name__}: {error}"
            self._forget(new.row, added)
            return
        if self._speculator is not None:
            try:
                self._speculator.add_row(new.row, new.token_ids, new.params)
                self._drafts_for[new.row] = True
            except Exception:
                log.exception("%s refused a row; it goes without drafts", type(self._speculator).__name__)

    def _remove_row(self, row: int) -> None:
        self.rows.remove(row)
        self._grammars.remove_row(row)
        if self._broken_rows.pop(row, None) is None:
            self._forget(row, self._row_parts)
        if self._drafts_for[row]:
            assert self._speculator is not None, "it drafts for this row"
            self._drafts_for[row] = False
            self._forget(row, (self._speculator,))

    @staticmethod
    def _forget(row: int, parts: Iterable[RowParts | Speculator]) -> None:
        for part in parts:
            try:
                part.remove_row(row)
            except Exception:
                log.exception("%s failed to remove a row", type(part).__name__)

    def _run(self, plan: StepPlan) -> StepResult:
        broken = {}
        if self._broken_rows:
            broken = {row: why for row, why in self._broken_rows.items() if row in plan.rows}
            plan = plan.select(np.nonzero(~np.isin(plan.rows, list(broken)))[0])
        if not plan.rows.size:
            return StepResult(_NO_ROWS, np.zeros((0, 1), np.int32), _NO_ROWS, _NO_ROWS, errors=broken)
        packed = self.rows.pack(plan)
        kept = self._run_forward(plan, packed)
        result = self._sample(plan, packed, kept)
        if packed.prompt_rows:
            result.prompt_logprobs = self._prompt_logprobs(packed, kept)
        if result.rows.size:
            self._look_ahead(plan, packed, kept, result)
        result.errors.update(broken)
        return result

    def _look_ahead(self, plan: StepPlan, packed: Packed, kept: Kept, result: StepResult) -> None:
        """Drafts for the next step, and grammars advanced: last, because a step that raised is run again."""
        started = time.perf_counter()
        result.num_drafts = self._propose(plan, packed, kept, result)
        result.propose_s = time.perf_counter() - started
        result.errors = self._grammars.accept(result.rows, result.token_ids, result.num_new)

    def _run_forward(self, plan: StepPlan, packed: Packed) -> Kept:
        graphs = self._graphs
        # A graph keeps every row, in order.
        keeps_all = packed.sampled.size == plan.rows.size and not packed.prompt_rows
        if graphs is None or not keeps_all or not graphs.serves(plan.num_tokens):
            return self._forward(self._inputs(plan, packed))
        token_ids = self.rows.token_ids[packed.token_rows, packed.positions].astype(np.int64)
        positions = self._tensor(packed.positions.astype(np.int64))
        return graphs.run(self._tensor(token_ids), positions, self._attention_batch(plan, packed))

    def _inputs(self, plan: StepPlan, packed: Packed) -> ForwardInput:
        rows = self.rows
        slots = self._adapter_slots(packed)
        if self._adapters is not None:
            self._adapters.begin_step(slots)
        batch = self._attention_batch(plan, packed)
        return ForwardInput(
            token_ids=self._tensor(rows.token_ids[packed.token_rows, packed.positions].astype(np.int64)),
            positions=self._tensor(packed.positions.astype(np.int64)),
            keep=self._tensor(packed.keep),
            plan=self._prepare_attention(batch),
            adapter_slots=slots,
            batch=batch,
            rows=plan.rows,
        )

    def _attention_batch(self, plan: StepPlan, packed: Packed) -> AttentionBatch:
        rows = self.rows
        num_decodes = int((plan.num_tokens == 1).sum())
        max_len = int(packed.seq_lens.max())
        num_blocks = -(-max_len // rows.block_size)
        return AttentionBatch(
            num_seqs=plan.rows.size,
            num_tokens=packed.positions.size,
            num_decodes=num_decodes,
            max_query_len=int(plan.num_tokens[-1]) if num_decodes == plan.rows.size else int(plan.num_tokens.max()),
            max_seq_len=max_len,
            query_start=self._tensor(packed.starts),
            seq_lens=self._tensor(packed.seq_lens),
            block_tables=self._tensor(rows.block_table[:, plan.rows, :num_blocks]),
            slot_mapping=self._tensor(rows.slots(packed)),
            query_start_host=packed.starts,
            seq_lens_host=packed.seq_lens,
        )

    def _adapter_slots(self, packed: Packed) -> torch.Tensor | None:
        if not self.rows.num_with_adapter:
            return None
        slots = self.rows.adapter_slots[packed.token_rows]
        return self._tensor(slots) if (slots >= 0).any() else None

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        # Pinned, so that the copy does not wait; torch keeps such memory and gives it back once the copy is done.
        return tensor.pin_memory().to(self._device, non_blocking=True)

    # -- sampling ------------------------------------------------------------------------------------------------

    def _sample(self, plan: StepPlan, packed: Packed, kept: Kept) -> StepResult:
        rows = plan.rows[packed.sampled] if packed.sampled.size != plan.rows.size else plan.rows
        if not rows.size:
            return StepResult(_NO_ROWS, np.zeros((0, 1), np.int32), _NO_ROWS, _NO_ROWS)
        widths = packed.widths
        plain = int(widths.max()) == 1
        base = packed.seq_lens[packed.sampled] - (widths - 1)  # [m] position of each row's first new token
        flat_rows = rows if plain else np.repeat(rows, widths)
        positions = packed.positions[packed.keep[: flat_rows.size]] + 1
        batch = SampleBatch(flat_rows, positions, self.rows.token_ids, self.rows.prompt_lens)
        drafts = self._drafts(rows, base, widths)
        sampled, raw = self._choose(batch, kept, rows, widths, drafts)
        if plain:
            tokens, num_new = sampled[:, None], np.ones(rows.size, np.int32)
            self.rows.token_ids[rows, base] = sampled
        else:
            tokens, num_new = verify(sampled, widths, drafts)
            which, at = np.nonzero(np.arange(tokens.shape[1]) < num_new[:, None])
            self.rows.token_ids[rows[which], base[which] + at] = tokens[which, at]
        result = StepResult(rows, tokens, num_new, _NO_ROWS)
        if raw is not None:
            result.logprobs = self._logprobs(raw, rows, widths, tokens, num_new)
        return result

    def _drafts(self, rows: IntRows, base: IntRows, widths: IntRows) -> IntRows:
        """[m, max(widths) - 1] the drafts under verification, read from the token matrix."""
        most = int(widths.max()) - 1
        if most == 0:
            return np.zeros((rows.size, 0), np.int32)
        at = base[:, None] + np.arange(most, dtype=np.int32)
        return self.rows.token_ids[rows[:, None], np.minimum(at, self.rows.token_ids.shape[1] - 1)]

    def _choose(
        self, batch: SampleBatch, kept: Kept, rows: IntRows, widths: IntRows, drafts: IntRows
    ) -> tuple[IntRows, torch.Tensor | None]:
        """One token for each logits row, and the raw logits of the rows that want log-probabilities."""
        active = [part for part in self._processors if part.is_active(batch.rows)]
        wants_raw = self.rows.num_with_logprobs > 0 and bool((self.rows.num_logprobs[rows] >= 0).any())
        head = self._head(batch) if self._num_prompt(kept, batch) else None
        if not active and not wants_raw and self._grammars.is_empty and self._sampler.greedy_rows(batch.rows).all():
            greedy = self.model.greedy(kept, head)
            if greedy is not None:
                return greedy.cpu().numpy().astype(np.int32), None
        logits = self.model.logits(kept, head)
        raw = None
        if wants_raw:
            raw = logits[torch.from_numpy(np.nonzero(self.rows.num_logprobs[batch.rows] >= 0)[0])]
        for part in active:
            part.apply(logits, batch)
        if not self._grammars.is_empty:
            starts = np.cumsum(widths) - widths
            self._grammars.mask(logits, rows, starts, [d[: w - 1] for d, w in zip(drafts, widths, strict=True)])
        return self._sample_tokens(logits, batch).cpu().numpy().astype(np.int32), raw

    @staticmethod
    def _num_prompt(kept: Kept, batch: SampleBatch) -> int:
        """Kept rows beyond those that sample: prompt positions."""
        some = kept.logits if kept.hidden is None else kept.hidden
        assert some is not None, "the model keeps hidden rows or logits"
        return some.shape[0] - batch.rows.size

    def _head(self, batch: SampleBatch) -> torch.Tensor:
        return torch.arange(batch.rows.size, device=self._device)

    def _propose(self, plan: StepPlan, packed: Packed, kept: Kept, result: StepResult) -> IntRows:
        """Ask the speculator; drafts go into the token matrix behind the verified tokens. Returns how many, [m].

        Drafts are a bonus: a speculator that fails costs speed, never an answer.
        """
        speculator, rows = self._speculator, result.rows
        if speculator is None:
            return _NO_ROWS
        limit = np.where(self._drafts_for[rows], plan.draft_limits[packed.sampled], np.int32(0))
        if not limit.any():
            return np.zeros(rows.size, np.int32)
        first = np.cumsum(packed.widths) - packed.widths
        num_tokens = packed.seq_lens[packed.sampled] - (packed.widths - 1) + result.num_new
        hidden = None
        if self._wants_hidden:
            assert kept.hidden is not None, "compose checks that the model offers hidden rows"
            hidden = kept.hidden[torch.from_numpy((first + result.num_new - 1).astype(np.int64))]
        try:
            drafts, counts = speculator.propose(DraftBatch(rows, num_tokens, limit, self.rows.token_ids, hidden))
            counts = usable_drafts(drafts, np.minimum(counts, limit), self.model.spec.vocab_size)
        except Exception:
            self._num_failed_proposals += 1
            if self._num_failed_proposals.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …
                name, count = type(speculator).__name__, self._num_failed_proposals
                log.exception("%s failed to propose (%d times so far); the step goes without drafts", name, count)
            return np.zeros(rows.size, np.int32)
        which, at = np.nonzero(np.arange(drafts.shape[1]) < counts[:, None])
        self.rows.token_ids[rows[which], num_tokens[which] + at] = drafts[which, at]
        return counts

    def _logprobs(
        self, raw: torch.Tensor, rows: IntRows, widths: IntRows, tokens: IntRows, num_new: IntRows
    ) -> dict[int, list[TokenLogprobs]]:
        """One entry a verified token, for the rows that asked; from the logits before any processor."""
        num_top = self.rows.num_logprobs[rows]
        asked = np.flatnonzero(num_top >= 0)
        counts, own = num_new[asked], widths[asked]
        ends = np.cumsum(counts)
        if (own != 1).any():  # rows of rejected drafts are left out
            first = np.cumsum(own) - own
            at = np.arange(int(ends[-1])) + np.repeat(first - (ends - counts), counts)
            raw = raw[torch.from_numpy(at).to(raw.device)]
        chosen = tokens[asked][np.arange(tokens.shape[1]) < counts[:, None]]
        entries = token_logprobs(raw, chosen.astype(np.int64), np.repeat(num_top[asked], counts))
        starts = (ends - counts).tolist()
        return {
            row: entries[start:end] for row, start, end in zip(rows[asked].tolist(), starts, ends.tolist(), strict=True)
        }

    def _prompt_logprobs(self, packed: Packed, kept: Kept) -> dict[int, list[TokenLogprobs]]:
        """Entries for prompt positions first + 1 … first + count of each row that asked."""
        found: dict[int, list[TokenLogprobs]] = {}
        start = packed.keep.size - sum(count for _, _, count in packed.prompt_rows)
        for row, first, count in packed.prompt_rows:
            index = torch.arange(start, start + count, device=self._device)
            chosen = self.rows.token_ids[row, first + 1 : first + 1 + count].astype(np.int64)
            top = int(self.rows.num_prompt_logprobs[row])
            found[row] = token_logprobs(self.model.logits(kept, index), chosen, [top] * count)
            start += count
        return found

    def is_healthy(self) -> bool:
        """A CUDA context that an illegal access has poisoned fails every call from then on."""
        if self._device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        """Drop the KV store."""
        self.kv.clear()


def build(ctx: BuildContext) -> LocalRunner:
    """Provider factory."""
    parts = ctx.parts
    assert ctx.model is not None, "the executor is built last"
    speculator = parts.get("speculator")
    max_model_len = ctx.engine.max_model_len
    assert max_model_len is not None, "resolved before parts are built"
    rows = RunnerRows(
        ctx.engine.max_num_seqs,
        max_model_len,
        ctx.engine.block_size,
        max_drafts=0 if speculator is None else speculator.max_drafts,
    )
    return LocalRunner(
        model=ctx.model,
        attention=parts["attention"],
        sampler=parts["sampler"],
        processors=parts["logits_processor"],
        rows=rows,
        speculator=speculator,
        adapters=parts.get("adapter"),
        device=ctx.device,
        dtype=getattr(torch, ctx.engine.kv_cache_dtype),
    )
