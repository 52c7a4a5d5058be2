"""What a step costs: a + b * rows + c * tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginectl.errors import UsageError


class StepCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds of a step: base_ms + row_ms * rows + token_ms * tokens, which are those of all rows together."""

    base_ms: float
    row_ms: float = 0.0
    token_ms: float = 0.0

    def seconds(self, num_rows: int, num_tokens: int) -> float:
        """How long such a step takes."""
        return (self.base_ms + self.row_ms * num_rows + self.token_ms * num_tokens) / 1e3


def parse_cost(text: str) -> StepCost:
    """`BASE,ROW,TOKEN` in milliseconds, or a JSON file that `enginectl bench fit --output` wrote. Raises UsageError."""
    path = Path(text)
    if path.suffix == ".json" or path.is_file():
        return _read(path)
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--cost is {text!r}; give BASE,ROW,TOKEN in milliseconds, or a JSON file") from error
    if len(numbers) != 3 or min(numbers) < 0 or sum(numbers) <= 0 or not np.isfinite(numbers).all():
        raise UsageError(
            f"--cost is {text!r}; give BASE,ROW,TOKEN: three numbers, 0 or more and not all 0, such as 12,0.05,0.02"
        )
    return StepCost(*numbers)


def _read(path: Path) -> StepCost:
    try:
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, float])
        cost = StepCost(**{name: values[name] for name in StepCost.__struct_fields__})
    except OSError as error:
        raise UsageError(f"--cost {path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, KeyError) as error:
        raise UsageError(f"--cost {path}: expected an object with base_ms, row_ms and token_ms: {error}") from error
    if min(cost.base_ms, cost.row_ms, cost.token_ms) < 0:
        raise UsageError(f"--cost {path}: no part of the cost may be negative")
    return cost


def fit_cost(
    num_steps: Sequence[float], rows: Sequence[float], tokens: Sequence[float], seconds: Sequence[float]
) -> tuple[StepCost, float]:
    """The cost that explains what was timed best, no part negative, and the share of the variance it explains.

    num_steps, rows, tokens: of each measurement its steps, the rows in each of them, and the tokens in all.
    Relative errors count, so that long steps do not drown short ones. Raises UsageError for fewer than three.
    """
    if len(seconds) < 3:
        raise UsageError(f"{len(seconds)} measurements are too few to fit a cost to; 3 are needed at least")
    measured, steps = np.asarray(seconds, float), np.asarray(num_steps, float)
    table = np.stack([steps, steps * np.asarray(rows, float), np.asarray(tokens, float)], axis=1)
    found = _non_negative(table / measured[:, None], np.ones(measured.size))
    spread = float(((measured - measured.mean()) ** 2).sum())
    error = float(((measured - table @ found) ** 2).sum())
    explained = 1.0 - error / spread if spread > 0 else 1.0
    return StepCost(*(round(float(value) * 1e3, 6) for value in found)), explained


def _non_negative(table: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares without negative coefficients: of all choices of columns the best whose solution has none."""
    best, best_error = np.zeros(table.shape[1]), float("inf")
    for mask in range(1, 1 << table.shape[1]):
        columns = [i for i in range(table.shape[1]) if mask >> i & 1]
        values = np.linalg.lstsq(table[:, columns], wanted, rcond=None)[0]
        error = float(((table[:, columns] @ values - wanted) ** 2).sum())
        if (values >= 0).all() and error < best_error - 1e-12:
            best = np.zeros(table.shape[1])
            best[columns], best_error = values, error
    return best
