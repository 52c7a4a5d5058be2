"""Models that cannot run packed: by its route each says what the library's own generation says, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from enginectl.builtin.attention_torch import TorchAttention
from enginectl.builtin.transformers_family.family import TransformersFamily
from enginectl.builtin.transformers_family.model import TransformersModel
from enginectl.builtin.transformers_family.self_check import self_check
from enginectl.builtin.transformers_family.states import PLACES, StatePool
from enginectl.builtin.weights.safetensors import SafetensorsCheckpoint
from enginectl.context import BuildContext
from enginectl.errors import ModelError
from enginectl.interfaces.model import ForwardInput
from enginectl.testing.architectures import ARCHITECTURES, ONE_BY_ONE, SOME_BY_ROUTE, STATES
from enginectl.testing.attention import context_for, layer_spec
from enginectl.testing.greedy import allocate, greedy_decode
from enginectl.testing.paging import Pages
from enginectl.testing.tiny_models import VOCAB_SIZE, save_tiny_model, tiny_model

PROMPT_LENGTHS = (3, 1, 21, 6)
NUM_NEW = 14
STATE_POOL, ONE_SEQUENCE = SOME_BY_ROUTE[STATES], SOME_BY_ROUTE[ONE_BY_ONE]
EVERY = sorted((*STATE_POOL, *ONE_SEQUENCE))
WHOLE = {name for name, each in ARCHITECTURES.items() if each.whole_prompts}
Loaded = Callable[[str], TransformersModel]


def context() -> BuildContext:
    ctx = context_for([layer_spec()], block_size=4, device="cpu", dtype="float32")
    return ctx.with_(engine=msgspec.structs.replace(ctx.engine, max_model_len=256))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """`loaded(name)` is the model as the family serves it, made once."""

    @cache
    def load(name: str) -> TransformersModel:
        directory = save_tiny_model(name, tmp_path_factory.mktemp(name))
        return TransformersFamily().load(SafetensorsCheckpoint(directory), context())

    return load


def prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(7)
    return [torch.randint(250, (length,), generator=random).tolist() for length in PROMPT_LENGTHS]


@cache
def generated(name: str) -> list[list[int]]:
    """What the library's own generation says, one prompt at a time."""
    model = tiny_model(name)
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_NEW, pad_token_id=0
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def attention_for(model: TransformersModel, block_size: int = 4) -> TorchAttention:
    return TorchAttention(model.spec.layers, block_size=block_size, device="cpu", dtype=torch.float32)


def decoded(model: TransformersModel, *, chunk: int | None, block_size: int = 4) -> list[list[int]]:
    attention = attention_for(model, block_size)
    return greedy_decode(model, attention, prompts(), num_new=NUM_NEW, chunk=chunk, block_size=block_size)


@pytest.mark.parametrize("name", EVERY)
def test_greedy_equals_generate(name: str, loaded: Loaded) -> None:
    """Law 1: whatever shares the step and however prompts are cut."""
    model = loaded(name)
    assert model.route == ("state pool" if name in STATE_POOL else "one sequence per forward")
    assert model.spec.takes_chunks == (name not in WHOLE)
    expected = generated(name)
    least = 2 if name == "xglm" else NUM_NEW // 2  # that one has favourites, but see what a lost page does to it
    assert len({token for row in expected for token in row}) > least, "the model repeats itself and proves nothing"
    for chunk, block_size in ((None, 4), (3, 1), (5, 16)):
        if chunk is None or model.spec.takes_chunks:
            assert decoded(model, chunk=chunk, block_size=block_size) == expected


@pytest.mark.parametrize("name", EVERY)
def test_spec_from_the_config_is_that_of_the_loaded_model(name: str, loaded: Loaded) -> None:
    """The pool is sized before a weight is read."""
    model = loaded(name)
    checkpoint = SafetensorsCheckpoint(Path(str(model.module.config._name_or_path)))
    assert TransformersFamily().spec(checkpoint, context()) == model.spec
    assert (model.spec.state_bytes_per_row > 0) == (name in STATE_POOL)


