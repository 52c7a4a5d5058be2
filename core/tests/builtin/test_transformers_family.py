"""The transformers family: exactness against the library's own generation, and what it refuses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from enginectl.builtin.transformers_family.family import TransformersFamily
from enginectl.builtin.transformers_family.head import Float32Head
from enginectl.builtin.transformers_family.self_check import self_check
from enginectl.context import BuildContext
from enginectl.errors import ModelError
from enginectl.interfaces.model import ForwardInput, Model
from enginectl.interfaces.weights import Checkpoint
from enginectl.provider import Provider, Role
from enginectl.testing.attention import context_for, layer_spec
from enginectl.testing.attention_mutants import MUTANTS
from enginectl.testing.greedy import allocate, greedy_decode
from enginectl.testing.paging import Pages
from enginectl.testing.tiny_models import WINDOW, save_tiny_model, tiny_config, tiny_model

TORCH = Provider(Role.ATTENTION, "torch", "enginectl.builtin.attention_torch:build")
PROMPT_LENGTHS = (3, 11, 21, 6)
NUM_NEW = 14
NAMES = (
    "gemma", "gemma2", "gemma3", "gpt2", "gpt_oss", "granite", "llama", "llama4", "llama_tied", "mistral", "mixtral", "olmo2",
    "phi3", "qwen2", "qwen2_moe", "qwen2_window", "qwen3", "qwen3_moe", "smollm3",
)  # fmt: skip


class Stored(Checkpoint):
    """A directory, or tensors in memory under a path that is no directory."""

    def __init__(self, path: Path, config: dict[str, Any], weights: dict[str, Tensor] | None = None) -> None:
        self.path = path
        self.config = config
        self._weights = weights or {}

    @property
    def dtype(self) -> str:
        return "float32"

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._weights.values())

    @property
    def generation_config(self) -> dict[str, Any]:
        return {}

    def tokenizer_dir(self) -> Path | None:
        return None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._weights.items()


def stored(directory: Path) -> Stored:
    return Stored(directory, json.loads((directory / "config.json").read_text()))


def in_memory(name: str, **changes: Any) -> Stored:
    model = tiny_model(name, **changes)
    config = json.loads(model.config.to_json_string(use_diff=False))
    return Stored(Path("tiny.gguf"), config, dict(model.state_dict()))


def of_type(model_type: str, **fields: Any) -> Stored:
    return Stored(Path("somewhere"), {"model_type": model_type, "architectures": ["SomeForCausalLM"], **fields})


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directory of a tiny model by name, written once."""
    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in made:
            made[name] = save_tiny_model(name, tmp_path_factory.mktemp(name), tokenizer=False)
        return made[name]

    return directory


@pytest.fixture(scope="module")
def family() -> TransformersFamily:
    return TransformersFamily()


def context(*, dtype: str = "float32", block_size: int = 4, max_model_len: int | None = None) -> BuildContext:
    ctx = context_for([layer_spec()], block_size=block_size, device="cpu", dtype=dtype)
    return ctx.with_(engine=msgspec.structs.replace(ctx.engine, max_model_len=max_model_len))


