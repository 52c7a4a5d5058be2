"""How many drafts each row gets: as many as raise expected tokens per second, none where none do.

Two things are measured while the engine runs: what a step costs by its number of tokens, and how often drafts are
accepted, by row and position. Each step the most promising drafts are added while they raise

    expected tokens / (step time + drafting time)

over all rows together. Whatever is chosen, no token changes: verification decides what is kept. Nothing here reads a
clock; times are handed in, so decisions are reproducible from what was observed.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from enginectl.types import SamplingParams

IntRows = NDArray[np.int32]
Floats = NDArray[np.float64]

_ASSUMED_SLOPE = 0.1
"""Cost of one more token beside that of a step with none, where nothing was measured: right for a CPU."""

_RECENT = 9
_DECAY, _SHARED_DECAY, _PROBE_DECAY = 0.9, 0.98, 0.8
_IDLE_DECAY = 0.97
"""Of a position that was not tried while others of its row were: an unlucky start is forgotten."""
_PRIOR_WEIGHT = 2.0
_PRIOR_HITS, _PRIOR_TRIALS = 1.2, 2.0
_CAUTION = 0.9
"""While off, drafts must promise this much less than they do now, so that noise does not switch them on and off."""

_FIRST_RECHECK, _FIRST_PROBE = 8, 16
_SHORT_WAIT, _LONG_WAIT = 64, 256
"""Steps between two looks, or two probes, in the end: with few rows, and with very many."""
_PROBE_LENGTH = 2
_WIDE_PROBES = 8
_FIRST_REFRESH, _REFRESH = 32, 256
_SPREAD = 1.4
"""How far apart measured sizes must be to tell what a token costs."""


class StepCosts:
    """Seconds a decode step takes, by its tokens: medians of recent times where there are any, lines in between."""

    def __init__(self, max_tokens: int) -> None:
        exact = np.minimum(np.arange(max_tokens + 1), 8)
        wide = np.floor(np.log(np.maximum(np.arange(max_tokens + 1), 8) / 8) / np.log(1.25))
        self._bucket: list[int] = (exact + wide).astype(int).tolist()
        num_buckets = self._bucket[-1] + 1
        self._times: list[deque[float]] = [deque(maxlen=_RECENT) for _ in range(num_buckets)]
        self._sizes: list[deque[int]] = [deque(maxlen=_RECENT) for _ in range(num_buckets)]
        self._seen_at = [-1] * num_buckets
        self._passes: deque[float] = deque(maxlen=_RECENT)
        self._overheads: deque[float] = deque(maxlen=_RECENT)
        self._num_observed = 0
        self._points: tuple[Floats, Floats] | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of decodes and their drafts took so long, drafting and its overhead apart."""
        bucket = self._bucket[min(num_tokens, len(self._bucket) - 1)]
        if self._seen_at[bucket] < 0:
            self._times[bucket].clear()  # a stand-in
            self._sizes[bucket].clear()
        self._times[bucket].append(seconds)
        self._sizes[bucket].append(num_tokens)
        self._num_observed += 1
        self._seen_at[bucket] = self._num_observed
        self._points = None

    def observe_drafting(self, length: int, seconds: float) -> None:
        """Proposing up to `length` tokens took so long."""
        self._passes.append(seconds / length)

    def observe_overhead(self, num_tokens: int, seconds: float) -> None:
        """A step that had no drafts, but waited for them or was waited for, took so long, drafting apart."""
        bucket = self._bucket[min(num_tokens, len(self._bucket) - 1)]
        if self._seen_at[bucket] < 0:  # stands in for a plain step of this size until there is one
            self._times[bucket].append(seconds)
            self._sizes[bucket].append(num_tokens)
            self._points = None
            return
        self._overheads.append(seconds - float(self.estimate(np.array([float(num_tokens)]))[0]))

    @property
    def seconds_per_pass(self) -> float:
        """What one more token of the longest draft costs the speculator."""
        return _median(self._passes)

    @property
    def overhead(self) -> float:
        """What asking for drafts costs beside drafting: host work that no step runs beside, for one."""
        return max(_median(self._overheads), 0.0)

    def is_stale(self, num_tokens: int) -> bool:
        """Whether a step of this size has not been measured for long."""
        seen = self._seen_at[self._bucket[min(num_tokens, len(self._bucket) - 1)]]
        return seen < 0 or self._num_observed - seen > _REFRESH

    def estimate(self, num_tokens: Floats) -> Floats:
        """Seconds for steps of so many tokens, [n]; in units of the smallest step while nothing was measured."""
        sizes, times = self._measured()
        if not sizes.size:
            return 1.0 + _ASSUMED_SLOPE * num_tokens
        seconds = np.interp(num_tokens, sizes, times)
        base = times[0] / (1.0 + _ASSUMED_SLOPE * sizes[0])
        slope = base * _ASSUMED_SLOPE
        if sizes[-1] >= _SPREAD * sizes[0]:
            slope = (times[-1] - times[0]) / (sizes[-1] - sizes[0])
        below, above = sizes[0] - num_tokens, num_tokens - sizes[-1]
        seconds -= np.maximum(below, 0) * (base * _ASSUMED_SLOPE)
        seconds += np.maximum(above, 0) * slope
        return seconds

    def _measured(self) -> tuple[Floats, Floats]:
        """Sizes and times that were measured, ascending; more tokens never take less."""
        if self._points is None:
            some = [i for i, times in enumerate(self._times) if times]
            sizes = np.array([sum(self._sizes[i]) / len(self._sizes[i]) for i in some])
            times = np.array([_median(self._times[i]) for i in some])
            self._points = sizes, np.maximum.accumulate(times) if times.size else times
        return self._points


