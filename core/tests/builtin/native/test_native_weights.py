"""Every tensor of a checkpoint has one place, and every place is filled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from enginectl.builtin.native.config import structure_of
from enginectl.builtin.native.weights import Loader
from enginectl.errors import ModelError
from enginectl.interfaces.ops import BlockWeights
from enginectl.interfaces.weights import Checkpoint


class Stored(Checkpoint):
    """Tensors in memory, in the order given."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.path = Path("somewhere")
        self.config = config
        self.weights = tensors

    @property
    def dtype(self) -> str:
        return "float32"

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weights.values())

    @property
    def generation_config(self) -> dict[str, Any]:
        return {}

    def tokenizer_dir(self) -> Path | None:
        return None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()


@pytest.fixture(scope="module")
def stored(checkpoint: Callable[..., Any]) -> Callable[[str], Stored]:
    """`stored(case)`: the tiny model's tensors in a dictionary of the test's own."""

    def make(case: str) -> Stored:
        opened = checkpoint(case)
        return Stored(opened.config, dict(opened.tensors()))

    return make


def load(found: Checkpoint, dtype: torch.dtype = torch.float32) -> tuple[dict[int, BlockWeights], Any]:
    layers: dict[int, BlockWeights] = {}
    ends = Loader(structure_of(found.config), found, dtype=dtype, device="cpu").run(layers.__setitem__)
    return layers, ends


@pytest.mark.parametrize("case", ["llama_biased", "phi3", "gemma2", "olmo2", "qwen2_moe"])
@pytest.mark.parametrize("backwards", [False, True])
def test_weights_do_not_depend_on_the_order_of_the_file(
    case: str, backwards: bool, stored: Callable[[str], Stored]
) -> None:
    """A layer is built when its last tensor comes."""
    found = stored(case)
    expected, _ = load(found)
    items = list(found.weights.items())
    found.weights = dict(reversed(items) if backwards else sorted(items))
    layers, _ = load(found)
    assert layers.keys() == expected.keys()
    for layer, weights in layers.items():
        for field in BlockWeights.__slots__:
            one, other = getattr(weights, field), getattr(expected[layer], field)
            assert (one is None and other is None) or torch.equal(one, other), field


def test_rows_of_fused_weights(stored: Callable[[str], Stored]) -> None:
    """q, k, v below each other; gate above up; each expert likewise."""
    found = stored("qwen2_moe")
    layers, _ = load(found)
    prefix = "model.layers.1."
    qkv = [found.weights[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(layers[1].qkv, torch.cat(qkv))
    expert = [found.weights[f"{prefix}mlp.experts.3.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(layers[1].gate_up[3], torch.cat(expert))


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
def test_experts_in_one_tensor(case: str, stored: Callable[[str], Stored]) -> None:
    """Checkpoints may hold experts one by one, or merged as the library keeps them."""
    found = stored(case)
    expected, _ = load(found)
    merged = {name: tensor for name, tensor in found.weights.items() if ".experts." not in name}
    for layer, weights in expected.items():
        merged[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = weights.gate_up
        merged[f"model.layers.{layer}.mlp.experts.down_proj"] = weights.down
    layers, _ = load(Stored(found.config, merged))
    assert all(torch.equal(layers[i].gate_up, expected[i].gate_up) for i in expected)
    assert all(torch.equal(layers[i].down, expected[i].down) for i in expected)


def test_missing_and_unexpected_tensors_are_named(stored: Callable[[str], Stored]) -> None:
    """A checkpoint must fit its configuration."""
    found = stored("llama")
    found.weights["model.layers.9.extra.weight"] = found.weights.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ModelError, match=r"missing: model\.layers\.1\.mlp\.up_proj.*unexpected: model\.layers\.9"):
        load(found)


def test_a_bias_nobody_asked_for_is_unexpected(stored: Callable[[str], Stored]) -> None:
    """It would change the result."""
    found = stored("llama")
    found.weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(96)
    with pytest.raises(ModelError, match=r"unexpected: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(found)


def test_wrong_shape_is_named(stored: Callable[[str], Stored]) -> None:
    """With what was found and expected."""
    found = stored("llama")
    found.weights["model.norm.weight"] = torch.ones(47)
    with pytest.raises(ModelError, match=r"model\.norm\.weight is torch\.float32 \(47,\) where .* \(48,\)"):
        load(found)


def test_integers_are_no_weights(stored: Callable[[str], Stored]) -> None:
    """A quantised checkpoint without the field that says so."""
    found = stored("llama")
    found.weights["model.norm.weight"] = torch.ones(48, dtype=torch.int8)
    with pytest.raises(ModelError, match="int8"):
        load(found)


def test_tied_head(stored: Callable[[str], Stored]) -> None:
    """It is the embedding; a stored copy must be equal to it."""
    found = stored("llama_tied")
    _, ends = load(found)
    assert ends.head is ends.embedding
    found.weights = {"lm_head.weight": found.weights["model.embed_tokens.weight"].clone(), **found.weights}
    load(found)
    found.weights["lm_head.weight"][3, 3] += 1
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        load(found)


def test_old_rotary_buffers_are_skipped(stored: Callable[[str], Stored]) -> None:
    """They follow from the configuration."""
    found = stored("llama")
    found.weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    load(found)


def test_tensors_of_the_right_dtype_are_not_copied(checkpoint: Callable[..., Any]) -> None:
    """They stay mapped; others are converted."""
    opened = checkpoint("llama")
    seen: dict[str, int] = {}
    tensors = opened.tensors

    def watched() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors():
            seen[name] = tensor.data_ptr()
            yield name, tensor

    opened.tensors = watched
    layers, ends = load(opened)
    assert ends.embedding.data_ptr() == seen["model.embed_tokens.weight"]
    assert layers[2].down.data_ptr() == seen["model.layers.2.mlp.down_proj.weight"]
    assert load(opened, torch.bfloat16)[1].embedding.dtype == torch.bfloat16
