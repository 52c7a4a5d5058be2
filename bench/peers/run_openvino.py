"""OpenVINO GenAI continuous batching. The model is an export (`bench/compare.py --help` says how).

Options: hint=f32 | bf16 (inference precision), default the device's own.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Generate, serve


def make(model: str, options: dict[str, str]) -> Generate:
    """Build the pipeline with two threads."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    config = genai.SchedulerConfig()
    config.cache_size = 4
    config.max_num_seqs = 256
    config.max_num_batched_tokens = 2048
    properties: dict[str, object] = {"INFERENCE_NUM_THREADS": 2}
    if "hint" in options:
        properties["INFERENCE_PRECISION_HINT"] = options["hint"]
    pipeline = genai.ContinuousBatchingPipeline(model, config, "CPU", properties)

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        one = genai.GenerationConfig()
        one.max_new_tokens = max_tokens
        one.ignore_eos = True
        one.do_sample = False
        tensors = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = pipeline.generate(tensors, [one] * len(prompts))
        return [list(map(int, result.m_generation_ids[0])) for result in results]

    return generate


if __name__ == "__main__":
    serve(make)
