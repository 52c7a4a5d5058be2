"""Is an architecture exact? The engine on a tiny random model, under strain, beside the library's own `generate`.

The strain is the same for all: prompts of mixed lengths in one batch, a token budget that cuts most of them into chunks,
and a pool too small for the rows, so that some give way and are read again. `Served` says what of it happened.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from enginectl.compose import Assembled, compose
from enginectl.config import EngineConfig
from enginectl.context import BuildContext
from enginectl.interfaces.attention import AttentionBackend, AttentionBatch
from enginectl.interfaces.model import LayerSpec, Model, ModelFamily, ModelSpec
from enginectl.interfaces.weights import Checkpoint
from enginectl.plugins import PluginHost
from enginectl.provider import Provider, Role
from enginectl.testing.attention_mutants import PassingAttention
from enginectl.testing.free_executor import Answers, free_request
from enginectl.types import SamplingParams

Mutant = Callable[[Provider], Provider]
Spoil = Callable[[Model], None]

NUM_TOKENS = 12
TOKEN_BUDGET = 16
MAX_MODEL_LEN = 48
NUM_BLOCKS, BLOCK_SIZE = 16, 4


def prompts() -> list[list[int]]:
    """One token to twice the budget, longer than every window."""
    random = np.random.default_rng(0)
    return [random.integers(3, 250, length).tolist() for length in (1, 33, 7, 21, 12, 26)]


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """What the engine said to `prompts()`, and how. num_chunks: times a prompt was read on from its middle."""

    tokens: list[list[int]]
    route: str
    spec: ModelSpec
    num_chunks: int
    num_preemptions: int


class _Counting(PassingAttention):
    """Notes each prompt that is read on from where a step before left it."""

    num_chunks = 0

    def prepare(self, batch: AttentionBatch) -> Any:
        """Count, and pass on."""
        lengths = np.diff(batch.query_start_host[: batch.num_seqs + 1])
        self.num_chunks += int(((lengths > 1) & (batch.seq_lens_host[: batch.num_seqs] > lengths)).sum())
        return super().prepare(batch)


class _Keeping(ModelFamily):
    """A family that keeps the model it has loaded, spoilt."""

    def __init__(self, inner: ModelFamily, spoil: Spoil) -> None:
        self.inner = inner
        self.spoil = spoil
        self.needs_op_set = inner.needs_op_set
        self.model: Model | None = None

    def refuses(self, checkpoint: Checkpoint) -> str | None:
        """As the family."""
        return self.inner.refuses(checkpoint)

    def spec(self, checkpoint: Checkpoint, ctx: BuildContext) -> ModelSpec:
        """As the family."""
        return self.inner.spec(checkpoint, ctx)

    def load(self, checkpoint: Checkpoint, ctx: BuildContext) -> Model:
        """As the family."""
        self.model = self.inner.load(checkpoint, ctx)
        self.spoil(self.model)
        return self.model


def _unchanged(provider: Provider) -> Provider:
    return provider


def _unspoilt(model: Model) -> None:
    """It stays as it was loaded."""


def serve(
    path: Path,
    *,
    family: str = "transformers",
    depth: int = 0,
    whole_prompts: bool = False,
    mutant: Mutant = _unchanged,
    spoil: Spoil = _unspoilt,
) -> Served:
    """Generate from `prompts()`. Raises EnginectlError if refused.

    mutant: what the attention provider becomes. spoil: what is done to the model when it has been loaded and checked.
    """
    host = PluginHost(only_named=True)
    families: list[_Keeping] = []
    backends: list[_Counting] = []

    def keeping(provider: Provider) -> Provider:
        def build(ctx: BuildContext) -> ModelFamily:
            families.append(_Keeping(provider.build(ctx), spoil))
            return families[-1]

        return dataclasses.replace(provider, factory=build)

    def counting(provider: Provider) -> Provider:
        changed = mutant(provider)

        def build(ctx: BuildContext) -> AttentionBackend:
            backends.append(_Counting(changed.build(ctx)))
            return backends[-1]

        return dataclasses.replace(provider, factory=build)

    _exchange(host, Role.MODEL_FAMILY, family, keeping)
    _exchange(host, Role.ATTENTION, "torch", counting)
    config = EngineConfig(
        model=str(path),
        dtype="float32",
        roles={"model_family": family, "attention": "torch"},
        max_num_seqs=8,
        max_num_batched_tokens=MAX_MODEL_LEN if whole_prompts else TOKEN_BUDGET,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=NUM_BLOCKS,
        overlap_depth=depth,
        num_threads=1,
    )
    engine = compose(config, host=host)
    try:
        tokens = _generate(engine)
        num_preemptions = engine.core.stats().num_preemptions
        engine.core.pool.check()
    finally:
        engine.close()
    (kept,), (backend,) = families, backends
    assert kept.model is not None, "a composed engine has loaded its model"
    return Served(
        tokens=tokens,
        route=str(getattr(kept.model, "route", family)),
        spec=kept.model.spec,
        num_chunks=backend.num_chunks,
        num_preemptions=num_preemptions,
    )


def _exchange(host: PluginHost, role: Role, name: str, change: Mutant) -> None:
    entry = host.entry(role, name)
    host.catalogue[role][name] = dataclasses.replace(entry, provider=change(entry.provider))


def _generate(engine: Assembled) -> list[list[int]]:
    answers = Answers()
    for key, prompt in enumerate(prompts()):
        engine.core.add(free_request(key, prompt, NUM_TOKENS, params=SamplingParams(temperature=0.0)))
    while engine.core.has_work:
        answers.take(engine.core.step())
    errors = {key: end.error for key, end in answers.finished.items() if end.error is not None}
    if errors:
        raise RuntimeError(f"requests failed: {errors}")
    return [answers.tokens[key] for key in range(len(prompts()))]


def reference(path: Path) -> list[list[int]]:
    """What the library's `generate` says to `prompts()`, one at a time, greedy, fp32, without an end of sequence: the
    strain is the same for all.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def traits_of(spec: ModelSpec) -> frozenset[str]:
    """What the attention of a model does beyond the plain."""
    found = {trait for layer in spec.layers for trait, has in _traits(layer) if has}
    if len(set(spec.layers)) > 1:
        found.add("mixed")
    if not spec.layers:
        found.add("no attention")
    return frozenset(found)


def _traits(layer: LayerSpec) -> list[tuple[str, bool]]:
    return [
        ("GQA", layer.num_kv_heads < layer.num_heads),
        ("window", layer.window is not None),
        ("chunks", layer.chunk is not None),
        ("soft cap", layer.soft_cap is not None),
        ("sinks", layer.sinks),
        ("narrow values", layer.v_head_dim != layer.head_dim),
    ]