def test_states_are_counted() -> None:
    """All places of a row, convolution and scan, of every layer that has them."""
    config = tiny_model("mamba2").config
    width = config.expand * config.hidden_size
    conv = (width + 2 * config.n_groups * config.state_size) * config.conv_kernel
    scan = config.num_heads * config.head_dim * config.state_size
    assert spec_of("mamba2").state_bytes_per_row == PLACES * 4 * config.num_hidden_layers * (conv + scan)


def spec_of(name: str) -> msgspec.Struct:
    config = tiny_model(name).config.to_dict()
    checkpoint = SafetensorsCheckpoint.__new__(SafetensorsCheckpoint)
    checkpoint.path, checkpoint.config = Path("somewhere"), config
    return TransformersFamily().spec(checkpoint, context())


class Steps:
    """Steps by hand over one store: (row, tokens) each, token `5 + position` everywhere."""

    def __init__(self, model: TransformersModel, num_rows: int = 3) -> None:
        self.model = model
        self.attention = attention_for(model)
        self.pages = Pages(block_size=4, num_blocks=40)
        store = allocate(model.spec, num_blocks=40, block_size=4, dtype=torch.float32, device="cpu")
        self.attention.bind(store)
        model.use_attention(self.attention)
        model.bind(store, num_rows)

    def plan(self, *work: tuple[int, int], rows: list[int] | None = None) -> ForwardInput:
        """work: sequence and tokens."""
        first = np.array([self.pages.num_tokens(s) for s, _ in work])
        batch = self.pages.advance(work)
        positions = torch.cat([torch.arange(n) + int(c) for c, (_, n) in zip(first, work, strict=True)])
        return ForwardInput(
            positions % 200 + 5,
            positions,
            torch.arange(batch.num_tokens),
            self.attention.prepare(batch),
            batch=batch,
            rows=np.array(rows or [s for s, _ in work], np.int32),
        )

    def run(self, step: ForwardInput) -> torch.Tensor:
        with torch.inference_mode():
            return self.model.logits(self.model.forward(step))


@pytest.mark.parametrize("name", EVERY)
def test_a_step_can_be_run_again(name: str, loaded: Loaded) -> None:
    """Law 14a: a step that raised after its forward is run again, and the one behind it; rows go on from where they
    were.
    """
    model = loaded(name)
    steps = Steps(model)
    steps.run(steps.plan((0, 4), (1, 6)))
    one, other = steps.plan((0, 1), (1, 1)), steps.plan((0, 1), (1, 1))
    first, second = steps.run(one), steps.run(other)
    for _ in range(2):
        assert torch.equal(steps.run(one), first)
        assert torch.equal(steps.run(other), second)
    plain = Steps(model)
    plain.run(plain.plan((0, 4), (1, 6)))
    for _ in range(2):
        plain.run(plain.plan((0, 1), (1, 1)))
    torch.testing.assert_close(
        steps.run(steps.plan((0, 1), (1, 1))), plain.run(plain.plan((0, 1), (1, 1))), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "lfm2"])
def test_a_row_starts_from_nothing_whoever_held_it(name: str, loaded: Loaded) -> None:
    """A request that follows an abort, or comes back after a preemption, finds no state of the row's last holder."""
    model = loaded(name)
    fresh = Steps(model)
    expected = [fresh.run(fresh.plan((0, 5))), fresh.run(fresh.plan((0, 1)))]
    used = Steps(model)
    used.run(used.plan((1, 7), rows=[2]))
    used.run(used.plan((1, 1), rows=[2]))
    found = [used.run(used.plan((0, 5), rows=[2])), used.run(used.plan((0, 1), rows=[2]))]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_state_that_is_not_there_is_not_invented(loaded: Loaded) -> None:
    """Tokens of a row that nobody computed raise; they are never counted as seen."""
    steps = Steps(loaded("mamba2"))
    steps.run(steps.plan((0, 4)))
    steps.plan((0, 2))  # never run
    with pytest.raises(RuntimeError, match="row 0 has no state after 6 tokens"):
        steps.run(steps.plan((0, 1)))


