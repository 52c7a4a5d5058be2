"""Law 2 without a seed: what three tokens in a row are together, through the whole engine, whatever was drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from enginectl import Engine, SamplingParams
from enginectl.engine.verify import verify
from enginectl.interfaces.speculator import DraftBatch, Speculator
from enginectl.testing.sampler import chi_square_limit
from enginectl.testing.tiny_models import save_tiny_model
from enginectl.testing.toys import ConstantSpeculator, Drafts
from enginectl.types import EngineStats

VOCAB, NUM_DRAWS, NUM_DRAFTS = 8, 4000, 3
PROMPT = [1, 3, 2]
PARAMS = SamplingParams(temperature=3.0, max_tokens=5, ignore_eos=True)
Tokens = NDArray[np.int64]
Floats = NDArray[np.float64]


class OracleSpeculator(Speculator):
    """Knows what each request will say, in the order in which they are admitted. offset: added to every draft."""

    max_drafts = NUM_DRAFTS
    is_adaptive = False

    def __init__(self, answers: Tokens, offset: int) -> None:
        self._answers = np.concatenate((answers, np.zeros((len(answers), NUM_DRAFTS), np.int64)), 1)
        self._offset = offset
        self._rows = np.zeros(len(answers), np.int64)
        self._num_added = 0

    def add_row(self, row: int, token_ids: NDArray[np.int32], params: SamplingParams) -> None:
        """The next request."""
        assert len(token_ids) == len(PROMPT), "nobody is preempted here"
        self._rows[row] = self._num_added
        self._num_added += 1

    def remove_row(self, row: int) -> None:
        """Nothing is held."""

    def propose(self, batch: DraftBatch) -> Drafts:
        """All right, or all wrong."""
        at = (batch.num_tokens - len(PROMPT))[:, None] + np.arange(NUM_DRAFTS)
        drafts = (self._answers[self._rows[batch.rows][:, None], at] + self._offset) % VOCAB
        return drafts.astype(np.int32), batch.limit


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 5, "pad_token_id": 4}
    path = tmp_path_factory.mktemp("small") / "model"
    return save_tiny_model("llama", path, tokenizer=False, num_hidden_layers=1, **changes)


@pytest.fixture(scope="module")
def joint(small: Path) -> Floats:
    """Probability of each run of three tokens, by transformers alone."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32).eval()
    runs = torch.cartesian_prod(*[torch.arange(VOCAB)] * 3)
    ids = torch.cat([torch.tensor([PROMPT]).expand(len(runs), -1), runs], 1)
    with torch.inference_mode():
        logs = (module(ids).logits / PARAMS.temperature).double().log_softmax(-1)[:, len(PROMPT) - 1 : -1]
    found: Floats = logs.gather(2, runs[:, :, None]).sum((1, 2)).exp().numpy()
    assert abs(found.sum() - 1) < 1e-6
    return found


def drawn(small: Path, speculator: Speculator | None, depth: int) -> tuple[Tokens, EngineStats]:
    """NUM_DRAWS unseeded answers, all tokens of them."""
    with Engine(
        str(small), speculator=speculator, seed=1, max_num_seqs=500, max_num_batched_tokens=4096, dtype="float32",
        max_model_len=16, num_threads=1, only_plugins=True, overlap_depth=depth,
    ) as engine:  # fmt: skip
        outputs = engine.generate([PROMPT] * NUM_DRAWS, [PARAMS] * NUM_DRAWS)
        return np.array([output.outputs[0].token_ids for output in outputs]), engine.stats()


def chi_square(tokens: Tokens, joint: Floats) -> tuple[float, float]:
    """Of the first three tokens against the joint distribution, rare runs taken together; and what it may be."""
    counts = np.bincount(tokens[:, :3] @ [VOCAB**2, VOCAB, 1], minlength=VOCAB**3)
    expected = joint * NUM_DRAWS
    rare = expected < 8
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    assert expected.size > 40, "many runs are told apart"
    return float(((observed - expected) ** 2 / expected).sum()), chi_square_limit(expected.size - 1)


@pytest.fixture(scope="module")
def plain(small: Path) -> Tokens:
    return drawn(small, None, 0)[0]


DRAFTS = ("wrong", "right", "duplicates")


def speculator_of(drafts: str, plain: Tokens) -> Speculator:
    if drafts == "duplicates":
        return ConstantSpeculator(2, NUM_DRAFTS)
    return OracleSpeculator(plain, offset=int(drafts == "wrong"))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_unseeded_output_has_the_joint_distribution(
    drafts: str, depth: int, small: Path, joint: Floats, plain: Tokens
) -> None:
    """Law 2: drafts that are never right, always right, or one token again and again."""
    tokens, stats = drawn(small, speculator_of(drafts, plain), depth)
    assert stats.num_drafted > NUM_DRAWS
    least, most = {"wrong": (0.0, 0.0), "right": (1.0, 1.0), "duplicates": (0.01, 0.5)}[drafts]
    assert least <= stats.num_accepted / stats.num_drafted <= most
    found, limit = chi_square(tokens, joint)
    assert found < limit


@pytest.mark.parametrize("depth", [0, 1])
def test_a_verifier_that_favours_drafts_is_noticed(
    depth: int, small: Path, joint: Floats, plain: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant takes one wrong draft in eight."""

    def biased(sampled: Any, widths: Any, proposed: Any) -> Any:
        tokens, num_new = verify(sampled, widths, proposed)
        wrong = np.nonzero((widths > 1) & (num_new == 1))[0][::8]
        tokens[wrong, 0] = proposed[wrong, 0]
        return tokens, num_new

    monkeypatch.setattr("enginectl.engine.sampling.verify", biased)
    tokens, _ = drawn(small, speculator_of("duplicates", plain), depth)
    found, limit = chi_square(tokens, joint)
    assert found > limit
