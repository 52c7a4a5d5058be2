"""The model family that serves what transformers can run through our attention, and refuses the rest by name."""

from __future__ import annotations

import logging
from typing import Any

import torch

from enginectl.builtin.transformers_family import bridge, probe
from enginectl.builtin.transformers_family.loading import config_object, load_module, meta_module
from enginectl.builtin.transformers_family.model import TransformersModel
from enginectl.builtin.transformers_family.refusals import exact_limit, refusal
from enginectl.builtin.transformers_family.self_check import self_check
from enginectl.context import BuildContext
from enginectl.errors import ModelError
from enginectl.interfaces.model import LayerSpec, ModelFamily, ModelSpec
from enginectl.interfaces.weights import Checkpoint

logger = logging.getLogger(__name__)


class TransformersFamily(ModelFamily):
    """Any decoder-only architecture whose module code calls the attention interface and keeps no state of its own."""

    def __init__(self) -> None:
        bridge.register()
        probe.register()

    def refuses(self, checkpoint: Checkpoint) -> str | None:
        """Encoder-decoders, multimodal, recurrent and quantised models, and code that bypasses the interface."""
        return refusal(checkpoint.config)

    def spec(self, checkpoint: Checkpoint, ctx: BuildContext) -> ModelSpec:
        """Probes the model on the meta device: exact shapes and windows, no weights, a fraction of a second."""
        if (reason := self.refuses(checkpoint)) is not None:
            raise ModelError(f"{checkpoint.path}: {reason}")
        dtype = dtype_named(ctx.dtype)
        try:
            module = meta_module(checkpoint, dtype, probe.NAME)
            calls = probe.probe(module, device="meta")
        except Exception as error:
            what = error if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
            raise ModelError(f"{checkpoint.path}: {architecture(checkpoint)} cannot be served: {what}") from error
        return spec_of(checkpoint, ctx, module, tuple(call.layer for call in calls))

    def load(self, checkpoint: Checkpoint, ctx: BuildContext) -> TransformersModel:
        """Load, probe again with the weights in place, compare with `spec`, and check against a stock forward."""
        expected = self.spec(checkpoint, ctx)
        dtype = dtype_named(ctx.dtype)
        module = load_module(checkpoint, dtype, ctx.device, probe.NAME)
        calls = probe.probe(module, device=ctx.device)
        found = spec_of(checkpoint, ctx, module, tuple(call.layer for call in calls))
        check_agreement(checkpoint, expected, found)
        module.set_attn_implementation(bridge.NAME)
        model = TransformersModel(module, found, calls)
        difference = self_check(model, device=ctx.device, dtype=dtype)
        logger.info(
            "%s: %d attention layers, packed; relative difference from the stock forward %.1e",
            found.architecture,
            len(found.layers),
            difference,
        )
        return model


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of a name, among those that models are computed in."""
    if name not in ("float32", "bfloat16", "float16"):
        raise ModelError(f"model family 'transformers' cannot compute in {name!r}; use float32, bfloat16 or float16")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def architecture(checkpoint: Checkpoint) -> str:
    """The class name the checkpoint gives, or its model type."""
    names = checkpoint.config.get("architectures") or [checkpoint.config["model_type"]]
    return str(names[0])


def spec_of(checkpoint: Checkpoint, ctx: BuildContext, module: Any, layers: tuple[LayerSpec, ...]) -> ModelSpec:
    """The specification of a module whose layers have been probed."""
    config = module.config.get_text_config()
    parameters = list(module.parameters())  # shared ones once
    return ModelSpec(
        architecture=architecture(checkpoint),
        layers=layers,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_model_len=longest_context(checkpoint, ctx),
        num_parameters=sum(p.numel() for p in parameters),
        weight_bytes=sum(p.numel() * p.element_size() for p in parameters),
    )


def longest_context(checkpoint: Checkpoint, ctx: BuildContext) -> int:
    """The longest context that is computed exactly. Raises ModelError if a longer one was asked for."""
    config = config_object(checkpoint).get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    asked = ctx.engine.max_model_len
    limit = exact_limit(config)
    if limit is None:
        if longest is None and asked is None:
            raise ModelError(f"{checkpoint.path}: the configuration states no longest context; pass --max-model-len")
        return int(longest or asked or 0)
    tokens, reason = limit
    if asked is not None and asked > tokens:
        raise ModelError(
            f"{checkpoint.path}: --max-model-len {asked} was asked for, but {reason}, "
            f"so that only {tokens} tokens are exact; pass --max-model-len {tokens} or less"
        )
    if longest is not None and longest > tokens:
        logger.warning("%s: context limited to %d of %d tokens: %s", checkpoint.path, tokens, longest, reason)
    return min(tokens, int(longest or tokens))


def check_agreement(checkpoint: Checkpoint, expected: ModelSpec, found: ModelSpec) -> None:
    """Raise ModelError where the loaded model is not what its configuration promised: the pool was sized by that."""
    for layer, (promised, real) in enumerate(zip(expected.layers, found.layers, strict=False)):
        if promised != real:
            raise ModelError(f"{checkpoint.path}: layer {layer} was expected to be {promised} and is {real}")
    if len(expected.layers) != len(found.layers):
        raise ModelError(
            f"{checkpoint.path}: {len(expected.layers)} attention calls were expected, the model makes "
            f"{len(found.layers)}"
        )
