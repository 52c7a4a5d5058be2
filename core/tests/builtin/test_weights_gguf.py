"""GGUF files against the Hugging Face models they were written from.

The writer below interleaves q and k rows and shifts Gemma's norms as llama.cpp's converters do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from enginectl.builtin.weights import build_gguf
from enginectl.builtin.weights.gguf import GGUFCheckpoint, GGUFSource
from enginectl.builtin.weights.gguf_cache import GGUFCache, cache_root
from enginectl.config import EngineConfig
from enginectl.context import BuildContext, Machine
from enginectl.errors import ConfigError, ModelError

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied, biased": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama, linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}},
    "llama, llama3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen2": {},
    "qwen2, yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 5000.0,
            "original_max_position_embeddings": 128,
        }
    },
    "qwen3": {"head_dim": 24},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 9.0,
        "tie_word_embeddings": True,
    },
    "phi3": {"sliding_window": None},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A cache of the test's own; the demo model's is the user's, which other tests fill and use too."""
    if request.node.get_closest_marker("model") is None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_model(name: str, seed: int = 0) -> Any:
    config = AutoConfig.for_model(name.partition(",")[0], **{**SHAPE, **MODELS[name]})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases start constant, which would hide mistakes
                parameter.add_(0.3 * torch.randn_like(parameter))
            if "layers.1" in parameter_name:
                parameter.mul_(1.1)
    return model


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def gguf_tensors(model: Any) -> Iterator[tuple[str, np.ndarray]]:
    config = model.config
    arch = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[config.model_type]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if config.model_type == "llama" and ".q_proj." in hf_name:
            values = interleave(values, config.num_attention_heads)
        if config.model_type == "llama" and ".k_proj." in hf_name:
            values = interleave(values, config.num_key_value_heads)
        if config.model_type == "gemma2" and hf_name.endswith("norm.weight"):
            values = values + 1
        yield names.get_name(hf_name, try_suffixes=(".weight", ".bias")), values
    rope = config.rope_parameters
    if rope["rope_type"] == "llama3":
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        head_dim = config.head_dim
        plain = 1 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)
        yield "rope_freqs.weight", (plain / frequencies).numpy().astype(np.float32)


def write_metadata(writer: Any, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.model_type == "gemma2":
        writer.add_sliding_window(config.sliding_window)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)


def write_gguf(path: Path, model: Any, kind: str = "F32", **extra: np.ndarray) -> Path:
    writer = gguf.GGUFWriter(str(path), model.config.model_type)
    write_metadata(writer, model.config)
    quantisation = gguf.GGMLQuantizationType[kind]
    for name, values in [*gguf_tensors(model), *extra.items()]:
        if kind == "F32" or values.ndim == 1:
            writer.add_tensor(name, values)
        elif kind == "F16":
            writer.add_tensor(name, values.astype(np.float16))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(checkpoint: GGUFCheckpoint) -> Any:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**checkpoint.config)).eval().float()
    missing, unexpected = model.load_state_dict(
        {name: tensor.float() for name, tensor in checkpoint.tensors()}, strict=False
    )
    assert not unexpected
    assert missing == (["lm_head.weight"] if checkpoint.config["tie_word_embeddings"] else [])
    model.tie_weights()
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(torch.arange(3, 43)[None]).logits


@pytest.mark.parametrize("name", MODELS)
def test_a_plain_file_gives_back_the_model_it_was_written_from(name: str, tmp_path: Path) -> None:
    """Law 1 rests on it: tensors, rotary frequencies, windows, caps and eps all show in the logits."""
    model = make_model(name)
    checkpoint = GGUFSource().open(write_gguf(tmp_path / "m.gguf", model))
    assert checkpoint.dtype == "float32"
    expected = model.state_dict()
    for key, tensor in checkpoint.tensors():
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-6)
    torch.testing.assert_close(logits(load(checkpoint)), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "BF16", "F16"])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_every_stored_type_decodes_to_what_it_was_quantised_to(kind: str, dtype: str | None, tmp_path: Path) -> None:
    model = make_model("llama")
    checkpoint = GGUFSource(dtype, num_threads=2).open(write_gguf(tmp_path / "m.gguf", model, kind))
    natural = "float16" if kind == "F16" else "bfloat16"
    assert checkpoint.dtype == (dtype or natural)
    quantisation = gguf.GGMLQuantizationType[kind]
    found = dict(checkpoint.tensors())
    for key, tensor in model.state_dict().items():
        values = tensor.numpy()
        if values.ndim == 2:
            # Rows are quantised one by one, so the order in which the file keeps them changes nothing.
            values = gguf.quants.dequantize(gguf.quants.quantize(values, quantisation), quantisation)
        torch.testing.assert_close(
            found[key], torch.tensor(values).to(getattr(torch, checkpoint.dtype)), rtol=0, atol=0
        )


