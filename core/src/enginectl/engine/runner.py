"""The runner: a step plan in, tokens out. Owns the model, the KV store, the row arrays and all that reads logits.

A step is launched (packed, sent, its kernels queued) and finished (its tokens placed, drafts proposed, grammars
advanced). On a CPU both happen in `launch`. On a GPU a step is finished when its handle is waited for, and the step
behind it takes its input tokens from the device; only if that step's sampling must read tokens on the host (a grammar,
a penalty) does its launch finish the one before first.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import chain

import numpy as np
import torch

from enginectl.context import BuildContext
from enginectl.engine.drafting import Drafter
from enginectl.engine.feedback import TokenFeedback
from enginectl.engine.grammar import GrammarRows
from enginectl.engine.graphs import DecodeGraphs, make_graphs, record_graphs
from enginectl.engine.in_flight import StepsInFlight
from enginectl.engine.inputs import StepInputs, make_inputs
from enginectl.engine.readback import readback_for
from enginectl.engine.row_books import RowBooks
from enginectl.engine.rows import IntRows, Packed, RunnerRows
from enginectl.engine.sampling import NO_ROWS, Choice, StepSampler
from enginectl.engine.store import make_pages
from enginectl.engine.upload import upload_for
from enginectl.interfaces.adapter import AdapterBackend
from enginectl.interfaces.attention import AttentionBackend
from enginectl.interfaces.executor import Executor, StepHandle, StepPlan, StepResult
from enginectl.interfaces.kv import KVLayout
from enginectl.interfaces.model import ForwardInput, Kept, Model
from enginectl.interfaces.sampler import LogitsProcessor, Sampler
from enginectl.interfaces.speculator import DraftStore, Speculator


class LaunchedStep(StepHandle):
    """A step on its way: what finishing it needs, then its result or what it raised."""

    __slots__ = ("_runner", "broken", "choice", "error", "kept", "number", "packed", "plan", "result")

    def __init__(self, runner: LocalRunner, plan: StepPlan, number: int) -> None:
        self._runner = runner
        self.plan = plan
        self.number = number
        self.broken: dict[int, str] = {}
        self.packed: Packed | None = None
        self.kept: Kept | None = None
        self.choice: Choice | None = None
        self.result: StepResult | None = None
        self.error: Exception | None = None

    @property
    def is_finished(self) -> bool:
        """It has a result or an error."""
        return self.result is not None or self.error is not None

    def wait(self) -> StepResult:
        """Finish it, if nobody has."""
        self._runner.retire(self)
        if self.error is not None:
            raise self.error
        assert self.result is not None, "a finished step has a result or an error"
        return self.result


class LocalRunner(Executor):
    """One device in this process. enforce_eager: decode steps are never recorded as CUDA graphs."""

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
        enforce_eager: bool = False,
    ) -> None:
        max_rows, max_drafts = len(rows.prompt_lens), 0 if speculator is None else speculator.max_drafts
        self.model = model
        self.rows = rows
        self.kv: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._draft_kv: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._attention = attention
        self._sampler = sampler
        self._processors = list(processors)
        self._adapters = adapters
        self._drafter = None if speculator is None else Drafter(speculator, rows, model.spec.vocab_size)
        self._grammars = GrammarRows(max_rows)
        self._device = torch.device(device)
        self._dtype = dtype
        self._enforce_eager = enforce_eager
        self._graphs: DecodeGraphs | None = None
        self._sampling = StepSampler(model, sampler, processors, self._grammars, rows, self._device)
        self._upload = upload_for(self._device)
        self._readback = readback_for(self._device, max_rows * (1 + max_drafts))
        self.is_asynchronous = self._readback.is_deferred
        self._feedback = TokenFeedback(max_rows, self._device) if self.is_asynchronous else None
        self._row_books = RowBooks(rows, (*processors, sampler), self._grammars, self._drafter, self._feedback)
        self._unfinished: deque[LaunchedStep] = deque()
        self._in_flight = StepsInFlight()
        # Bound once: the step calls these directly.
        self._forward = model.forward
        self._prepare_attention = attention.prepare

    # -- start ---------------------------------------------------------------------------------------------------

    def allocate(self, layout: KVLayout) -> None:
        """Two tensors a layer, [num_blocks, block_size, num_kv_heads, head_dim], zeroed."""
        self._select_device()
        self.kv = make_pages(self.model.spec.layers, layout, self._device, self._dtype)
        self._attention.bind(self.kv)
        self.model.bind(self.kv, len(self.rows.prompt_lens))
        if self._drafter is not None:
            rows = self.rows
            self._draft_kv = make_pages(self._drafter.kv_layers(), layout, self._device, self._dtype)
            self._drafter.bind(
                DraftStore(
                    kv=self._draft_kv,
                    block_table=rows.block_table,
                    num_blocks=rows.num_blocks,
                    block_size=rows.block_size,
                    prompt_lens=rows.prompt_lens,
                    processors=self._processors,
                    sampler=self._sampler,
                )
            )
        self._graphs = self._record_graphs()  # last: what does without them does without its memory too

    def _record_graphs(self) -> DecodeGraphs | None:
        """Graphs of decode steps, on devices that have them."""
        if self._enforce_eager:
            return None
        groups, num_rows, width = self.rows.block_table.shape
        graphs = make_graphs(
            self.model,
            self._attention,
            self._adapters,
            self._device,
            num_rows=num_rows,
            table_shape=(groups, width),
            block_size=self.rows.block_size,
        )
        return None if graphs is None else record_graphs(graphs)

    def _select_device(self) -> None:
        """Kernels are launched on the thread's current GPU; another engine of this process may use another."""
        if self._device.type == "cuda" and torch.cuda.current_device() != self._device.index:
            torch.cuda.set_device(self._device)

    # -- launch --------------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> StepHandle:
        """Apply the differences, queue the step. One behind a step that raised is skipped (see `in_flight`)."""
        self._select_device()
        step = LaunchedStep(self, plan, self._in_flight.launch())
        self._row_books.apply(plan)
        try:
            self._settle(plan)
            self._in_flight.check(step.number)
            with torch.inference_mode():
                self._start(step)
        except Exception as error:
            self._fail(step, error)
            self._release(step)
        return step

    def _settle(self, plan: StepPlan) -> None:
        """Finish earlier steps that this one cannot be launched behind: at most one may be on its way."""
        while self._unfinished:
            last = self._unfinished[-1].choice
            stays = last is None or (last.is_plain and not self._sampling.reads_tokens(plan.rows))
            if stays and len(self._unfinished) == 1:
                return
            self._finish(self._unfinished.popleft())

    def _start(self, step: LaunchedStep) -> None:
        plan = step.plan
        if self._row_books.broken:
            step.broken = {row: why for row, why in self._row_books.broken.items() if row in plan.rows}
            plan = step.plan = plan.select(np.nonzero(~np.isin(plan.rows, list(step.broken)))[0])
        if not plan.rows.size:
            step.result = _nothing(step.broken)
            return
        packed = step.packed = self.rows.pack(plan)
        inputs = make_inputs(plan, packed, self.rows, self._upload, self._feedback)
        kept = step.kept = self._run_forward(plan, packed, inputs)
        rows = plan.rows[packed.sampled] if packed.sampled.size != plan.rows.size else plan.rows
        if rows.size:
            choice = step.choice = self._sampling.choose(rows, packed, kept)
            if self._feedback is not None and choice.is_plain:
                assert inputs.sampled_rows is not None, "sent for the feedback"
                self._feedback.put(rows, choice.base, choice.token_ids, inputs.sampled_rows)
            choice.ahead = self._readback.start(choice.token_ids)
        self._unfinished.append(step)
        if not self._may_wait(packed, rows):
            self._finish_through(step)

    def _may_wait(self, packed: Packed, rows: IntRows) -> bool:
        """Log-probabilities are read from what the next step overwrites, and take the tokens."""
        return self.is_asynchronous and not packed.prompt_rows and not self._sampling.wants_logprobs(rows)

    def _run_forward(self, plan: StepPlan, packed: Packed, inputs: StepInputs) -> Kept:
        graphs = self._graphs
        # A graph keeps every row, in order.
        keeps_all = packed.sampled.size == plan.rows.size and not packed.prompt_rows
        slots = inputs.adapter_slots
        if graphs is not None and keeps_all and graphs.serves(plan.num_tokens, with_adapters=slots is not None):
            return graphs.run(inputs.token_ids, inputs.positions, inputs.batch, slots)
        if self._adapters is not None:
            self._adapters.begin_step(slots)
        return self._forward(
            ForwardInput(
                token_ids=inputs.token_ids,
                positions=inputs.positions,
                keep=inputs.keep,
                plan=self._prepare_attention(inputs.batch),
                adapter_slots=slots,
                batch=inputs.batch,
                rows=plan.rows,
                keep_host=packed.keep,
                begin_adapters=None if slots is None else partial(self._begin_adapters, packed, slots),
            )
        )

    def _begin_adapters(self, packed: Packed, slots: torch.Tensor, first: int, last: int) -> bool:
        """Tokens [first, last) of the step have a forward of their own. Returns whether any has an adapter."""
        assert self._adapters is not None, "a token has a slot"
        has_any = bool((self.rows.adapter_slots[packed.token_rows[first:last]] >= 0).any())
        self._adapters.begin_step(slots[first:last] if has_any else None)
        return has_any

    # -- finish --------------------------------------------------------------------------------------------------

    def retire(self, step: LaunchedStep) -> None:
        """The caller wants to know how the step ended; steps before it are finished first."""
        self._in_flight.retire()
        self._select_device()
        self._finish_through(step)

    def _finish_through(self, step: LaunchedStep) -> None:
        """In order: a step's drafts and grammars stand on the tokens of those before it."""
        while self._unfinished and not step.is_finished:
            self._finish(self._unfinished.popleft())

    def _finish(self, step: LaunchedStep) -> None:
        """Place its tokens."""
        try:
            sampled = None if step.choice is None else step.choice.wait()
            self._in_flight.check(step.number)
            with torch.inference_mode():
                step.result = self._place(step, sampled)
        except Exception as error:
            self._fail(step, error)
        self._release(step)

    def _fail(self, step: LaunchedStep, error: Exception) -> None:
        step.error = error
        # Frames hold the step's tensors; when it ran out of memory, its halves need that.
        found: BaseException | None = error
        while found is not None:
            traceback.clear_frames(found.__traceback__)
            found = found.__context__
        self._in_flight.fail(step.number)

    def _release(self, step: LaunchedStep) -> None:
        if self._feedback is not None and step.choice is not None:
            self._feedback.settle(step.choice.rows, step.choice.base)
        step.kept = step.choice = None

    def _place(self, step: LaunchedStep, sampled: IntRows | None) -> StepResult:
        packed, kept, choice = step.packed, step.kept, step.choice
        assert packed is not None, "a step without rows has its result"
        assert kept is not None, "it was launched"
        result = _nothing({})
        if choice is not None and sampled is not None:
            result = self._sampling.place(choice, sampled)
        if packed.prompt_rows:
            result.prompt_logprobs = self._sampling.prompt_logprobs(packed, kept)
        if result.rows.size:
            self._look_ahead(step.plan, packed, kept, result)
        result.errors.update(step.broken)
        return result

    def _look_ahead(self, plan: StepPlan, packed: Packed, kept: Kept, result: StepResult) -> None:
        """Drafts for the next step, and grammars advanced: last, because a step that raised is run again."""
        started = time.perf_counter()
        if self._drafter is not None:
            result.num_drafts = self._drafter.propose(plan, packed, kept, result)
        result.propose_s = time.perf_counter() - started
        result.errors = self._grammars.accept(result.rows, result.token_ids, result.num_new)

    # -- end -----------------------------------------------------------------------------------------------------

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
        """Drop the graphs and the KV store. On a GPU its memory is free at once, whoever still holds parts of the engine."""
        self._graphs = None
        if self._device.type == "cuda":
            with suppress(RuntimeError):  # a device that is lost
                for pages in chain.from_iterable(self.kv + self._draft_kv):
                    pages.untyped_storage().resize_(0)
                torch.cuda.empty_cache()
        self.kv.clear()
        self._draft_kv.clear()


def _nothing(errors: dict[int, str]) -> StepResult:
    """The result of a step in which nobody samples."""
    return StepResult(NO_ROWS, np.zeros((0, 1), np.int32), NO_ROWS, NO_ROWS, errors=errors)


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
        enforce_eager=ctx.engine.enforce_eager,
    )
