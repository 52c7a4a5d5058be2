"""Models whose attention code cannot be replaced."""

from __future__ import annotations

from enginectl.testing.architectures.kinds import WINDOW, Architecture, one_by_one

ATTENDING: dict[str, Architecture] = {
    "falcon": one_by_one("falcon", "GQA"),
    "falcon_alibi": one_by_one("falcon", alibi=True, num_kv_heads=2, new_decoder_architecture=True),
    "bloom": one_by_one("bloom"),
    "mpt": one_by_one("mpt"),
    "gpt_neo": one_by_one("gpt_neo", attention_types=[[["local", "global", "local"], 1]], window_size=WINDOW),
    "xglm": one_by_one("xglm", ffn_dim=96, pad_token_id=1),
    "doge": one_by_one("doge", "GQA", keep_window_size=256),
    "gpt_neox_japanese": one_by_one("gpt_neox_japanese", intermediate_multiple_size=2),
}
