"""Values that `auto` becomes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from enginectl import Engine
from enginectl.testing.tiny_models import EOS, save_tiny_model


@pytest.mark.parametrize("where", ["tokenizer_config.json", "tokenizer.json"])
def test_the_tokenizers_own_end_is_in_the_set(where: str, tmp_path: Path) -> None:
    """Law 14b: a chat fine-tune whose configuration still names the base's end stops at its tokenizer's too."""
    model = save_tiny_model("llama", tmp_path / "llama")
    for name in ("config.json", "generation_config.json"):
        path = model / name
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**values, "eos_token_id": 7}))
    path = model / "tokenizer_config.json"
    values = json.loads(path.read_text())
    decoder = {str(EOS): {"content": "</s>", "special": True}} if where == path.name else None
    values = {key: value for key, value in values.items() if key != "added_tokens_decoder"}
    path.write_text(json.dumps({**values, **({"added_tokens_decoder": decoder} if decoder else {})}))
    with Engine(str(model), only_plugins=True) as engine:
        assert engine.info.eos_token_ids == (7, EOS)