def test_prompts_that_must_be_whole_raise_in_parts(loaded: Loaded) -> None:
    """Never wrong in silence."""
    steps = Steps(loaded("jamba"))
    steps.run(steps.plan((0, 4)))
    with pytest.raises(RuntimeError, match="reads prompts whole"):
        steps.run(steps.plan((0, 4)))


@pytest.mark.parametrize("name", sorted(STATE_POOL))
def test_a_lost_state_changes_tokens(name: str, loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 1: these models can fail."""
    model = loaded(name)
    lend = StatePool.lend

    def forget(pool: StatePool, rows: np.ndarray, num_computed: np.ndarray) -> None:
        lend(pool, rows, num_computed)
        for layer in pool._layers:
            for states in (layer.conv_states, layer.recurrent_states):
                for state in states.values():
                    if state is not None:
                        state.zero_()

    monkeypatch.setattr(StatePool, "lend", forget)
    assert decoded(model, chunk=None) != generated(name)
    with pytest.raises(ModelError, match="differ by"):
        self_check(model, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("name", sorted(ONE_SEQUENCE))
def test_a_lost_page_changes_tokens(name: str, loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 1: these models can fail."""
    from enginectl.builtin.transformers_family.pages import PagedLayer

    model = loaded(name)
    through = PagedLayer._through

    def lose(layer: PagedLayer, pages: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        known = through(layer, pages, new)
        return torch.cat((known[:, :, :1] * 0, known[:, :, 1:]), dim=2)

    monkeypatch.setattr(PagedLayer, "_through", lose)
    assert decoded(model, chunk=None) != generated(name)
    with pytest.raises(ModelError, match="differ by"):
        self_check(model, device="cpu", dtype=torch.float32)


def test_chunks_of_a_model_that_reads_whole_prompts_are_noticed(loaded: Loaded) -> None:
    """The self-check would refuse one that is not known to."""
    model = loaded("jamba")
    spec = model.spec
    model.spec = msgspec.structs.replace(spec, takes_chunks=True)
    try:
        with pytest.raises(ModelError, match="differ by"):
            self_check(model, device="cpu", dtype=torch.float32)
    finally:
        model.spec = spec


@pytest.mark.parametrize("name", ["qwen3_next", "bloom"])
def test_what_is_kept_comes_in_the_order_asked(name: str, loaded: Loaded) -> None:
    """Rows of several forwards, hidden states and fp32 logits, in any order, or none."""
    steps = Steps(loaded(name))
    steps.run(steps.plan((0, 3), (2, 2)))
    step = steps.plan((0, 1), (2, 1), (1, 4))
    whole = steps.run(step)
    assert whole.shape == (6, VOCAB_SIZE)
    step.keep = torch.tensor([5, 0, 3, 1])
    torch.testing.assert_close(steps.run(step), whole[[5, 0, 3, 1]], rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        kept = steps.model.forward(step)
    assert kept.hidden is not None
    assert kept.hidden.shape == (4, steps.model.spec.hidden_size)
    step.keep = torch.tensor([], dtype=torch.long)
    assert steps.run(step).shape == (0, VOCAB_SIZE)


def test_linears_are_offered_but_those_that_see_other_rows(loaded: Loaded) -> None:
    """An adapter's part is laid out by the tokens of a step; doge's dt_proj is given all tokens so far."""
    found = {name for site in loaded("doge").linear_sites() for name in site.modules}
    assert "model.layers.0.self_attn.v_proj" in found
    assert not [name for name in found if name.endswith("dt_proj")]
    assert not [name for name in found if "lm_head" in name]
    assert "model.layers.0.linear_attn.out_proj" in {
        name for site in loaded("qwen3_next").linear_sites() for name in site.modules
    }
