"""What an engine says about its drafts: counters by position, the chosen length, a line a minute in the log."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginectl import Engine, SamplingParams
from enginectl.testing.toys import AnswerSpeculator

NUM_DRAFTS = 3


class Adaptive(AnswerSpeculator):
    """Its draft lengths are chosen by the controller, where a request leaves that to it."""

    is_adaptive = True


def test_drafts_are_counted_by_position_and_reported(
    tiny: Callable[[str], Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right in two of three positions of the output, so that the third draft of a row is kept least often."""
    monkeypatch.setattr("enginectl.engine.core_loop._REPORT_INTERVAL_S", 0.0)
    caplog.set_level(logging.INFO, "enginectl.engine")
    common: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "only_plugins": True, "max_num_seqs": 4}
    prompts = np.random.default_rng(1).integers(3, 250, (4, 12)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with Engine(str(tiny("llama")), **common) as engine:
        plain = engine.generate(prompts, params)
        assert engine.stats().drafted_by_position == ()
    answers = {tuple(p): one.outputs[0].token_ids for p, one in zip(prompts, plain, strict=True)}
    toy = Adaptive(answers, max_drafts=NUM_DRAFTS, spoil=lambda position: position % 3 == 2)
    fixed = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, speculation=NUM_DRAFTS)
    with Engine(str(tiny("llama")), speculator=toy, **common) as engine:
        engine.generate(prompts, fixed)
        stats = engine.stats()
    drafted, accepted = stats.drafted_by_position, stats.accepted_by_position
    assert len(drafted) == len(accepted) == NUM_DRAFTS
    assert (sum(drafted), sum(accepted)) == (stats.num_drafted, stats.num_accepted)
    assert drafted[0] >= drafted[1] >= drafted[2] > 0
    assert drafted[0] >= accepted[0] >= accepted[1] > accepted[2]
    assert 0.5 < stats.draft_length <= NUM_DRAFTS
    lines = [line for line in caplog.messages if line.startswith("speculation:")]
    found = [
        re.match(r"speculation: (\d+) of (\d+) drafts accepted \(\d+ %\); \d\.\d drafts a row now", line)
        for line in lines
    ]
    assert found
    assert all(found)
    reported = [sum(int(match[group]) for match in found if match) for group in (1, 2)]
    assert 0 < reported[0] < reported[1] <= stats.num_drafted
