"""Logits processors: what they change, from the token matrix alone."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from enginectl.builtin import sampling
from enginectl.builtin.sampling.masks import AllowedTokens, BadWords, LogitBias, MinTokens
from enginectl.builtin.sampling.penalties import Penalties
from enginectl.builtin.sampling.rows import RaggedRows
from enginectl.builtin.sampling.sampler import TorchSampler
from enginectl.config import EngineConfig
from enginectl.context import BuildContext, Machine
from enginectl.interfaces.sampler import LogitsProcessor, RowParts, SampleBatch
from enginectl.testing.tolerances import TOLERANCES
from enginectl.types import SamplingParams

VOCAB, ROWS, LENGTH = 50, 12, 40
EOS = (2, 7)
PROMPT_LENS = np.arange(1, ROWS + 1, dtype=np.int32) % 6 + 1
PLAIN = SamplingParams()


def processors() -> dict[str, tuple[LogitsProcessor, SamplingParams]]:
    return {
        "penalties": (
            Penalties(ROWS),
            SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.7),
        ),
        "logit_bias": (LogitBias(ROWS), SamplingParams(logit_bias={3: 5.0, 49: -100.0})),
        "bad_words": (BadWords(ROWS), SamplingParams(bad_word_ids=((4,), (5, 6), (1, 2, 3), (0, 8)))),
        "min_tokens": (MinTokens(ROWS, EOS), SamplingParams(min_tokens=12, stop_token_ids=(11,))),
        "allowed_token_ids": (AllowedTokens(ROWS), SamplingParams(allowed_token_ids=(0, 9, 30))),
    }


@pytest.fixture(params=list(processors()))
def used(request: pytest.FixtureRequest) -> tuple[LogitsProcessor, SamplingParams]:
    return processors()[request.param]


def tokens(seed: int = 0, high: int = 10) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, high, (ROWS, LENGTH)).astype(np.int32)


def batch(rows: list[int], positions: list[int], token_ids: NDArray[np.int32] | None = None) -> SampleBatch:
    matrix = tokens() if token_ids is None else token_ids
    return SampleBatch(np.array(rows, np.int32), np.array(positions, np.int32), matrix, PROMPT_LENS)


def logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(4)) * 3


def add(processor: LogitsProcessor, row: int, params: SamplingParams) -> None:
    processor.add_row(row, params, seed=0, choice=0, prompt_len=int(PROMPT_LENS[row]))


def applied(processor: LogitsProcessor, to: SampleBatch) -> torch.Tensor:
    changed = logits(len(to.rows))
    processor.apply(changed, to)
    return changed


def test_nobody_uses_it(used: tuple[LogitsProcessor, SamplingParams]) -> None:
    processor, _ = used
    rows = np.arange(ROWS, dtype=np.int32)
    for row in range(ROWS):
        add(processor, row, PLAIN)
    assert not processor.is_active(rows)
    assert not processor.needs_logits(rows).any()
    assert torch.equal(applied(processor, batch([0, 1], [20, 20])), logits(2))


def test_only_the_rows_that_asked_are_changed(used: tuple[LogitsProcessor, SamplingParams]) -> None:
    processor, params = used
    for row in range(ROWS):
        add(processor, row, params if row in (3, 8) else PLAIN)
    rows = np.array([8, 0, 3, 1], dtype=np.int32)
    assert processor.is_active(rows)
    assert not processor.is_active(np.array([0, 1, 2], dtype=np.int32))
    assert processor.needs_logits(rows).tolist() == [True, False, True, False]
    changed = (applied(processor, batch(rows.tolist(), [10] * 4)) != logits(4)).any(-1)
    assert changed.tolist() == [True, False, True, False]


def test_a_row_does_not_depend_on_the_batch(used: tuple[LogitsProcessor, SamplingParams]) -> None:
    """Law 4: drafts of a row, other rows and their order change nothing; logits rows may lie apart in memory."""
    processor, params = used
    for row in range(0, ROWS, 2):
        add(processor, row, params)
    rows, positions = [0, 4, 4, 4, 1, 10, 2], [9, 20, 21, 22, 7, 30, 12]
    whole = applied(processor, batch(rows, positions))
    for i in range(len(rows)):
        one = logits(len(rows))[i : i + 1].clone()
        processor.apply(one, batch(rows[i : i + 1], positions[i : i + 1]))
        assert torch.equal(one[0], whole[i])
    wide = torch.zeros(len(rows), VOCAB + 13)
    wide[:, :VOCAB] = logits(len(rows))
    processor.apply(wide[:, :VOCAB], batch(rows, positions))
    assert torch.equal(wide[:, :VOCAB], whole)
    assert not wide[:, VOCAB:].any()


def test_tokens_after_the_position_do_not_count(used: tuple[LogitsProcessor, SamplingParams]) -> None:
    """Law 2: a rejected draft leaves no trace, for nothing is remembered."""
    processor, params = used
    add(processor, 5, params)
    before, after = tokens(), tokens()
    after[:, 15:] = tokens(seed=9)[:, 15:]
    assert torch.equal(applied(processor, batch([5], [15], before)), applied(processor, batch([5], [15], after)))


def test_a_row_that_is_taken_again_forgets(used: tuple[LogitsProcessor, SamplingParams]) -> None:
    processor, params = used
    rows = np.array([5], dtype=np.int32)
    add(processor, 5, params)
    add(processor, 5, PLAIN)
    assert not processor.is_active(rows)
    add(processor, 5, params)
    add(processor, 5, params)
    processor.remove_row(5)
    assert not processor.is_active(rows)
    assert torch.equal(applied(processor, batch([5], [20])), logits(1))
    add(processor, 5, params)
    assert processor.is_active(rows)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(repetition_penalty=0.6, presence_penalty=0.5),
        SamplingParams(frequency_penalty=0.9),
        SamplingParams(frequency_penalty=-0.3, presence_penalty=1.1),
    ],
)
def test_penalties_are_what_counting_gives(params: SamplingParams) -> None:
    """First repetition over prompt and output, then frequency and presence over the output."""
    processor = Penalties(ROWS)
    rows, positions = [0, 3, 3, 7, 11], [1, 20, 21, 39, 7]
    for row in range(ROWS):
        add(processor, row, params)
    to = batch(rows, positions)
    expected = logits(len(rows)).double()
    for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
        history = to.token_ids[row, :position].tolist()
        for token_id in set(history):
            value = float(expected[i, token_id])
            penalty = params.repetition_penalty
            expected[i, token_id] = value / penalty if value > 0 else value * penalty
        for token_id, count in Counter(history[PROMPT_LENS[row] :]).items():
            expected[i, token_id] -= params.frequency_penalty * count + params.presence_penalty
    rtol, atol = TOLERANCES["float32"]
    torch.testing.assert_close(applied(processor, to).double(), expected, rtol=rtol, atol=atol)


def test_penalties_of_rows_without_output_and_with_different_windows() -> None:
    processor = Penalties(ROWS)
    add(processor, 0, SamplingParams(frequency_penalty=1.0))  # looks at nothing yet
    add(processor, 1, SamplingParams(repetition_penalty=2.0))
    position = int(PROMPT_LENS[0])
    assert torch.equal(applied(processor, batch([0], [position])), logits(1))
    changed = applied(processor, batch([0, 1], [position, 30])) != logits(2)
    assert changed.any(-1).tolist() == [False, True]


def test_bias_is_added() -> None:
    processor, params = processors()["logit_bias"]
    add(processor, 2, params)
    difference = applied(processor, batch([2], [9])) - logits(1)
    assert difference[0, 3] == pytest.approx(5.0, abs=1e-5)
    assert difference[0, 49] == pytest.approx(-100.0, abs=1e-4)
    assert difference.count_nonzero() == 2


def test_a_bad_word_is_cut_before_its_last_token() -> None:
    processor, params = processors()["bad_words"]
    history = np.full((ROWS, LENGTH), 40, dtype=np.int32)
    history[0, 4:6] = (1, 2)
    history[1, 4:6] = (2, 1)
    history[2, 5] = 5
    history[3, 0] = 0
    for row in range(4):
        add(processor, row, params)
    masked = torch.isinf(applied(processor, batch([0, 1, 2, 3, 0], [6, 6, 6, 1, 1], history)))
    assert [row.nonzero()[:, 0].tolist() for row in masked] == [[3, 4], [4], [4, 6], [4, 8], [4]]


def test_requests_with_bad_words_of_different_lengths_share_a_batch() -> None:
    processor = BadWords(ROWS)
    history = np.full((ROWS, LENGTH), 1, dtype=np.int32)
    add(processor, 0, SamplingParams(bad_word_ids=((9,),)))
    add(processor, 1, SamplingParams(bad_word_ids=((1, 1, 1, 1, 8), (1, 7))))
    masked = torch.isinf(applied(processor, batch([1, 0, 1], [4, 4, 3], history)))
    assert [row.nonzero()[:, 0].tolist() for row in masked] == [[7, 8], [9], [7]]


@pytest.mark.parametrize(("ignore_eos", "ends"), [(False, [2, 7, 11]), (True, [11])])
def test_no_end_before_min_tokens(ignore_eos: bool, ends: list[int]) -> None:
    """Law 14b: all of the EOS set, except where the request ignores it anyway."""
    processor = MinTokens(ROWS, EOS)
    add(processor, 4, SamplingParams(min_tokens=3, stop_token_ids=(11,), ignore_eos=ignore_eos))
    start = int(PROMPT_LENS[4])
    masked = torch.isinf(applied(processor, batch([4] * 4, [start, start + 1, start + 2, start + 3])))
    assert [row.nonzero()[:, 0].tolist() for row in masked] == [ends, ends, ends, []]


def test_min_tokens_with_nothing_to_forbid_is_not_active() -> None:
    processor = MinTokens(ROWS, EOS)
    add(processor, 4, SamplingParams(min_tokens=3, ignore_eos=True))
    assert not processor.is_active(np.array([4], dtype=np.int32))


def test_nothing_but_the_allowed_tokens_is_left() -> None:
    processor, params = processors()["allowed_token_ids"]
    add(processor, 2, params)
    changed = applied(processor, batch([2], [9]))
    assert torch.isfinite(changed[0]).nonzero()[:, 0].tolist() == [0, 9, 30]
    assert torch.equal(changed[0, [0, 9, 30]], logits(1)[0, [0, 9, 30]])


def _context(**changes: Any) -> BuildContext:
    config = EngineConfig(model="tiny", max_num_seqs=ROWS)
    machine = Machine(num_cores=1, memory_bytes=1, cpu_flags=frozenset())
    return BuildContext(engine=config, machine=machine).with_(**changes)


@pytest.mark.parametrize(
    ("factory", "kind"),
    [
        (sampling.build_sampler, TorchSampler),
        (sampling.build_penalties, Penalties),
        (sampling.build_logit_bias, LogitBias),
        (sampling.build_bad_words, BadWords),
        (sampling.build_min_tokens, MinTokens),
        (sampling.build_allowed_token_ids, AllowedTokens),
    ],
)
def test_factories_make_room_for_max_num_seqs(factory: Any, kind: type[RowParts]) -> None:
    part = factory(_context())
    assert type(part) is kind
    part.add_row(ROWS - 1, PLAIN, 0, 0, 1)
    with pytest.raises(IndexError):
        part.add_row(ROWS, PLAIN, 0, 0, 1)


def test_min_tokens_takes_the_eos_set_from_the_checkpoint() -> None:
    """Law 14b."""
    checkpoint = SimpleNamespace(
        generation_config={"eos_token_id": [7, 2]}, config={"eos_token_id": 5}, tokenizer_dir=lambda: None
    )
    for context, ends in ((_context(checkpoint=checkpoint), [2, 5, 7]), (_context(), [])):
        processor = sampling.build_min_tokens(context)
        add(processor, 4, SamplingParams(min_tokens=9))
        masked = torch.isinf(applied(processor, batch([4], [int(PROMPT_LENS[4])])))
        assert masked[0].nonzero()[:, 0].tolist() == ends


def test_a_cleared_list_has_no_entries() -> None:
    lists = RaggedRows(3)
    lists.set(0, np.array([5, 6]))
    lists.set(2, np.array([7]))
    lists.clear(0)
    which, (values,) = lists.expand(np.array([2, 0, 1, 2], dtype=np.int32))
    assert which.tolist() == [0, 3]
    assert values.tolist() == [7, 7]