def prompts(vocab_size: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(7)
    return [torch.randint(vocab_size, (length,), generator=random).tolist() for length in PROMPT_LENGTHS]


def generated(directory: Path) -> list[list[int]]:
    """What the library's own generation says, one prompt at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts(model.config.vocab_size):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_NEW, pad_token_id=0
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def decoded(model: Model, *, provider: Provider = TORCH, chunk: int | None, block_size: int) -> list[list[int]]:
    ctx = context(block_size=block_size).with_(model_spec=model.spec)
    return greedy_decode(
        model,
        provider.build(ctx),
        prompts(model.spec.vocab_size),
        num_new=NUM_NEW,
        chunk=chunk,
        block_size=block_size,
    )


@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_generate(name: str, tiny_dir: Any, family: TransformersFamily) -> None:
    """Law 1: whatever shares the batch, the chunking and the block size."""
    model = family.load(stored(tiny_dir(name)), context())
    expected = generated(tiny_dir(name))
    assert len({token for row in expected for token in row}) > NUM_NEW, "the model repeats itself and proves nothing"
    for chunk in (3, 5, None):
        for block_size in (1, 4, 16):
            assert decoded(model, chunk=chunk, block_size=block_size) == expected


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mixtral", "mistral", "gpt2"])
@pytest.mark.parametrize("check", sorted(MUTANTS))
def test_mutants_change_tokens(name: str, check: str, tiny_dir: Any, family: TransformersFamily) -> None:
    """Law 1: attention zeroed, a window off by one and a lost block are noticed on these models."""
    model = family.load(stored(tiny_dir(name)), context())
    if "window" in check and not any(layer.window for layer in model.spec.layers):
        pytest.skip("no window to be off by one")
    right = decoded(model, chunk=5, block_size=4)
    assert decoded(model, provider=MUTANTS[check](TORCH), chunk=5, block_size=4) != right


def test_windows_are_found_where_the_model_has_them(family: TransformersFamily) -> None:
    """Each layer's reach comes from the mask the model asks for."""

    def reach(name: str) -> list[tuple[int | None, int | None]]:
        return [(layer.window, layer.chunk) for layer in family.spec(in_memory(name), context()).layers]

    assert reach("mistral") == [(WINDOW, None)] * 3
    assert reach("gemma2") == [(WINDOW, None), (None, None), (WINDOW, None)]
    assert reach("qwen2") == [(None, None)] * 3
    assert reach("qwen2_window") == [(None, None), (WINDOW, None), (WINDOW, None)]
    assert reach("llama4") == [(None, WINDOW), (None, None), (None, WINDOW)]


def test_spec_from_the_config_is_that_of_the_loaded_model(family: TransformersFamily) -> None:
    """Heads, widths, scale, soft cap, sinks and sizes, before a weight is read."""
    for name in NAMES:
        checkpoint = in_memory(name)
        spec = family.spec(checkpoint, context())
        model = family.load(checkpoint, context())
        assert model.spec == spec
        assert model.route == "packed"
        module = tiny_model(name)
        assert spec.num_parameters == sum(p.numel() for p in module.parameters())
        assert spec.weight_bytes == 4 * spec.num_parameters
        assert spec.max_model_len == 256


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma2", "mixtral", "gpt2"])
def test_tensors_one_by_one_equal_the_directory(name: str, tiny_dir: Any, family: TransformersFamily) -> None:
    """Checkpoints that are no directory: parameters, ties and rotary buffers are all in place."""
    from_tensors = family.load(in_memory(name), context())
    from_directory = family.load(stored(tiny_dir(name)), context())
    assert decoded(from_tensors, chunk=5, block_size=4) == decoded(from_directory, chunk=5, block_size=4)


def test_missing_and_unexpected_tensors_are_named(family: TransformersFamily) -> None:
    """A checkpoint must fit its configuration."""
    checkpoint = in_memory("llama")
    weights = checkpoint._weights
    weights["model.layers.9.extra.weight"] = weights.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ModelError, match=r"missing: model\.layers\.1\.mlp\.up_proj.*unexpected: model\.layers\.9") as e:
        family.load(checkpoint, context())
    assert "config.json" in str(e.value)


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("recurrent_gemma", {}, "keeps state of its own"),
        ("rwkv", {}, "keeps state of its own"),
        ("t5", {"is_encoder_decoder": True}, "encoder-decoder"),
        ("gemma3", {"vision_config": {"hidden_size": 8}}, "multimodal"),
        ("llamma", {}, "did you mean 'llama'"),
        ("secret", {"auto_map": {"AutoConfig": "x.Y"}}, "Python code from the checkpoint"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantised with 'gptq'"),
    ],
)
def test_refused_by_name_with_the_reason(
    model_type: str, fields: dict[str, Any], reason: str, family: TransformersFamily
) -> None:
    """What cannot run exactly is refused before a weight is read."""
    checkpoint = of_type(model_type, **fields)
    found = family.refuses(checkpoint)
    assert found is not None
    assert reason in found
    assert model_type in found
    with pytest.raises(ModelError, match=model_type):
        family.spec(checkpoint, context())


