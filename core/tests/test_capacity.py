"""KV arithmetic against published model shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from enginectl.capacity import KVLayer, bytes_per_token, capacity, carries_state, kv_dtype, kv_layers, probed
from enginectl.cli.capacity import capacity_command
from enginectl.errors import ConfigError, ModelError
from enginectl.testing.architectures import ARCHITECTURES, STATES
from enginectl.testing.tiny_models import tiny_config

GIB = 2**30
QWEN2_05B = {"num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}
LLAMA3_8B = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA2_7B = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
LLAMA3_70B = {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8}
QWEN3_28 = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}


@pytest.mark.parametrize(
    ("config", "expected"),
    [(QWEN2_05B, 12_288), (LLAMA3_8B, 131_072), (LLAMA2_7B, 524_288), (LLAMA3_70B, 327_680), (QWEN3_28, 114_688)],
)
def test_bytes_a_token_of_known_models(config: dict[str, Any], expected: int) -> None:
    assert bytes_per_token(kv_layers(config), "bfloat16") == expected


def test_what_fits_in_14_gib() -> None:
    result = capacity(QWEN3_28, 14 * GIB, seq_len=2048)
    assert (result.bytes_per_token, result.num_tokens, result.num_sequences) == (114_688, 131_072, 64)
    assert result.num_blocks == 8192
    assert result.bytes_per_block == 114_688 * 16


def test_sequences_are_counted_in_whole_blocks() -> None:
    memory_bytes = 4 * 16 * 12_288  # four blocks
    assert capacity(QWEN2_05B, memory_bytes, seq_len=17).num_sequences == 2
    assert capacity(QWEN2_05B, memory_bytes - 1, seq_len=17).num_sequences == 1
    assert capacity(QWEN2_05B, memory_bytes - 1, seq_len=17).num_tokens == 48


@pytest.mark.parametrize(
    ("config", "layer", "num_layers"),
    [
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, KVLayer(12, 64, 64), 12),
        ({"n_layer": 2, "n_head": 8, "n_embd": 64, "multi_query": True}, KVLayer(1, 8, 8), 2),
        ({"n_layers": 2, "n_heads": 8, "d_model": 64, "attn_config": {"kv_n_heads": 2}}, KVLayer(2, 8, 8), 2),
        (
            {
                "num_hidden_layers": 61,
                "num_attention_heads": 128,
                "hidden_size": 7168,
                "num_key_value_heads": 128,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
            },
            KVLayer(128, 192, 128),
            61,
        ),
        ({"text_config": QWEN2_05B, "num_hidden_layers": 3, "model_type": "vlm"}, KVLayer(2, 64, 64), 24),
        ({**QWEN2_05B, "sliding_window": 4096, "use_sliding_window": False}, KVLayer(2, 64, 64), 24),
        ({**LLAMA3_8B, "sliding_window": 4096}, KVLayer(8, 128, 128, 4096), 32),
    ],
)
def test_layers_of_other_configurations(config: dict[str, Any], layer: KVLayer, num_layers: int) -> None:
    assert kv_layers(config) == (layer,) * num_layers


def test_hybrid_layers() -> None:
    kinds = ["linear_attention", "sliding_attention", "full_attention", "full_attention"]
    config = {**QWEN3_28, "num_hidden_layers": 4, "layer_types": kinds, "sliding_window": 8}
    assert kv_layers(config) == (KVLayer(8, 128, 128, 8), KVLayer(8, 128, 128), KVLayer(8, 128, 128))
    assert len(kv_layers({**config, "num_kv_shared_layers": 2})) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_attention_heads": 15}, "do not divide"),
        ({"layer_types": ["full_attention"]}, "must list 24 layers"),
        ({"layer_types": ["mamba"] * 24}, "no attention layers"),
    ],
)
def test_a_configuration_that_says_too_little_is_an_error(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        capacity({**QWEN2_05B, **change}, GIB)


@pytest.mark.parametrize("arguments", [{"seq_len": 0}, {"block_size": 0}, {"dtype": "bf16"}, {"memory_bytes": -1}])
def test_arguments_out_of_range_are_errors(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        capacity(QWEN2_05B, **{"memory_bytes": GIB, **arguments})


@pytest.mark.parametrize(
    ("config", "dtype"),
    [({}, "bfloat16"), ({"torch_dtype": "float16"}, "float16"), ({"dtype": "torch.float32"}, "float32")],
)
def test_the_default_dtype_is_the_checkpoints(config: dict[str, Any], dtype: str) -> None:
    assert kv_dtype(config) == dtype


@given(memory_bytes=st.integers(0, 2**45), seq_len=st.integers(1, 100_000), block_size=st.integers(1, 256))
def test_what_is_said_to_fit_fits_and_no_more_would(memory_bytes: int, seq_len: int, block_size: int) -> None:
    result = capacity(QWEN2_05B, memory_bytes, seq_len, "float16", block_size)
    assert result.num_blocks * result.bytes_per_block <= memory_bytes
    assert (result.num_blocks + 1) * result.bytes_per_block > memory_bytes
    blocks_each = -(-seq_len // block_size)
    assert result.num_sequences * blocks_each <= result.num_blocks < (result.num_sequences + 1) * blocks_each


def _app() -> typer.Typer:
    app = typer.Typer()
    app.command("capacity")(capacity_command)
    return app


def test_the_command_prints_json_and_a_table(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_28))
    for model in (tmp_path, tmp_path / "config.json"):
        result = CliRunner().invoke(_app(), [str(model), "--memory", "14GiB", "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.output)["num_tokens"] == 131_072
    table = CliRunner().invoke(_app(), [str(tmp_path), "--memory", "14GiB"]).output
    assert "131,072" in table
    assert "KV alone" in table


def test_the_command_refuses_what_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not found"):
        CliRunner().invoke(_app(), [str(tmp_path / "none"), "--memory", "1GiB"], catch_exceptions=False)
    with pytest.raises(ModelError, match="exactly one"):
        CliRunner().invoke(_app(), [str(tmp_path), "--memory", "1GiB"], catch_exceptions=False)


def test_capacity_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_28))
    code = (
        "import sys; from pathlib import Path; from enginectl.cli.capacity import capacity_command, load_config;"
        "import enginectl.builtin.weights, enginectl.capacity; load_config(Path(sys.argv[1]));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)


@pytest.mark.parametrize("name", [name for name, each in ARCHITECTURES.items() if each.route == STATES])
def test_every_recurrent_model_is_recognised(name: str) -> None:
    assert carries_state(tiny_config(name).to_dict())


def test_attention_models_are_not_probed() -> None:
    """Nor is torch imported for them."""
    for name in ("llama", "qwen3_moe", "gemma3", "gpt_oss", "deepseek_v3", "bloom", "mpt", "gpt2", "phi3_longrope"):
        assert not carries_state(tiny_config(name).to_dict())


def test_state_is_what_the_engine_counts() -> None:
    """Per row, times the rows; blocks get the rest, and layers that only carry a state store no keys."""
    config = tiny_config("jamba").to_dict() | {"dtype": "float32"}
    spec = probed(config)
    assert spec.state_bytes_per_row > 0
    per_token = 2 * 2 * 8 * 4  # one of three layers attends, with two heads of 8
    rows, memory_bytes = 8, 8 * spec.state_bytes_per_row + 100 * 16 * per_token
    result = capacity(config, memory_bytes, 32, spec=spec, max_num_seqs=rows)
    assert (result.bytes_per_token, result.num_blocks, result.num_sequences) == (per_token, 100, 8)
    assert (result.state_bytes_per_row, result.max_num_seqs, result.notes) == (spec.state_bytes_per_row, rows, ())
    assert capacity(config, memory_bytes, 800, spec=spec, max_num_seqs=rows).num_sequences == 2


def test_state_that_does_not_fit_is_said() -> None:
    config = tiny_config("mamba2").to_dict()
    spec = probed(config)
    result = capacity(config, 5 * spec.state_bytes_per_row, spec=spec, max_num_seqs=6)
    assert (result.num_sequences, result.num_blocks) == (0, 0)
    assert "--max-num-seqs 6" in result.notes[0]
    assert "hold that of 5" in result.notes[0]
    assert capacity(config, 6 * spec.state_bytes_per_row, 200, spec=spec, max_num_seqs=6).num_sequences == 6


def test_a_length_that_no_sequence_has_is_said() -> None:
    config = {**QWEN3_28, "max_position_embeddings": 40_960}
    assert capacity(config, 14 * GIB, 40_960).notes == ()
    (note,) = capacity(config, 14 * GIB, 40_961).notes
    assert "--seq-len 40961 is longer" in note
    assert "--seq-len 40960 or less" in note


def test_not_one_sequence_is_said() -> None:
    (note,) = capacity(QWEN3_28, 2**24, 10_000).notes
    assert "only 144 tokens" in note


def test_the_command_counts_state(tmp_path: Path) -> None:
    tiny_config("qwen3_next").save_pretrained(tmp_path)
    arguments = [str(tmp_path), "--memory", "1GiB", "--max-num-seqs", "16", "--seq-len", "9999"]
    found = json.loads(CliRunner().invoke(_app(), [*arguments, "--json"]).output)
    assert found["state_bytes_per_row"] > 0
    assert found["max_num_seqs"] == found["num_sequences"] == 16
    table = CliRunner().invoke(_app(), arguments).output
    assert "recurrent state a row" in table
    assert "of 16 rows" in table
    assert "256 tokens, so give --seq-len 256 or less" in table
