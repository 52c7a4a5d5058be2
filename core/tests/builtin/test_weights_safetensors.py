"""Hugging Face directories: what is read, and what damage is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from enginectl.builtin.weights.safetensors import SafetensorsSource
from enginectl.errors import ModelError

TENSORS = {
    "model.embed_tokens.weight": torch.arange(24, dtype=torch.bfloat16).view(6, 4),
    "model.norm.weight": torch.ones(4, dtype=torch.float32),
    "lm_head.weight": torch.full((6, 4), 0.5, dtype=torch.bfloat16),
}


def write_config(path: Path) -> None:
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    write_config(tmp_path)
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_config(tmp_path)
    weight_map = {}
    for i, (name, tensor) in enumerate(TENSORS.items()):
        shard = f"model-{i + 1:05}-of-00003.safetensors"
        save_file({name: tensor}, tmp_path / shard)
        weight_map[name] = shard
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_every_tensor_is_read_under_its_name(layout: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(layout)
    source = SafetensorsSource()
    assert source.matches(path)
    checkpoint = source.open(path)
    found = dict(checkpoint.tensors())
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) and found[name].dtype == TENSORS[name].dtype for name in found)
    assert checkpoint.dtype == "bfloat16"
    assert checkpoint.num_bytes == 2 * 24 * 2 + 4 * 4
    assert checkpoint.config["model_type"] == "llama"


def test_opening_maps_no_tensor_and_a_tensor_outlives_its_file(single: Path) -> None:
    tensors = SafetensorsSource().open(single).tensors()
    kept = [tensor for _, tensor in tensors]
    (single / "model.safetensors").unlink()
    assert sum(float(tensor.float().sum()) for tensor in kept) == pytest.approx(276 + 4 + 12)


def test_optional_files(single: Path) -> None:
    checkpoint = SafetensorsSource().open(single)
    assert checkpoint.generation_config == {}
    assert checkpoint.tokenizer_dir() is None
    (single / "tokenizer.json").write_text("{}")
    (single / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert checkpoint.tokenizer_dir() == single
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}


def test_only_directories_with_a_config_and_safetensors_match(tmp_path: Path, single: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    write_config(empty)
    assert not SafetensorsSource().matches(empty)
    assert not SafetensorsSource().matches(single / "model.safetensors")


@pytest.mark.parametrize("keep", [0, 5, 40, -20, -1])
def test_a_shard_that_is_cut_off_is_named_before_anything_is_loaded(sharded: Path, keep: int) -> None:
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ModelError, match="model-00002-of-00003"):
        SafetensorsSource().open(sharded)


def test_a_damaged_header_is_named(sharded: Path) -> None:
    shard = sharded / "model-00003-of-00003.safetensors"
    data = bytearray(shard.read_bytes())
    data[8:12] = b"\xff\xfe\x00{"
    shard.write_bytes(bytes(data))
    with pytest.raises(ModelError, match=r"model-00003-of-00003.*damaged"):
        SafetensorsSource().open(sharded)


def test_missing_shards_are_named(sharded: Path) -> None:
    (sharded / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"1 of 3 shards are missing: model-00001-of-00003"):
        SafetensorsSource().open(sharded)


def test_a_tensor_that_its_shard_lacks_is_named(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"model-00001-of-00003.*model\.extra\.weight"):
        SafetensorsSource().open(sharded)


def test_damaged_json_is_named(single: Path) -> None:
    (single / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: not valid JSON"):
        SafetensorsSource().open(single)


def test_several_files_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json and its shards; found model-00001"):
        SafetensorsSource().open(sharded)