def test_what_the_module_code_raises_comes_last(family: TransformersFamily) -> None:
    """The error is in our words: what was asked, what was found, what is served, what to do; then what it rests on."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6, "intermediate_size": 48}
    with pytest.raises(ModelError) as refused:
        family.spec(of_type("xmod", **sizes), context())
    words = [
        "somewhere: SomeForCausalLM cannot be served",
        "packed: its module code raises in a forward of two tokens; one sequence per forward: its module code raises",
        "It serves decoders each of whose layers",
        "docs/reference/architectures.md",
        "or another --model-family. ValueError: Input language unknown",
    ]
    at = [str(refused.value).index(each) for each in words]
    assert at == sorted(at)
    assert str(refused.value).count("Input language unknown") == 1


def test_a_probe_reads_no_weights(family: TransformersFamily) -> None:
    """Also where module code looks at what is in a tensor: 132 billion parameters, of which none is there."""
    large = {
        "d_model": 6144,
        "n_heads": 48,
        "n_layers": 40,
        "vocab_size": 100352,
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 500000.0},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    }
    started = time.process_time()
    spec = family.spec(of_type("dbrx", **large), context(dtype="bfloat16"))
    assert time.process_time() - started < 10
    assert len(spec.layers) == 40
    assert spec.num_parameters == 131_596_523_520
    assert (spec.layers[0].num_heads, spec.layers[0].num_kv_heads, spec.layers[0].head_dim) == (48, 8, 128)


def test_what_runs_is_not_refused(family: TransformersFamily) -> None:
    """Every tiny model is served."""
    assert {name: family.refuses(in_memory(name)) for name in NAMES} == dict.fromkeys(NAMES)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize(("rope", "limit", "most"), [(LONGROPE, 64, 256), (DYNAMIC, 256, 512)])
def test_frequencies_that_depend_on_the_batch_limit_the_context(
    rope: dict[str, Any], limit: int, most: int, family: TransformersFamily, caplog: pytest.LogCaptureFixture
) -> None:
    """Up to a length they do not. Who asks for more gets frozen ones, and is told; beyond their reach it is refused."""
    checkpoint = in_memory("llama", rope_parameters=rope)
    assert family.spec(checkpoint, context()).max_model_len == limit
    assert family.load(checkpoint, context(max_model_len=limit)).spec.max_model_len == limit
    assert "asked for" not in caplog.text
    assert family.spec(checkpoint, context(max_model_len=limit + 1)).max_model_len == limit + 1
    assert f"every request gets those of {limit + 1} tokens" in caplog.text
    with pytest.raises(ModelError, match=rf"--max-model-len {most} or less"):
        family.spec(checkpoint, context(max_model_len=most + 1))


@pytest.mark.parametrize(("rope", "length"), [(LONGROPE, 100), (DYNAMIC, 300)])
def test_frozen_frequencies_are_those_of_the_longest_request(
    rope: dict[str, Any], length: int, family: TransformersFamily
) -> None:
    """Law 1: a request of max_model_len tokens equals the library's forward over them; a short one its first tokens."""
    checkpoint = in_memory("llama", rope_parameters=rope)
    ids = torch.randint(250, (length,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = tiny_model("llama", rope_parameters=rope)(input_ids=ids[None], use_cache=False).logits[0]
        short = tiny_model("llama", rope_parameters=rope)(input_ids=ids[None, :40], use_cache=False).logits[0]
    model = family.load(checkpoint, context(max_model_len=length))
    for count in (length, 40):
        kept = one_step(model, ids[:count].tolist(), list(range(count)), torch.float32)
        torch.testing.assert_close(kept.logits, expected[:count], rtol=1e-3, atol=1e-3)
    assert (short - expected[:40]).abs().max() > 0.1, "the frequencies differ, or this proves nothing"


def test_self_check_notices_a_wrong_layer(family: TransformersFamily) -> None:
    """A specification that is not the model's own makes different logits."""
    model = family.load(in_memory("gemma2"), context())
    right = self_check(model, device="cpu", dtype=torch.float32)
    assert right < 1e-5
    layers = tuple(msgspec.structs.replace(layer, soft_cap=None) for layer in model.spec.layers)
    model.spec = msgspec.structs.replace(model.spec, layers=layers)
    with pytest.raises(ModelError, match="differ by"):
        self_check(model, device="cpu", dtype=torch.float32)


def test_two_models_live_side_by_side(tiny_dir: Any, family: TransformersFamily) -> None:
    """The trampoline has no state of its own."""
    one = family.load(stored(tiny_dir("llama")), context())
    expected = decoded(one, chunk=5, block_size=4)
    other = family.load(stored(tiny_dir("gemma2")), context())
    theirs = decoded(other, chunk=5, block_size=4)
    assert decoded(one, chunk=5, block_size=4) == expected != theirs


def one_step(model: Model, ids: list[int], keep: list[int], dtype: torch.dtype) -> Any:
    num_blocks = 9 + len(ids)
    attention = TORCH.build(context(dtype=str(dtype).removeprefix("torch.")).with_(model_spec=model.spec))
    attention.bind(allocate(model.spec, num_blocks=num_blocks, block_size=4, dtype=dtype, device="cpu"))
    model.use_attention(attention)
    batch = Pages(block_size=4, num_blocks=num_blocks).advance([(0, len(ids))])
    step = ForwardInput(torch.tensor(ids), torch.arange(len(ids)), torch.tensor(keep).long(), attention.prepare(batch))
    with torch.inference_mode():
        return model.forward(step)


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_rows(name: str, dtype: torch.dtype, family: TransformersFamily) -> None:
    """Hidden rows before the head and fp32 logits of the kept tokens, soft cap and scaling applied."""
    model = family.load(in_memory(name), context(dtype=str(dtype).removeprefix("torch.")))
    whole = one_step(model, [5, 9, 200, 31], [0, 1, 2, 3], dtype)
    kept = one_step(model, [5, 9, 200, 31], [3, 1], dtype)
    assert kept.hidden.shape == (2, model.spec.hidden_size)
    assert kept.logits.dtype == torch.float32
    logits = model.logits(kept)
    torch.testing.assert_close(logits, whole.logits[[3, 1]], rtol=1e-5, atol=1e-5)
    assert torch.equal(model.logits(kept, torch.tensor([1])), kept.logits[1:])
    best = model.greedy(kept)
    assert best is not None
    assert torch.equal(best, kept.logits.argmax(-1))
    logits.zero_()
    assert kept.logits.abs().max() > 0, "the caller's copy is not the model's"
    exact = kept.hidden.float() @ model.module.get_output_embeddings().weight.float().T
    if name == "gemma2":
        exact = torch.tanh(exact / 4.0) * 4.0
    if name == "granite":
        exact = exact / 2.0
    torch.testing.assert_close(kept.logits, exact, rtol=1e-5, atol=1e-5)


def test_no_kept_rows(family: TransformersFamily) -> None:
    """A step in the middle of a prompt wants no logits."""
    model = family.load(in_memory("llama"), context())
    kept = one_step(model, [5, 9], [], torch.float32)
    assert model.logits(kept).shape == (0, model.spec.vocab_size)


@pytest.mark.parametrize("bias", [False, True])
def test_head_sums_in_fp32(bias: bool) -> None:
    """bf16 weights, logits as if they were fp32, across several chunks of rows."""
    linear = torch.nn.Linear(4096, 300, bias=bias, dtype=torch.bfloat16)
    rows = torch.randn(1, 5, 4096, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    exact = rows.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    with torch.inference_mode():
        found = Float32Head(linear)(rows)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)


def test_tiny_configs_are_untied_unless_named_so() -> None:
    """The exactness tests rest on it."""
    assert [name for name in NAMES if tiny_config(name).tie_word_embeddings] == ["llama_tied"]