def test_the_dequantised_copy_is_used_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"), "Q4_1")
    first = {name: tensor.clone() for name, tensor in GGUFSource().open(path).tensors()}
    monkeypatch.setattr(GGUFCheckpoint, "_decode", lambda *_: pytest.fail("dequantised again"))
    second = dict(GGUFSource().open(path).tensors())
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not list(cache_root().rglob("*.tmp"))


def test_a_changed_file_is_decoded_again_and_its_old_copy_removed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"), "Q8_0")
    before = {name: tensor.clone() for name, tensor in GGUFSource().open(path).tensors()}
    write_gguf(path, make_model("llama", seed=1), "Q8_0")
    os.utime(path, ns=(1, 1))
    after = dict(GGUFSource().open(path).tensors())
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    assert len(list(cache_root().rglob("*.safetensors"))) == 1


def test_a_cut_off_copy_is_made_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"), "Q8_0")
    first = {name: tensor.clone() for name, tensor in GGUFSource().open(path).tensors()}
    (copy,) = cache_root().rglob("*.safetensors")
    copy.write_bytes(copy.read_bytes()[:-10])
    again = dict(GGUFSource().open(path).tensors())
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_cache_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file where a directory should be")
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"), "Q8_0")
    with caplog.at_level(logging.WARNING):
        assert len(dict(GGUFSource().open(path).tensors())) == 21
    assert "not kept" in caplog.text
    assert str(path) in caplog.text
    made = []
    scratch = GGUFCache(path).tokenizer_dir("1", lambda directory: made.append(directory))
    assert made == [scratch]
    assert scratch.is_dir()


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"))

    def fail(directory: Path) -> None:
        (directory / "half").write_text("")
        raise ModelError("no")

    with pytest.raises(ModelError):
        GGUFCache(path).tokenizer_dir("1", fail)
    assert not [entry for entry in cache_root().rglob("*") if entry.is_file()]


def test_eos_is_a_set(tmp_path: Path) -> None:
    """Law 14b: end of turn counts, by its own key or as a control token that ends a turn."""
    model = make_model("llama")
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    write_metadata(writer, model.config)
    writer.add_eot_token_id(7)
    tokens = [f"t{i}" for i in range(96)]
    tokens[9] = tokens[11] = "<|im_end|>"
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i == 9 else 1 for i in range(96)])
    for name, values in gguf_tensors(model):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = GGUFSource().open(tmp_path / "m.gguf")
    assert checkpoint.generation_config == {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": [2, 7, 9]}
    assert checkpoint.config["eos_token_id"] == [2, 7, 9]


@pytest.mark.parametrize(("asked", "used"), [(None, 3), (2, 2)])
def test_no_more_threads_dequantise_than_may_compute(asked: int | None, used: int) -> None:
    """`num_threads` was ignored while weights were decoded."""
    machine = Machine(num_cores=3, memory_bytes=1 << 30, cpu_flags=frozenset())
    source = build_gguf(BuildContext(EngineConfig(model="", num_threads=asked), machine))
    assert isinstance(source, GGUFSource)
    assert source._num_threads == used


def test_paths(tmp_path: Path) -> None:
    source = GGUFSource()
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"))
    assert source.matches(path)
    assert source.matches(tmp_path)
    assert source.open(tmp_path).path == path
    renamed = path.rename(tmp_path / "weights.bin")
    assert source.matches(renamed)
    assert not source.matches(tmp_path)
    assert not source.matches(tmp_path / "none.gguf")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"exactly one \.gguf file, found a\.gguf, b\.gguf"):
        source.open(tmp_path)


def test_an_unknown_architecture_names_those_supported(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"'mamba' cannot be read.*gemma2, llama, phi3, qwen2, qwen3"):
        GGUFSource().open(tmp_path / "m.gguf")


def test_tensors_too_many_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"), **{"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    with pytest.raises(ModelError, match=r"no place for tensor 'blk\.0\.attn_sinks\.weight'"):
        GGUFSource().open(path)


def test_rotary_divisors_that_are_not_llama3s_are_refused(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", make_model("llama"), **{"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}
    )
    with pytest.raises(ModelError, match="not Llama 3's"):
        GGUFSource().open(path)


@pytest.mark.parametrize("keep", [0, 3, 20, 100, 600, -1])
def test_a_file_that_is_cut_off_is_an_error_at_opening(keep: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"m\.gguf"):
        GGUFSource().open(path)


def test_a_dtype_that_weights_cannot_take_is_an_error() -> None:
    with pytest.raises(ConfigError, match="int8"):
        GGUFSource("int8")


@pytest.mark.model
def test_the_demo_model_answers(demo_model: Path) -> None:
    checkpoint = GGUFSource(num_threads=2).open(demo_model)
    assert checkpoint.config["rope_parameters"]["rope_theta"] == 100_000.0
    assert checkpoint.generation_config["eos_token_id"] == 2
    directory = checkpoint.tokenizer_dir()
    assert directory is not None
    tokenizer = AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = load(checkpoint).generate(**prompt, max_new_tokens=10, do_sample=False)
    assert tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True) == (
        "The capital of France is Paris."
    )
