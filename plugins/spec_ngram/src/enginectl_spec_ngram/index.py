"""Where the n-grams of each row ended last: a hash table a row and length, updated in O(1) a token for all rows at once.

A row that is asked for seldom (speculation is off, and probes now and then) is searched instead: that costs less than to
enter all that it got in between, and nothing while it is not asked for.

A table is open addressing with linear probing over 64-bit entries: 31 bits of the n-gram's hash and the position behind
its last occurrence. Probing looks at a few neighbouring slots at once, so that a step is a fixed handful of array
operations. Two n-grams with the same 31 bits pass for one another; the caller compares tokens before it trusts a match.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntRows = NDArray[np.int32]
Words = NDArray[np.int64]
_Hashes = NDArray[np.uint64]

_WINDOW = 4
"""Slots looked at together; they share a cache line or two."""

_LONG = 64
"""A row this far behind is caught up on its own, so that a long prompt does not need room for every row's."""

_NEVER = -(1 << 30)
"""Number of tokens at which a row was asked for last, where it never was."""

_LOW = np.int64(0xFFFFFFFF)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class NgramIndex:
    """Rows of at most max_model_len tokens; n-grams of `shortest` to `longest` tokens.

    Memory is reserved for the longest rows and committed as rows grow: 64 bytes a token and row with four lengths.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, shortest: int, longest: int) -> None:
        self.lengths: IntRows = np.arange(shortest, longest + 1, dtype=np.int32)
        self._longest = longest
        self._size = _size_for(max_model_len)
        num = self.lengths.size
        self._tables = np.zeros((num, max_num_seqs, self._size), np.int64)
        self._flat = self._tables.reshape(-1)
        self._bases = (np.arange(num)[:, None] * max_num_seqs + np.arange(max_num_seqs)) * self._size
        self._mask = np.zeros(max_num_seqs, np.int64)
        self._num_indexed = np.zeros(max_num_seqs, np.int32)
        self._asked_at = np.full(max_num_seqs, _NEVER, np.int32)
        self._matches = np.zeros((num, max_num_seqs), np.int64)
        self._back: Words = np.arange(longest)[:, None]
        self._window = np.arange(_WINDOW)[:, None]

    def open_row(self, row: int, num_expected: int) -> None:
        """The row starts afresh and is expected to reach that many tokens (it may go beyond)."""
        self.close_row(row)
        self._mask[row] = min(_size_for(num_expected), self._size) - 1

    def close_row(self, row: int) -> None:
        """Forget the row."""
        if self._num_indexed[row]:
            self._tables[:, row, : self._mask[row] + 1] = 0
            self._num_indexed[row] = 0
        self._matches[:, row] = 0
        self._asked_at[row] = _NEVER

    def find(self, rows: IntRows, num_tokens: IntRows, token_ids: IntRows) -> tuple[Words, IntRows]:
        """The longest of each row's last n-grams that came before: the position behind its last earlier occurrence, [n],
        0 for none, and its length, [n]. token_ids: the whole matrix.
        """
        is_new = num_tokens - self._num_indexed[rows] > _LONG
        is_new &= num_tokens - self._asked_at[rows] > _LONG
        self._asked_at[rows] = num_tokens
        if not is_new.any():
            return self._look_up(rows, num_tokens, token_ids)
        start, length = np.zeros(rows.size, np.int64), np.zeros(rows.size, np.int32)
        for i in np.flatnonzero(is_new).tolist():
            start[i], length[i] = self._search(token_ids[rows[i], : num_tokens[i]])
        known = np.flatnonzero(~is_new)
        if known.size:
            start[known], length[known] = self._look_up(rows[known], num_tokens[known], token_ids)
        return start, length

    def _search(self, tokens: IntRows) -> tuple[int, int]:
        """Compare with all of the row. tokens: [n], those of the row."""
        best, shortest = (0, 0), int(self.lengths[0])
        ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
        for n in range(1, self._longest + 1):
            if n > 1:
                ends = ends[ends >= n]
                ends = ends[tokens[ends - n] == tokens[max(tokens.size - n, 0)]]
            if not ends.size:
                break
            if n >= shortest:
                best = int(ends[-1]), n
        return best

    def _look_up(self, rows: IntRows, num_tokens: IntRows, token_ids: IntRows) -> tuple[Words, IntRows]:
        matches = self._update(rows, num_tokens, token_ids)
        longest = matches.shape[0] - 1 - (matches > 0)[::-1].argmax(0)
        return matches[longest, np.arange(rows.size)], self.lengths[longest]

    def _update(self, rows: IntRows, num_tokens: IntRows, token_ids: IntRows) -> Words:
        """Bring rows up to num_tokens. Returns, [num_lengths, n], the position behind the last earlier occurrence of
        each row's last n-gram, 0 for none.
        """
        count = num_tokens - self._num_indexed[rows]
        if (count < 0).any() or (num_tokens > (self._mask[rows] + 1) // 2).any():
            count = self._restart(rows, num_tokens)
        if (count > _LONG).any():
            count = self._catch_up(rows, count, num_tokens, token_ids)
        if count.any():
            self._enter_new(rows, count, num_tokens, token_ids)
            self._num_indexed[rows] = num_tokens
        return self._matches[:, rows]

    def _restart(self, rows: IntRows, num_tokens: IntRows) -> IntRows:
        """Rows that outgrew their table, or lost tokens, are indexed again from the start."""
        known, room = self._num_indexed[rows], (self._mask[rows] + 1) // 2
        wrong = (num_tokens < known) | ((num_tokens > room) & (self._mask[rows] + 1 < self._size))
        for row, count in zip(rows[wrong].tolist(), num_tokens[wrong].tolist(), strict=True):
            self.open_row(row, 2 * count)
        return num_tokens - self._num_indexed[rows]

    def _catch_up(self, rows: IntRows, count: IntRows, num_tokens: IntRows, token_ids: IntRows) -> IntRows:
        """Enter all tokens but the last of rows that have very many new ones. Returns how many are left, [n]."""
        for i in np.flatnonzero(count > _LONG).tolist():
            positions = np.arange(num_tokens[i] - count[i], num_tokens[i] - 1, dtype=np.int64)
            hashes = self._hash(rows[i : i + 1], positions, token_ids)
            which, at = np.nonzero(positions + 1 >= self.lengths[:, None])
            mask = np.broadcast_to(self._mask[rows[i]], which.shape)
            self._exchange(self._bases[which, rows[i]], hashes[which, at], mask, positions[at], many=True)
        return np.where(count > _LONG, 1, count)

    def _enter_new(self, rows: IntRows, count: IntRows, num_tokens: IntRows, token_ids: IntRows) -> None:
        """Enter the last tokens of each row, and note what the very last n-grams replace: their earlier occurrence."""
        single = int(count.max()) == int(count.min()) == 1
        if single:
            owner, positions = rows, num_tokens.astype(np.int64) - 1
        else:
            owner = np.repeat(rows, count)
            shift = np.repeat(num_tokens - np.cumsum(count), count)
            positions = np.arange(owner.size) + shift
        hashes = self._hash(owner, positions, token_ids)
        exists = positions + 1 >= self.lengths[:, None]
        bases, mask = self._bases[:, owner], np.broadcast_to(self._mask[owner], hashes.shape)
        at = np.broadcast_to(positions, hashes.shape)
        if exists.all():
            flat = bases.reshape(-1), hashes.reshape(-1), mask.reshape(-1), at.reshape(-1)
            found = self._exchange(*flat, many=not single).reshape(hashes.shape)
        else:
            found = np.zeros(hashes.shape, np.int64)
            found[exists] = self._exchange(bases[exists], hashes[exists], mask[exists], at[exists], many=not single)
        if single:
            self._matches[:, rows] = found
            return
        some = count > 0
        last = np.cumsum(count)[some] - 1
        self._matches[:, rows[some]] = found[:, last]
        repeated = (hashes == hashes[:, np.repeat(last, count[some])]) & exists
        repeated[:, last] = False
        which, column = np.nonzero(repeated)  # it came among the new tokens; the latest is assigned last
        self._matches[which, owner[column]] = positions[column] + 1

    def _hash(self, rows: IntRows, positions: Words, token_ids: IntRows) -> _Hashes:
        """[num_lengths, n] hashes of the n-grams that end at these positions."""
        tokens = token_ids[rows, np.maximum(positions - self._back, 0)].astype(np.uint64)  # [longest, n], last first
        tokens += np.uint64(1)
        out = np.empty((self.lengths.size, positions.size), np.uint64)
        running = np.zeros(positions.size, np.uint64)
        first = int(self.lengths[0])
        for n in range(1, self._longest + 1):
            running += tokens[n - 1]
            running *= _MULTIPLIER
            if n >= first:
                out[n - first] = running
        out ^= out >> np.uint64(32)
        out *= _MULTIPLIER
        out ^= out >> np.uint64(31)
        return out

    def _exchange(self, bases: Words, hashes: _Hashes, mask: Words, positions: Words, *, many: bool = False) -> Words:
        """Put entries into their slots; returns the positions behind what they replaced, 0 for none.

        many: several entries may go to one table. Equal n-grams look at the same slots in the same rounds, so the last
        one written, the latest, stays.
        """
        tags = (hashes >> np.uint64(33)).view(np.int64)
        slots = hashes.view(np.int64) & mask
        entries = (tags << 32) | (positions + 1)
        found = self._round(bases, slots, mask, tags, entries, many)
        left = np.flatnonzero(found < 0)
        while left.size:
            slots[left] = slots[left] - found[left]  # negative: how far to go on
            part = self._round(bases[left], slots[left] & mask[left], mask[left], tags[left], entries[left], many)
            found[left] = part
            left = left[part < 0]
        return found

    def _round(
        self, bases: Words, slots: Words, mask: Words, tags: Words, entries: Words, many: bool
    ) -> NDArray[np.int64]:
        """Try a window of slots. Returns the positions replaced, or minus the number of slots to skip, [n]."""
        at = ((slots + self._window) & mask) + bases  # [window, n]
        seen = self._flat[at]
        usable = seen >> 32 == tags
        usable |= seen == 0
        step = usable.argmax(0)
        column = np.arange(slots.size)
        fits = usable[step, column]
        target = at[step, column]
        result: Words = seen[step, column] & _LOW
        if fits.all():
            self._flat[target] = entries
        else:
            self._flat[target[fits]] = entries[fits]
            result[~fits] = -_WINDOW
        if many:  # another n-gram may have taken the slot in the same round
            lost = fits & (self._flat[target] >> 32 != tags)
            result[lost] = -(step[lost] + 1)
        return result


def _size_for(num_tokens: int) -> int:
    """A power of two, at least twice the tokens."""
    return max(64, 1 << (2 * num_tokens - 1).bit_length())
