"""What is asked and when is a function of the seed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from enginectl.errors import UsageError
from enginectl.loadtest.arrivals import Level, Workload, make_requests

FIXED = Workload(model="m", input_len=12, output_len=5)


def test_poisson_arrivals_repeat_by_seed_and_have_the_rate() -> None:
    level = Level(rate=20.0)
    first, again, other = (make_requests(FIXED, level, 400, seed) for seed in ((1, 2), (1, 2), (1, 3)))
    assert first == again
    assert [one.arrival_s for one in first] != [one.arrival_s for one in other]
    gaps = np.diff([one.arrival_s for one in first])
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.2)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.25), "exponential gaps deviate by their mean"


def test_a_closed_loop_asks_at_once_and_no_prompt_twice() -> None:
    requests = make_requests(FIXED, Level(concurrency=4), 50, 0)
    assert {one.arrival_s for one in requests} == {0.0}
    bodies = [json.loads(one.body) for one in requests]
    assert len({tuple(body["prompt"]) for body in bodies}) == 50
    assert {len(body["prompt"]) for body in bodies} == {12}
    assert all(100 <= token < 900 for body in bodies for token in body["prompt"])
    assert {(body["max_tokens"], body["temperature"], body["ignore_eos"]) for body in bodies} == {(5, 0, True)}


def test_lognormal_lengths_have_the_median_and_fit_the_model() -> None:
    workload = Workload(model="m", input_len=100, output_len=50, lognormal_sigma=0.8, max_model_len=300)
    requests = make_requests(workload, Level(concurrency=1), 800, 0)
    prompts, outputs = np.array([(one.input_len, one.output_len) for one in requests]).T
    assert np.median(prompts) == pytest.approx(100, rel=0.1)
    assert np.median(outputs) == pytest.approx(50, rel=0.1)
    assert prompts.max() == 250, "room is left for the median output"
    assert (prompts + outputs).max() <= 300
    assert outputs.min() >= 1
    for one in requests[:20]:
        assert len(json.loads(one.body)["prompt"]) == one.input_len


def test_a_chat_has_words_and_further_fields_win() -> None:
    workload = Workload(model="m", input_len=9, output_len=5, api="chat", extra_body={"temperature": 0.5})
    body = json.loads(make_requests(workload, Level(concurrency=1), 1, 0)[0].body)
    assert len(body["messages"][0]["content"].split()) == 9
    assert body["temperature"] == 0.5


def test_what_cannot_fit_is_refused() -> None:
    workload = Workload(model="m", input_len=290, output_len=50, max_model_len=300)
    with pytest.raises(UsageError, match=r"290 prompt and 50 output tokens .* 300"):
        make_requests(workload, Level(concurrency=1), 1, 0)
