"""enginectl in process. Options are fields of EngineConfig, `key=value`."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Generate, serve


def make(model: str, options: dict[str, str]) -> Generate:
    """Build the engine."""
    from enginectl import Engine, SamplingParams

    values: dict[str, object] = {"max_num_seqs": 256, "max_model_len": 2048}
    for key, text in options.items():
        words = {"true": True, "false": False}
        values[key] = int(text) if text.lstrip("-").isdigit() else words.get(text.lower(), text)
    engine = Engine(model, **values)

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return [list(out.outputs[0].token_ids) for out in engine.generate(prompts, params)]

    return generate


serve(make)
