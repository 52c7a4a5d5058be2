"""The model family that runs the architectures it knows without transformers' model code, and refuses the rest."""

from __future__ import annotations

import logging

import torch

from enginectl.builtin.native.block import PlainBlock
from enginectl.builtin.native.config import Structure, structure_of
from enginectl.builtin.native.head import PlainHead
from enginectl.builtin.native.model import NativeModel
from enginectl.builtin.native.rope import RopeTable
from enginectl.builtin.native.weights import Loader, num_parameters
from enginectl.context import BuildContext
from enginectl.errors import ModelError
from enginectl.interfaces.model import ModelFamily, ModelSpec
from enginectl.interfaces.ops import Block, BlockWeights, LowRankBlock, OpSet
from enginectl.interfaces.weights import Checkpoint

log = logging.getLogger("enginectl.native")


class NativeFamily(ModelFamily):
    """One decoder for Llama and its kin, made from the configuration and the op set of this device."""

    needs_op_set = True

    def refuses(self, checkpoint: Checkpoint) -> str | None:
        """An architecture, a field or a RoPE that is not known here."""
        try:
            structure_of(checkpoint.config)
        except ModelError as error:
            return str(error)
        return None

    def spec(self, checkpoint: Checkpoint, ctx: BuildContext) -> ModelSpec:
        """From the configuration alone."""
        try:
            structure = structure_of(checkpoint.config)
        except ModelError as error:
            raise ModelError(f"{checkpoint.path}: {error}") from error
        return model_spec(structure, checkpoint, ctx)

    def load(self, checkpoint: Checkpoint, ctx: BuildContext) -> NativeModel:
        """Read the weights once, layer by layer, each laid out for the device as soon as it is complete."""
        spec, structure = self.spec(checkpoint, ctx), structure_of(checkpoint.config)
        ops = ctx.parts["op_set"]
        assert isinstance(ops, OpSet), "the op set is built before the model"
        blocks: dict[int, Block] = {}

        def build_layer(layer: int, weights: BlockWeights) -> None:
            block = ops.block(structure.blocks[layer], weights)
            if block is None or (ctx.engine.enable_lora and not (block.linears or isinstance(block, LowRankBlock))):
                block = PlainBlock(structure.blocks[layer], weights, ops)
            blocks[layer] = block

        with torch.inference_mode():
            loader = Loader(structure, checkpoint, dtype=dtype_named(ctx.dtype), device=ctx.device)
            ends = loader.run(build_layer)
            head = ops.head(ends.norm, ends.head, structure.blocks[0])
            if head is None:
                head = PlainHead(ends.norm, ends.head, structure.blocks[0], ops)
            num_positions = ctx.engine.max_model_len or spec.max_model_len
            ropes = [RopeTable(rope, num_positions, ctx.device) for rope in structure.ropes]
        in_order = [blocks[layer] for layer in range(len(blocks))]
        kinds = sorted({type(block).__name__ for block in in_order})
        log.info("%s: %d layers (%s), %s", spec.architecture, len(in_order), ", ".join(kinds), type(head).__name__)
        return NativeModel(
            spec,
            structure,
            embedding=ends.embedding,
            blocks=in_order,
            head=head,
            ropes=ropes,
            fused=frozenset(loader.fused),
        )


def model_spec(structure: Structure, checkpoint: Checkpoint, ctx: BuildContext) -> ModelSpec:
    """What the engine must know. Raises ModelError if a longer context was asked for than is exact."""
    asked = ctx.engine.max_model_len
    if structure.limit and asked is not None and asked > structure.max_model_len:
        raise ModelError(
            f"{checkpoint.path}: --max-model-len {asked} was asked for, but {structure.limit}, so that only "
            f"{structure.max_model_len} tokens are exact; pass --max-model-len {structure.max_model_len} or less"
        )
    if structure.limit and asked is None:
        log.warning("%s: context limited to %d tokens: %s", checkpoint.path, structure.max_model_len, structure.limit)
    count = num_parameters(structure)
    return ModelSpec(
        architecture=structure.architecture,
        layers=structure.layers,
        vocab_size=structure.vocab_size,
        hidden_size=structure.hidden_size,
        max_model_len=structure.max_model_len,
        num_parameters=count,
        weight_bytes=count * dtype_named(ctx.dtype).itemsize,
    )


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of a name, among those that models are computed in."""
    if name not in ("float32", "bfloat16", "float16"):
        raise ModelError(f"model family 'native' cannot compute in {name!r}; use float32, bfloat16 or float16")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
