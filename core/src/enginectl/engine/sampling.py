"""From what the forward kept to a step's tokens: choosing on the device, then placing them once the host knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from enginectl.builtin.sampling.logprobs import token_logprobs
from enginectl.engine.grammar import GrammarRows
from enginectl.engine.readback import TokensAhead
from enginectl.engine.rows import IntRows, Packed, RunnerRows
from enginectl.engine.verify import verify
from enginectl.interfaces.executor import StepResult
from enginectl.interfaces.model import Kept, Model
from enginectl.interfaces.sampler import LogitsProcessor, SampleBatch, Sampler
from enginectl.transfer import to_device
from enginectl.types import TokenLogprobs

NO_ROWS = np.zeros(0, np.int32)
_PROMPT_ROWS = 64
"""Fewer positions at a time leave matrix products too small."""


@dataclass(slots=True)
class Choice:
    """A token for each logits row, on its way to the host.

    rows, base, widths: [m] rows that sample, position of each row's first new token, logits rows of each.
    drafts: [m, max(widths) - 1] under verification. raw: logits of the rows that want log-probabilities, before any
    processor. token_ids: [sum(widths)] on the device.
    """

    rows: IntRows
    base: IntRows
    widths: IntRows
    drafts: IntRows
    token_ids: Tensor
    raw: Tensor | None
    ahead: TokensAhead | None = None

    def wait(self) -> IntRows:
        """The tokens, on the host."""
        assert self.ahead is not None, "the tokens were asked for"
        return self.ahead.wait()

    @property
    def is_plain(self) -> bool:
        """One token a row."""
        return self.token_ids.shape[0] == self.rows.size


class StepSampler:
    """Logits processors, grammar masks, the sampler, verification and log-probabilities of one model."""

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        processors: Sequence[LogitsProcessor],
        grammars: GrammarRows,
        rows: RunnerRows,
        device: torch.device,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._processors = list(processors)
        self._grammars = grammars
        self._rows = rows
        self._device = device
        self._sample_tokens = sampler.sample  # bound once: the step calls it directly

    def reads_tokens(self, rows: IntRows) -> bool:
        """Whether choosing for these rows takes tokens that the host must know: grammars, penalties and the like."""
        if not self._grammars.is_empty and self._grammars.constrained(rows).any():
            return True
        if any(part.reads_tokens and part.is_active(rows) for part in self._processors):
            return True
        return self._sampler.reads_tokens and not bool(self._sampler.greedy_rows(rows).all())

    def wants_logprobs(self, rows: IntRows) -> bool:
        """Whether one of these rows asked for the log-probabilities of its tokens."""
        return self._rows.num_with_logprobs > 0 and bool((self._rows.num_logprobs[rows] >= 0).any())

    # -- on the device -------------------------------------------------------------------------------------------

    def choose(self, rows: IntRows, packed: Packed, kept: Kept) -> Choice:
        """One token for each logits row. rows: [m] those that sample, at least one."""
        widths = packed.widths
        if packed.is_decode:
            flat_rows, base = rows, packed.seq_lens
            positions, drafts = base, np.zeros((rows.size, 0), np.int32)
        else:
            base = packed.seq_lens[packed.sampled] - (widths - 1)
            flat_rows = rows if int(widths.max()) == 1 else np.repeat(rows, widths)
            positions = packed.positions[packed.keep[: flat_rows.size]] + 1
            drafts = self._drafts(rows, base, widths)
        batch = SampleBatch(flat_rows, positions, self._rows.token_ids, self._rows.prompt_lens)
        token_ids, raw = self._choose(batch, kept, rows, widths, drafts)
        return Choice(rows, base, widths, drafts, token_ids, raw)

    def _drafts(self, rows: IntRows, base: IntRows, widths: IntRows) -> IntRows:
        """[m, max(widths) - 1] the drafts under verification, read from the token matrix."""
        most = int(widths.max()) - 1
        if most == 0:
            return np.zeros((rows.size, 0), np.int32)
        at = base[:, None] + np.arange(most, dtype=np.int32)
        return self._rows.token_ids[rows[:, None], np.minimum(at, self._rows.token_ids.shape[1] - 1)]

    def _choose(
        self, batch: SampleBatch, kept: Kept, rows: IntRows, widths: IntRows, drafts: IntRows
    ) -> tuple[Tensor, Tensor | None]:
        """Token ids, and the raw logits of the rows that want log-probabilities."""
        active = [part for part in self._processors if part.is_active(batch.rows)]
        wants_raw = self.wants_logprobs(rows)
        # Kept rows beyond those that sample are prompt positions.
        head = torch.arange(batch.rows.size, device=self._device) if _num_kept(kept) > batch.rows.size else None
        if not active and not wants_raw and self._grammars.is_empty and self._sampler.greedy_rows(batch.rows).all():
            greedy = self._model.greedy(kept, head)
            if greedy is not None:
                return greedy, None
        logits = self._model.logits(kept, head)
        raw = None
        if wants_raw:
            raw = logits.index_select(0, self._index(np.flatnonzero(self._rows.num_logprobs[batch.rows] >= 0)))
        for part in active:
            part.apply(logits, batch)
        if not self._grammars.is_empty:
            which = np.flatnonzero(self._grammars.constrained(rows))
            starts, own = (np.cumsum(widths) - widths)[which], zip(drafts[which], widths[which], strict=True)
            self._grammars.mask(logits, rows[which], starts, [draft[: width - 1] for draft, width in own])
        return self._sample_tokens(logits, batch), raw

    def _index(self, at: NDArray[np.intp]) -> Tensor:
        return to_device(at, self._device)

    # -- on the host ---------------------------------------------------------------------------------------------

    def place(self, choice: Choice, sampled: IntRows) -> StepResult:
        """Verify drafts, write what is new into the token matrix. sampled: [sum(widths)] the choice's tokens."""
        rows, base = choice.rows, choice.base
        if choice.is_plain:
            tokens, num_new = sampled[:, None], choice.widths
            self._rows.token_ids[rows, base] = sampled
        else:
            tokens, num_new = verify(sampled, choice.widths, choice.drafts)
            which, at = np.nonzero(np.arange(tokens.shape[1]) < num_new[:, None])
            self._rows.token_ids[rows[which], base[which] + at] = tokens[which, at]
        result = StepResult(rows, tokens, num_new, NO_ROWS)
        if choice.raw is not None:
            result.logprobs = self._logprobs(choice.raw, rows, choice.widths, tokens, num_new)
        return result

    def _logprobs(
        self, raw: Tensor, rows: IntRows, widths: IntRows, tokens: IntRows, num_new: IntRows
    ) -> dict[int, list[TokenLogprobs]]:
        """One entry a verified token, for the rows that asked; from the logits before any processor."""
        num_top = self._rows.num_logprobs[rows]
        asked = np.flatnonzero(num_top >= 0)
        counts, own = num_new[asked], widths[asked]
        ends = np.cumsum(counts)
        if (own != 1).any():  # rows of rejected drafts are left out
            first = np.cumsum(own) - own
            at = np.arange(int(ends[-1])) + np.repeat(first - (ends - counts), counts)
            raw = raw.index_select(0, self._index(at))
        chosen = tokens[asked][np.arange(tokens.shape[1]) < counts[:, None]]
        entries = token_logprobs(raw, chosen.astype(np.int64), np.repeat(num_top[asked], counts))
        starts = (ends - counts).tolist()
        return {
            row: entries[start:end] for row, start, end in zip(rows[asked].tolist(), starts, ends.tolist(), strict=True)
        }

    def prompt_logprobs(self, packed: Packed, kept: Kept) -> dict[int, list[TokenLogprobs]]:
        """Entries for prompt positions first + 1 … first + count of each row that asked.

        Logits of a whole prompt may be gigabytes: they are made for as many positions at a time as a step may sample.
        """
        found: dict[int, list[TokenLogprobs]] = {}
        most = max(_PROMPT_ROWS, len(self._rows.prompt_lens))
        start = packed.keep.size - sum(count for _, _, count in packed.prompt_rows)
        for row, first, count in packed.prompt_rows:
            chosen = self._rows.token_ids[row, first + 1 : first + 1 + count].astype(np.int64)
            top = int(self._rows.num_prompt_logprobs[row])
            found[row] = []
            for at in range(0, count, most):
                part = chosen[at : at + most]
                index = torch.arange(start + at, start + at + part.size, device=self._device)
                found[row] += token_logprobs(self._model.logits(kept, index), part, [top] * part.size)
            start += count
        return found


def _num_kept(kept: Kept) -> int:
    """Rows that the forward kept."""
    some = kept.logits if kept.hidden is None else kept.hidden
    assert some is not None, "the model keeps hidden rows or logits"
    return some.shape[0]
