"""vLLM on a CPU, its offline `LLM`. Options: enable_prefix_caching=true | false."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import Generate, serve


def make(model: str, options: dict[str, str]) -> Generate:
    """Build the engine; the first start compiles for a minute."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        enable_prefix_caching=options.get("enable_prefix_caching") == "true",
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(out.outputs[0].token_ids) for out in llm.generate(asked, params, use_tqdm=False)]

    return generate


if __name__ == "__main__":
    serve(make)
