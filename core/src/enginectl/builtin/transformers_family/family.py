"""The model family that serves what transformers can run through our attention, and refuses the rest by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from enginectl.builtin.transformers_family import bridge, probe
from enginectl.builtin.transformers_family.loading import config_object, freeze_rotary, load_module, weightless_module
from enginectl.builtin.transformers_family.model import PackedModel, TransformersModel
from enginectl.builtin.transformers_family.probe import Probe
from enginectl.builtin.transformers_family.refusals import WHOLE_PROMPTS, exact_limit, refusal
from enginectl.builtin.transformers_family.self_check import self_check
from enginectl.builtin.transformers_family.sequence_model import SequenceModel
from enginectl.builtin.transformers_family.state_model import StateModel
from enginectl.builtin.transformers_family.states import PLACES, carries_state
from enginectl.builtin.transformers_family.weightless import OnlySmall
from enginectl.context import BuildContext
from enginectl.errors import ModelError
from enginectl.interfaces.model import ModelFamily, ModelSpec
from enginectl.interfaces.weights import Checkpoint

logger = logging.getLogger(__name__)


ROUTES: tuple[type[TransformersModel], ...] = (PackedModel, SequenceModel)
"""Fastest first. Models with a recurrent state have one route of their own."""


class TransformersFamily(ModelFamily):
    """Any decoder-only architecture whose module code calls the attention interface, or keeps its state in a cache."""

    def __init__(self) -> None:
        bridge.register()
        probe.register()

    def refuses(self, checkpoint: Checkpoint) -> str | None:
        """Encoder-decoders, multimodal and quantised models, and code that keeps state where nobody finds it."""
        return refusal(checkpoint.config)

    def spec(self, checkpoint: Checkpoint, ctx: BuildContext) -> ModelSpec:
        """Probes the model without its weights: exact shapes and windows, in a fraction of a second."""
        return self._look_ahead(checkpoint, ctx)[1]

    def load(self, checkpoint: Checkpoint, ctx: BuildContext) -> TransformersModel:
        """Load, and take the first route by which the model says what the library's own forward says."""
        routes, expected = self._look_ahead(checkpoint, ctx)
        module = load_module(checkpoint, dtype_named(ctx.dtype), ctx.device, routes[0].probing)
        freeze_rotary(module, expected.max_model_len)
        failed: dict[str, ModelError] = {}
        for route in routes:
            try:
                return self._serve(route, module, checkpoint, ctx, expected)
            except ModelError as error:
                failed[route.route] = error
                logger.info("%s: not %s: %s", expected.architecture, route.route, error)
        raise unserved(checkpoint, failed)

    def _look_ahead(
        self, checkpoint: Checkpoint, ctx: BuildContext
    ) -> tuple[tuple[type[TransformersModel], ...], ModelSpec]:
        """The routes that are left after a probe without weights, and what the first of them found."""
        if (reason := self.refuses(checkpoint)) is not None:
            raise ModelError(f"{checkpoint.path}: {reason}")
        routes = (StateModel,) if carries_state(config_object(checkpoint)) else ROUTES
        failed: dict[str, ModelError] = {}
        dtype = dtype_named(ctx.dtype)
        for number, route in enumerate(routes):
            try:
                with module_code():
                    module = weightless_module(checkpoint, dtype, route.probing)
                    with OnlySmall():  # type: ignore[no-untyped-call]
                        found = route.examine(module, device="cpu")
            except ModelError as error:
                failed[route.route] = error
            else:
                return routes[number:], spec_of(checkpoint, ctx, module, found)
        raise unserved(checkpoint, failed)

    def _serve(
        self,
        route: type[TransformersModel],
        module: Any,
        checkpoint: Checkpoint,
        ctx: BuildContext,
        expected: ModelSpec,
    ) -> TransformersModel:
        """The model by one route: probed with the weights in place, compared with `spec`, and checked."""
        if module.config._attn_implementation != (wanted := route.probing(module)):
            module.set_attn_implementation(wanted)
        with module_code():
            found = route.examine(module, device=ctx.device)
        spec = spec_of(checkpoint, ctx, module, found)
        check_agreement(checkpoint, expected, spec)
        model = route(module, spec, found)
        try:
            difference = self_check(model, device=ctx.device, dtype=dtype_named(ctx.dtype))
        except ModelError:
            model.release()
            raise
        logger.info(
            "%s: %d attention layers, %s; relative difference from the stock forward %.1e",
            spec.architecture,
            len(spec.layers),
            route.route,
            difference,
        )
        return model


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of a name, among those that models are computed in."""
    if name not in ("float32", "bfloat16", "float16"):
        raise ModelError(f"model family 'transformers' cannot compute in {name!r}; use float32, bfloat16 or float16")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@contextmanager
def module_code() -> Iterator[None]:
    """What the library's module code raises in a forward of two tokens becomes a ModelError."""
    try:
        yield
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelError("its module code raises in a forward of two tokens") from error


