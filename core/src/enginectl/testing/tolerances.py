"""How far a result may be from the exact one, by the dtype it was computed in. One table for every numeric check."""

from __future__ import annotations

from typing import NamedTuple


class Tolerance(NamedTuple):
    """Bounds on |found - exact| <= atol + rtol * |exact|, for values of about unit size."""

    rtol: float
    atol: float


TOLERANCES: dict[str, Tolerance] = {
    "float32": Tolerance(rtol=1e-4, atol=1e-5),
    "float16": Tolerance(rtol=4e-3, atol=4e-3),
    "bfloat16": Tolerance(rtol=3e-2, atol=3e-2),
}
