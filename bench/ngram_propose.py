"""What proposing with prompt lookup costs a step, for 256 rows of 4,096 tokens.

    python bench/ngram_propose.py --json

Two kinds of text: random tokens, where nothing is found, and text that repeats, where every row gets its drafts. Each
step every row has one new token, or several (as after accepted drafts). Medians in microseconds over the steps.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from numpy.typing import NDArray

from enginectl.interfaces.speculator import DraftBatch
from enginectl.types import SamplingParams
from enginectl_spec_ngram.config import NgramConfig
from enginectl_spec_ngram.speculator import NgramSpeculator

VOCAB_SIZE, HEADROOM = 49152, 512


def text(kind: str, num_rows: int, length: int) -> NDArray[np.int32]:
    """Tokens [num_rows, length]."""
    random = np.random.default_rng(0)
    if kind == "random":
        return random.integers(0, VOCAB_SIZE, (num_rows, length), dtype=np.int32)
    pattern = random.integers(0, VOCAB_SIZE, (num_rows, 700), dtype=np.int32)
    return np.tile(pattern, (1, -(-length // 700)))[:, :length].copy()


def measure(kind: str, num_rows: int, length: int, new_tokens: int, num_steps: int) -> dict[str, float | str | int]:
    """Asked for once, a row is searched; asked again, it is indexed; then propose step after step."""
    config = NgramConfig()
    speculator = NgramSpeculator(config, max_num_seqs=num_rows, max_model_len=2 * length)
    tokens = text(kind, num_rows, 2 * length + 1 + config.num_speculative_tokens)
    rows = np.random.default_rng(1).permutation(num_rows).astype(np.int32)
    num_tokens = np.full(num_rows, length, np.int32)
    limit = np.full(num_rows, config.num_speculative_tokens, np.int32)
    for row in range(num_rows):
        speculator.add_row(row, tokens[row, :length], SamplingParams(max_tokens=HEADROOM))
    first_s = []
    for _ in range(2):
        started = time.perf_counter()
        speculator.propose(DraftBatch(rows, num_tokens, limit, tokens))
        first_s.append(time.perf_counter() - started)
    taken, given = [], 0
    for _ in range(min(num_steps, (HEADROOM - 1) // new_tokens)):
        num_tokens = num_tokens + np.int32(new_tokens)
        batch = DraftBatch(rows, num_tokens, limit, tokens)
        started = time.perf_counter()
        _, counts = speculator.propose(batch)
        taken.append(time.perf_counter() - started)
        given += int(counts.sum())
    return {
        "text": kind,
        "rows": num_rows,
        "tokens_a_row": length,
        "new_tokens_a_step": new_tokens,
        "median_us": round(float(np.median(taken)) * 1e6, 1),
        "fastest_us": round(min(taken) * 1e6, 1),
        "drafts_a_row": round(given / len(taken) / num_rows, 2),
        "searching_us_a_row": round(first_s[0] / num_rows * 1e6, 1),
        "indexing_us_a_row": round(first_s[1] / num_rows * 1e6, 1),
    }


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    found = [
        measure(kind, given.rows, given.tokens, new, given.steps) for kind in ("random", "repeating") for new in (1, 3)
    ]
    if given.json:
        print(json.dumps({"ngram_propose": found}, indent=2))
        return
    for row in found:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