def unserved(checkpoint: Checkpoint, failed: dict[str, ModelError]) -> ModelError:
    """What to say of a model that no route can serve. failed: why not, by route; a cause that is not ours comes last."""
    reasons = "; ".join(f"{route}: {error}" for route, error in failed.items())
    causes = [error.__cause__ for error in failed.values() if error.__cause__ is not None]
    said = dict.fromkeys(" ".join([f"{type(cause).__name__}:", *str(cause).split()]) for cause in causes)
    return ModelError(
        f"{checkpoint.path}: {architecture(checkpoint)} cannot be served by model family 'transformers' ({reasons}). It "
        "serves decoders each of whose layers calls the library's attention interface, or keeps what it remembers in the "
        "library's cache; docs/reference/architectures.md lists those that were checked. Take one of them, or another "
        "--model-family" + "".join(f". {each}" for each in said)
    )


def architecture(checkpoint: Checkpoint) -> str:
    """The class name the checkpoint gives, or its model type."""
    names = checkpoint.config.get("architectures") or [checkpoint.config["model_type"]]
    return str(names[0])


def spec_of(checkpoint: Checkpoint, ctx: BuildContext, module: Any, found: Probe) -> ModelSpec:
    """The specification of a module that has been probed."""
    config = module.config.get_text_config()
    parameters = list(module.parameters())  # shared ones once
    return ModelSpec(
        architecture=architecture(checkpoint),
        layers=found.layers,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_model_len=longest_context(checkpoint, ctx),
        num_parameters=sum(p.numel() for p in parameters),
        weight_bytes=sum(p.numel() * p.element_size() for p in parameters),
        state_bytes_per_row=PLACES * sum(state.num_bytes for state in found.states),
        takes_chunks=config.model_type not in WHOLE_PROMPTS,
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
    most = limit.frozen or limit.exact
    if asked is not None and asked > most:
        raise ModelError(
            f"{checkpoint.path}: --max-model-len {asked} was asked for, but {limit.reason}, "
            f"so that only {most} tokens can be computed; pass --max-model-len {most} or less"
        )
    if asked is not None and asked > limit.exact:
        logger.warning(
            "%s: %s; here every request gets those of %d tokens, as asked for, and short ones differ a little from "
            "the library's own. Up to --max-model-len %d they do not",
            checkpoint.path,
            limit.reason,
            asked,
            limit.exact,
        )
        return asked
    if longest is not None and longest > limit.exact:
        way_out = f". Ask for more with --max-model-len, up to {most}" if most > limit.exact else ""
        logger.warning(
            "%s: context limited to %d of %d tokens: %s%s", checkpoint.path, limit.exact, longest, limit.reason, way_out
        )
    return min(limit.exact, int(longest or limit.exact))


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
    if expected.state_bytes_per_row != found.state_bytes_per_row:
        raise ModelError(
            f"{checkpoint.path}: {expected.state_bytes_per_row} bytes of state a row were expected, the model keeps "
            f"{found.state_bytes_per_row}"
        )