def _median(values: deque[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def _longest_wait(num_rows: int) -> int:
    """Steps to stay off without a look at the rows: the more there are, the dearer it is and the less one text matters."""
    return min(max(_SHORT_WAIT, 2 * num_rows), _LONG_WAIT)


class Acceptance:
    """How likely each row's next drafts are to be accepted, position by position, given that those before them were.

    A row's own record counts as soon as it has one; before that, and where it is old, what all rows had counts.
    """

    def __init__(self, max_num_seqs: int, max_drafts: int) -> None:
        self._hits = np.zeros((max_num_seqs, max_drafts))
        self._trials = np.zeros((max_num_seqs, max_drafts))
        self._shared_hits = np.zeros(max_drafts)
        self._shared_trials = np.zeros(max_drafts)
        self._supply = np.ones(max_num_seqs)
        self._shared_supply = 1.0
        self._position = np.arange(max_drafts)

    def open_row(self, row: int) -> None:
        """Somebody else has the row."""
        self._hits[row] = self._trials[row] = 0.0
        self._supply[row] = self._shared_supply

    def fade(self) -> None:
        """Rows' own records lose weight."""
        self._hits *= _PROBE_DECAY
        self._trials *= _PROBE_DECAY

    def observe(self, rows: IntRows, drafted: IntRows, accepted: IntRows) -> None:
        """These rows had so many drafts verified, of which so many were accepted."""
        right = self._position < accepted[:, None]
        tried = self._position < np.minimum(accepted + 1, drafted)[:, None]
        decay = np.where(tried, _DECAY, _IDLE_DECAY)
        self._trials[rows] = self._trials[rows] * decay + tried
        self._hits[rows] = self._hits[rows] * decay + right
        self._shared_trials = self._shared_trials * _SHARED_DECAY + tried.sum(0)
        self._shared_hits = self._shared_hits * _SHARED_DECAY + right.sum(0)

    def observe_supply(self, rows: IntRows, asked: IntRows, given: IntRows) -> None:
        """The speculator was asked for so many drafts and had so many."""
        share = given / asked
        self._supply[rows] += 0.1 * (share - self._supply[rows])
        self._shared_supply += 0.02 * (float(share.mean()) - self._shared_supply)

    def supply(self, rows: IntRows) -> Floats:
        """Share of the drafts asked for that the speculator has, [n]."""
        return self._supply[rows]

    def survival(self, rows: IntRows) -> Floats:
        """Probability that drafts up to and including each position are accepted, [n, max_drafts]; descending.

        A position that a row has no record of is taken to be half like the row's others, half like other rows'.
        """
        hits, trials = self._hits[rows], self._trials[rows]
        shared = (self._shared_hits + _PRIOR_HITS) / (self._shared_trials + _PRIOR_TRIALS)
        own = (hits.sum(1) + _PRIOR_WEIGHT * shared[0]) / (trials.sum(1) + _PRIOR_WEIGHT)
        prior = (shared + own[:, None]) / 2
        each = (hits + _PRIOR_WEIGHT * prior) / (trials + _PRIOR_WEIGHT)
        return np.cumprod(each, axis=1)


class SpeculationController:
    """Chooses draft lengths for the rows of a step and learns from what came of it."""

    def __init__(self, max_num_seqs: int, max_drafts: int, max_num_batched_tokens: int) -> None:
        self.costs = StepCosts(max_num_batched_tokens)
        self.acceptance = Acceptance(max_num_seqs, max_drafts)
        self._max_drafts = max_drafts
        self._budget = max_num_batched_tokens
        self._fixed = np.full(max_num_seqs, -1, np.int32)
        self._num_fixed = 0
        self._step = 0
        self._is_off = False
        self._stays_off = self._probes = False
        self._off_rows = 0
        self._off_busy = 0
        self._recheck_at = 0
        self._recheck_interval = _FIRST_RECHECK
        self._probe_at = 0
        self._probe_interval = _FIRST_PROBE
        self._probe_from = 0
        self._num_probes = 0
        self._refresh_at = _FIRST_REFRESH
        self.mean_length = 0.0
        """Chosen drafts a row, averaged over recent steps."""

    def open_row(self, row: int, params: SamplingParams) -> None:
        """A request takes the row: what it says about speculation holds."""
        self.acceptance.open_row(row)
        word = params.speculation
        self._fix(row, -1 if word == "auto" else 0 if isinstance(word, str) else min(word, self._max_drafts))

    def close_row(self, row: int) -> None:
        """Nobody has the row."""
        self._fix(row, -1)

    def _fix(self, row: int, length: int) -> None:
        self._num_fixed += int(length > 0) - int(self._fixed[row] > 0)
        self._fixed[row] = length

    # -- choosing ------------------------------------------------------------------------------------------------

    def is_off(self, num_rows: int, num_busy: int = 0) -> bool:
        """Whether nobody gets drafts in the next step, as far as that is known without a look at the rows.

        num_rows: those that sample in this step. num_busy: tokens of prompts that the next step is likely to hold.
        Called: once per step; `limits` after it, unless it is off.
        """
        self._step += 1
        self._stays_off = self._is_off and self._is_still_right(num_rows, num_busy)
        self._probes = self._stays_off and self._step >= self._probe_at
        if self._stays_off and not self._probes and not self._num_fixed:
            self.mean_length *= 0.95
            return True
        return False

    def limits(self, rows: IntRows, room: IntRows, num_busy: int = 0) -> IntRows:
        """Drafts for the next step of rows that sample in this one, [n] int32, at most room.

        room: [n] int32 drafts that may be of use. num_busy: as in `is_off`.
        """
        fixed = self._fixed[rows]
        is_auto = fixed < 0
        lengths = np.minimum(np.maximum(fixed, 0), room)
        if not is_auto.all():
            lengths = self._fit(lengths, num_busy)
        if is_auto.any() and (self._probes or not self._stays_off):
            lengths = self._choose(rows, room, lengths, is_auto, num_busy)
        self.mean_length += 0.05 * (int(lengths.sum()) / max(rows.size, 1) - self.mean_length)
        return lengths

    def _fit(self, lengths: IntRows, num_busy: int) -> IntRows:
        """Rows that insist on their length share what the token budget leaves."""
        left = max(self._budget - lengths.size - num_busy, 0)
        if int(lengths.sum()) > left:
            lengths = np.minimum(lengths, left // int((lengths > 0).sum()))
        return lengths

    def _is_still_right(self, num_rows: int, num_busy: int) -> bool:
        """Off was right a moment ago and the load has not fallen since."""
        if self._step >= self._recheck_at:
            return False
        return num_rows * 4 >= self._off_rows * 3 and num_busy * 2 >= self._off_busy

    def _choose(
        self, rows: IntRows, room: IntRows, lengths: IntRows, is_auto: NDArray[np.bool_], num_busy: int
    ) -> IntRows:
        auto = np.flatnonzero(is_auto)
        base = rows.size + int(lengths.sum()) + num_busy
        most = self._budget - base
        if most <= 0:
            self._turn_off(rows.size, num_busy)
            return lengths
        if not self._is_off and self._step >= self._refresh_at and self.costs.is_stale(base):
            self._refresh_at = self._step + _REFRESH
            return lengths  # one plain step, to know what it costs
        if self._probes:
            chosen = np.minimum(self._probe(auto.size, most), room[auto])
        else:
            chosen = self._best(rows[auto], room[auto], rows.size, base, most)
            if chosen.any():
                self._is_off = False
                self._probe_interval = _FIRST_PROBE
            else:
                self._turn_off(rows.size, num_busy)
        lengths = lengths.copy()
        lengths[auto] = chosen
        return lengths

    def _best(self, rows: IntRows, room: IntRows, num_rows: int, base: int, most: int) -> IntRows:
        """Lengths [n] of the rows that leave it to us, by marginal gain: the likeliest drafts first."""
        width = self._max_drafts
        gain = self.acceptance.survival(rows)  # [n, width]
        gain[np.arange(width) >= room[:, None]] = 0.0
        supply = np.repeat(self.acceptance.supply(rows), width)
        order = np.argsort(-gain.reshape(-1), kind="stable")[: min(most, gain.size)]
        likely = gain.reshape(-1)[order]
        supplied = supply[order]
        tokens = num_rows + np.cumsum(likely * supplied) * (_CAUTION if self._is_off else 1.0)
        seconds = self.costs.estimate(base + np.cumsum(supplied))
        passes = np.maximum.accumulate(order % width) + 1
        seconds += passes * self.costs.seconds_per_pass + self.costs.overhead
        rate = tokens / seconds
        best = int(rate.argmax())
        plain = num_rows / float(self.costs.estimate(np.array([float(base)]))[0])
        if not (rate[best] > plain and likely[best] > 0.0):
            return np.zeros(rows.size, np.int32)
        return np.bincount(order[: best + 1] // width, minlength=rows.size).astype(np.int32)

    def _turn_off(self, num_rows: int, num_busy: int) -> None:
        if not self._is_off:
            self._is_off = True
            self._recheck_interval = _FIRST_RECHECK
            self._probe_at = self._step + self._probe_interval
        self._off_rows, self._off_busy = num_rows, num_busy
        self._recheck_at = self._step + self._recheck_interval
        self._recheck_interval = min(2 * self._recheck_interval, _longest_wait(num_rows))

    def _probe(self, num_auto: int, most: int) -> IntRows:
        """A short draft for a few rows, each in its turn, to see whether things have changed: the text for the most part,
        and now and then, with half of the rows, what a larger step costs.
        """
        self._probe_at = self._step + self._probe_interval
        self._probe_interval = min(2 * self._probe_interval, _longest_wait(num_auto))
        self.acceptance.fade()
        is_wide = self._num_probes % _WIDE_PROBES == 0
        self._num_probes += 1
        length = min(_PROBE_LENGTH, self._max_drafts)
        count = min((num_auto + 1) // 2 if is_wide else 1 + num_auto // 16, most // length)
        lengths = np.zeros(num_auto, np.int32)
        lengths[(self._probe_from + np.arange(count)) % num_auto] = length
        self._probe_from += count
        return lengths

    # -- learning ------------------------------------------------------------------------------------------------

    def observe_step(self, num_tokens: int, num_drafts: int, seconds: float, drafting_s: float, longest: int) -> None:
        """A step of decodes with num_tokens, num_drafts of them drafts, took `seconds` in all, drafting_s of them to
        propose up to `longest` drafts for the next one.
        """
        if num_drafts:
            self.costs.observe(num_tokens, seconds - drafting_s - self.costs.overhead)
        elif longest:
            self.costs.observe_overhead(num_tokens, seconds - drafting_s)
        else:
            self.costs.observe(num_tokens, seconds)
        if longest:
            self.costs.observe_drafting(longest, drafting_s)

    def observe_proposals(self, rows: IntRows, asked: IntRows, given: IntRows) -> None:
        """What the speculator had for rows that were to get drafts."""
        some = asked > 0
        if some.any():
            self.acceptance.observe_supply(rows[some], asked[some], given[some])

    def observe_verified(self, rows: IntRows, drafted: IntRows, accepted: IntRows) -> None:
        """What verification said; while off, it was a probe, and says whether off is still right."""
        some = drafted > 0
        if some.any():
            self._recheck_at = self._step
            self.acceptance.observe(rows[some], drafted[some], accepted[some])
