"""Conformance of speculators: `class TestMine(SpeculatorConformance)` with its own `make_speculator` fixture.

That a draft never changes a token is core's part (`enginectl.testing.speculation_laws` checks both together).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from enginectl.interfaces.speculator import DraftBatch, Speculator
from enginectl.types import SamplingParams

MakeSpeculator = Callable[[int, int], Speculator]
Matrix = NDArray[np.int32]

NUM_ROWS = 6


class SpeculatorConformance:
    """What every speculator must do.

    make_speculator: the fixture to override, `make_speculator(max_num_seqs, max_model_len) -> Speculator`, bound to
    pages if it has layers of its own. vocab_size, max_model_len: what it is made for.
    """

    vocab_size = 40
    max_model_len = 96

    @pytest.fixture
    def make_speculator(self) -> MakeSpeculator:
        raise NotImplementedError("override make_speculator in the subclass")

    def test_limits_are_honoured(self, make_speculator: MakeSpeculator) -> None:
        speculator, matrix = self.filled(make_speculator)
        random = np.random.default_rng(1)
        some = 0
        for length in range(60, 80):
            limits = random.integers(0, speculator.max_drafts + 1, NUM_ROWS)
            drafts = self.propose(speculator, matrix, range(NUM_ROWS), [length] * NUM_ROWS, limits.tolist())
            assert all(len(row) <= limit for row, limit in zip(drafts, limits.tolist(), strict=True))
            some += sum(map(len, drafts))
        assert some > 0, "repeated tokens give it something to propose"

    def test_drafts_are_tokens(self, make_speculator: MakeSpeculator) -> None:
        speculator, matrix = self.filled(make_speculator)
        most = [speculator.max_drafts] * NUM_ROWS
        for length in range(60, 70):
            for row in self.propose(speculator, matrix, range(NUM_ROWS), [length] * NUM_ROWS, most):
                assert all(0 <= token < self.vocab_size for token in row)

    def test_proposals_are_a_function_of_the_rows(self, make_speculator: MakeSpeculator) -> None:
        """Not of chance, nor of the order or number of rows in a batch, nor of steps that were left out."""
        speculator, matrix = self.filled(make_speculator)
        other, copy = self.filled(make_speculator)
        most = [speculator.max_drafts] * NUM_ROWS
        turned = list(range(NUM_ROWS))[::-1]
        for length in (60, 61, 64, 70, 71):
            first = self.propose(speculator, matrix, range(NUM_ROWS), [length] * NUM_ROWS, most)
            assert self.propose(other, copy, turned, [length] * NUM_ROWS, most)[::-1] == first
        third, single = self.filled(make_speculator)
        for row in range(NUM_ROWS):
            assert self.propose(third, single, [row], [71], most[:1]) == first[row : row + 1]

    def test_a_row_that_is_taken_again_starts_afresh(self, make_speculator: MakeSpeculator) -> None:
        speculator, matrix = self.filled(make_speculator)
        most = [speculator.max_drafts]
        self.propose(speculator, matrix, range(NUM_ROWS), [60] * NUM_ROWS, most * NUM_ROWS)
        fresh, copy = make_speculator(NUM_ROWS, self.max_model_len), matrix.copy()
        # Tokens that came before, each once: nothing in the new row is a repetition.
        tokens = np.array(list(dict.fromkeys(matrix[2, :50].tolist())), np.int32)
        length = tokens.size
        for one, rows in ((speculator, matrix), (fresh, copy)):
            if one is speculator:
                one.remove_row(2)
            rows[2, :length] = tokens
            one.add_row(2, tokens, SamplingParams())
        mine = self.propose(speculator, matrix, [2], [length], most)
        assert mine == self.propose(fresh, copy, [2], [length], most)

    def test_verified_tokens_are_left_alone(self, make_speculator: MakeSpeculator) -> None:
        speculator, matrix = self.filled(make_speculator)
        before = matrix.copy()
        self.propose(speculator, matrix, range(NUM_ROWS), [60] * NUM_ROWS, [speculator.max_drafts] * NUM_ROWS)
        assert (matrix[:, :60] == before[:, :60]).all()

    def test_the_shortest_and_the_longest_rows(self, make_speculator: MakeSpeculator) -> None:
        speculator = make_speculator(2, self.max_model_len)
        matrix = self.tokens(speculator)[:2].copy()
        speculator.add_row(0, matrix[0, :1], SamplingParams(max_tokens=1))
        speculator.add_row(1, matrix[1, : self.max_model_len - 1], SamplingParams())
        most = speculator.max_drafts
        drafts = self.propose(speculator, matrix, [0, 1], [1, self.max_model_len - 1], [most, 1])
        assert len(drafts[0]) <= most
        assert len(drafts[1]) <= 1

    def test_nobody_wants_any(self, make_speculator: MakeSpeculator) -> None:
        speculator, matrix = self.filled(make_speculator)
        none = [0] * NUM_ROWS
        assert self.propose(speculator, matrix, range(NUM_ROWS), [60] * NUM_ROWS, none) == [[]] * NUM_ROWS

    # -- helpers -------------------------------------------------------------------------------------------------

    def tokens(self, speculator: Speculator) -> Matrix:
        """Rows that repeat themselves, each with a period of its own, with a stray token here and there."""
        random = np.random.default_rng(0)
        width = self.max_model_len + 1 + speculator.max_drafts
        rows = [
            np.resize(random.integers(0, self.vocab_size, period), width) for period in range(5, 5 + 3 * NUM_ROWS, 3)
        ]
        matrix = np.array(rows, dtype=np.int32)
        stray = random.random(matrix.shape) < 0.05
        matrix[stray] = random.integers(0, self.vocab_size, int(stray.sum()))
        return matrix

    def filled(self, make_speculator: MakeSpeculator) -> tuple[Speculator, Matrix]:
        """All rows taken, with 50 tokens each at first, and the token matrix."""
        speculator = make_speculator(NUM_ROWS, self.max_model_len)
        matrix = self.tokens(speculator)
        for row in range(NUM_ROWS):
            speculator.add_row(row, matrix[row, :50], SamplingParams())
        return speculator, matrix

    def propose(
        self,
        speculator: Speculator,
        matrix: Matrix,
        rows: Sequence[int],
        num_tokens: Sequence[int],
        limits: Sequence[int],
    ) -> list[list[int]]:
        """Each row's drafts. Proposals may use what lies behind a row as scratch; the text is put back."""
        before = matrix.copy()
        batch = DraftBatch(np.array(rows, np.int32), np.array(num_tokens, np.int32), np.array(limits, np.int32), matrix)
        drafts, counts = speculator.propose(batch)
        assert drafts.shape == (len(rows), speculator.max_drafts)
        assert counts.shape == (len(rows),)
        assert drafts.dtype == counts.dtype == np.int32
        assert (counts >= 0).all()
        for row, length in zip(rows, num_tokens, strict=True):
            matrix[row, length:] = before[row, length:]
        return [row[:count].tolist() for row, count in zip(drafts, counts.tolist(), strict=True)]
