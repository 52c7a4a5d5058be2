"""Hugging Face tensors to the fused weights of each layer: every tensor has one place, every place is filled once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from enginectl.builtin.native.config import Structure
from enginectl.errors import ModelError
from enginectl.interfaces.ops import BlockSpec, BlockWeights
from enginectl.interfaces.weights import Checkpoint

MAX_NAMED = 5
"""Tensors that an error names before it says how many more there are."""

Shapes = dict[str, tuple[int, ...]]

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_MIXTRAL_EXPERT = re.compile(r"block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")
_MIXTRAL_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_BUFFER = "rotary_emb.inv_freq"
"""Old checkpoints stored these; they follow from the configuration."""

_NORMS = {
    "pre": {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"},
    "post": {"post_attention_layernorm": "attention_post_norm", "post_feedforward_layernorm": "mlp_post_norm"},
    "sandwich": {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_post_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    },
}
"""By norm_order: the module's name in the checkpoint to its field in BlockWeights."""


@dataclass(slots=True)
class Ends:
    """What is not in a layer. head: [vocab_size, hidden_size], the embedding itself where they are tied."""

    embedding: Tensor
    norm: Tensor
    head: Tensor


def end_shapes(structure: Structure) -> Shapes:
    """Names and shapes of the tensors outside the layers."""
    table = (structure.vocab_size, structure.hidden_size)
    shapes: Shapes = {"model.embed_tokens.weight": table, "model.norm.weight": (structure.hidden_size,)}
    return shapes if structure.tied else {**shapes, "lm_head.weight": table}


def layer_shapes(structure: Structure, layer: int) -> Shapes:
    """Names, below `model.layers.N.`, and shapes of one layer's tensors, with every fused one in its parts."""
    spec = structure.blocks[layer]
    hidden, q_size, kv_size = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: Shapes = {f"{name}.weight": (hidden,) for name in _NORMS[spec.norm_order]}
    for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
        _add_linear(shapes, f"self_attn.{name}_proj", size, hidden, structure.qkv_bias)
    _add_linear(shapes, "self_attn.o_proj", hidden, q_size, structure.output_bias)
    if spec.qk_norm is not None:
        flat = spec.qk_norm == "flat"
        shapes["self_attn.q_norm.weight"] = (q_size if flat else spec.head_dim,)
        shapes["self_attn.k_norm.weight"] = (kv_size if flat else spec.head_dim,)
    if not spec.num_experts:
        return shapes | _mlp_shapes("mlp", hidden, spec.intermediate_size, structure.mlp_bias)
    shapes["mlp.gate.weight"] = (spec.num_experts, hidden)
    for expert in range(spec.num_experts):
        shapes |= _mlp_shapes(f"mlp.experts.{expert}", hidden, spec.intermediate_size, False)
    if spec.shared_size:
        shapes |= _mlp_shapes("mlp.shared_expert", hidden, spec.shared_size, False)
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _mlp_shapes(name: str, hidden: int, intermediate: int, bias: bool) -> Shapes:
    shapes: Shapes = {}
    _add_linear(shapes, f"{name}.gate_proj", intermediate, hidden, bias)
    _add_linear(shapes, f"{name}.up_proj", intermediate, hidden, bias)
    _add_linear(shapes, f"{name}.down_proj", hidden, intermediate, bias)
    return shapes


def _add_linear(shapes: Shapes, name: str, num_out: int, num_in: int, bias: bool) -> None:
    shapes[f"{name}.weight"] = (num_out, num_in)
    if bias:
        shapes[f"{name}.bias"] = (num_out,)


def num_parameters(structure: Structure) -> int:
    """Parameters of the whole model, a tied head counted once."""
    layers = [layer_shapes(structure, layer) for layer in range(len(structure.blocks))]
    return sum(math.prod(shape) for shapes in (end_shapes(structure), *layers) for shape in shapes.values())


class Loader:
    """Reads a checkpoint once, in its own order, and hands each layer on as soon as it is complete.

    Tensors whose dtype is right are used as they are mapped; the copies made here live until their layer is built, so
    that memory stays near the size of the model.

    fused: after `run`, which of the linears `self_attn.qkv_proj` and `mlp.gate_up_proj` the checkpoint stores in one.
    """

    def __init__(self, structure: Structure, checkpoint: Checkpoint, *, dtype: torch.dtype, device: str) -> None:
        self._structure = structure
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = torch.device(device)
        self._missing = {layer: layer_shapes(structure, layer) for layer in range(len(structure.blocks))}
        self._missing_ends = end_shapes(structure)
        self._parts: dict[int, dict[str, Tensor]] = {layer: {} for layer in self._missing}
        self._ends: dict[str, Tensor] = {}
        self._unexpected: list[str] = []
        self.fused: set[str] = set()

    def run(self, build_layer: Callable[[int, BlockWeights], None]) -> Ends:
        """Call `build_layer` for every layer, then return the rest. Raises ModelError if anything does not fit."""
        for name, tensor in self._checkpoint.tensors():
            match = _LAYER.fullmatch(name)
            if match is None:
                self._take_end(name, tensor)
            elif not name.endswith(_BUFFER):
                self._take_part(name, int(match[1]), match[2], tensor, build_layer)
        self._check_complete()
        embedding = self._ends["model.embed_tokens.weight"]
        return Ends(embedding, self._ends["model.norm.weight"], self._ends.get("lm_head.weight", embedding))

    def _take_end(self, name: str, tensor: Tensor) -> None:
        shape = self._missing_ends.pop(name, None)
        if shape is not None:
            self._ends[name] = self._placed(self._checked(name, tensor, shape))
        elif name == "lm_head.weight" and self._structure.tied:
            self._check_tied(tensor)
        else:
            self._unexpected.append(name)

    def _check_tied(self, head: Tensor) -> None:
        """A tied checkpoint may store the head too, if it is the embedding."""
        embedding = next((t for n, t in self._checkpoint.tensors() if n == "model.embed_tokens.weight"), None)
        if embedding is None or embedding.shape != head.shape or not torch.equal(embedding, head):
            raise ModelError(
                f"{self._checkpoint.path}: config.json says that lm_head.weight is the embedding, and it is another "
                "tensor; set tie_word_embeddings to false"
            )

    def _take_part(
        self,
        name: str,
        layer: int,
        below: str,
        tensor: Tensor,
        build_layer: Callable[[int, BlockWeights], None],
    ) -> None:
        missing = self._missing.get(layer, {})
        for part, piece in self._split(below, tensor, layer):
            shape = missing.pop(part, None)
            if shape is None:
                self._unexpected.append(name)
                return
            self._parts[layer][part] = self._checked(name, piece, shape)
        if not missing and layer in self._parts:
            build_layer(layer, self._fuse(layer, self._parts.pop(layer)))

    def _split(self, below: str, tensor: Tensor, layer: int) -> list[tuple[str, Tensor]]:
        """One tensor of the checkpoint as parts with the names of `layer_shapes`."""
        if layer >= len(self._structure.blocks):
            return [(below, tensor)]
        spec = self._structure.blocks[layer]
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        if below.startswith("self_attn.qkv_proj.") and tensor.shape[0] == q_size + 2 * kv_size:
            self.fused.add("self_attn.qkv_proj")
            q, k, v = torch.split(tensor, [q_size, kv_size, kv_size])
            return [(below.replace("qkv_proj", f"{part}_proj"), t) for part, t in (("q", q), ("k", k), ("v", v))]
        if below.startswith("mlp.gate_up_proj.") and tensor.shape[0] == 2 * spec.intermediate_size:
            self.fused.add("mlp.gate_up_proj")
            gate, up = tensor.chunk(2)
            return [(below.replace("gate_up_proj", f"{part}_proj"), t) for part, t in (("gate", gate), ("up", up))]
        if below in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
            return _split_experts(below.removeprefix("mlp.experts."), tensor)
        if match := _MIXTRAL_EXPERT.fullmatch(below):
            return [(f"mlp.experts.{match[1]}.{_MIXTRAL_PARTS[match[2]]}.weight", tensor)]
        return [(below.replace("block_sparse_moe.gate.", "mlp.gate."), tensor)]

    def _checked(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise ModelError(
                f"{self._checkpoint.path}: {name} is {tensor.dtype} {tuple(tensor.shape)} where config.json makes it "
                f"{shape} floats; check that the two are of the same model"
            )
        return tensor.to(self._dtype)

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)

    def _check_complete(self) -> None:
        missing = [
            *self._missing_ends,
            *(f"model.layers.{layer}.{part}" for layer, parts in self._missing.items() for part in parts),
        ]
        problems = []
        for what, names in (("missing", missing), ("unexpected", self._unexpected)):
            if names:
                rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
                problems.append(f"{what}: {', '.join(sorted(names)[:MAX_NAMED])}{rest}")
        if problems:
            raise ModelError(
                f"{self._checkpoint.path}: the weights do not fit {self._structure.architecture} "
                f"({'; '.join(problems)}). Check that config.json and the weights are of the same model"
            )

    def _fuse(self, layer: int, parts: dict[str, Tensor]) -> BlockWeights:
        """Parts of one layer, joined and on the device."""
        spec = self._structure.blocks[layer]

        def joined(*names: str) -> Tensor | None:
            """These parts below each other, or None if the layer has none of them."""
            found = [parts.pop(name) for name in names if name in parts]
            return self._placed(torch.cat(found) if len(found) > 1 else found[0]) if found else None

        def needed(*names: str) -> Tensor:
            tensor = joined(*names)
            assert tensor is not None, f"layer {layer} is complete, but for {names}"
            return tensor

        attention, mlp = [f"self_attn.{part}_proj" for part in "qkv"], ("mlp.gate_proj", "mlp.up_proj")
        weights = BlockWeights(
            qkv=needed(*(f"{name}.weight" for name in attention)),
            qkv_bias=joined(*(f"{name}.bias" for name in attention)),
            output=needed("self_attn.o_proj.weight"),
            output_bias=joined("self_attn.o_proj.bias"),
            gate_up=self._placed(_join_experts(spec, parts, "gate_proj", "up_proj"))
            if spec.num_experts
            else needed(*(f"{name}.weight" for name in mlp)),
            down=self._placed(_join_experts(spec, parts, "down_proj"))
            if spec.num_experts
            else needed("mlp.down_proj.weight"),
            gate_up_bias=joined(*(f"{name}.bias" for name in mlp)),
            down_bias=joined("mlp.down_proj.bias"),
            router=joined("mlp.gate.weight"),
            q_norm=joined("self_attn.q_norm.weight"),
            k_norm=joined("self_attn.k_norm.weight"),
            shared_gate_up=joined("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
            shared_down=joined("mlp.shared_expert.down_proj.weight"),
            shared_gate=joined("mlp.shared_expert_gate.weight"),
        )
        for name, field in _NORMS[spec.norm_order].items():
            setattr(weights, field, joined(f"{name}.weight"))
        assert not parts, f"layer {layer} has no place for {sorted(parts)}"
        return weights


def _split_experts(fused: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Experts stored in one tensor, [num_experts, …]."""
    if fused == "down_proj":
        return [(f"mlp.experts.{i}.down_proj.weight", part) for i, part in enumerate(tensor)]
    halves = [part.chunk(2) for part in tensor]
    return [
        (f"mlp.experts.{i}.{name}.weight", part)
        for i, pair in enumerate(halves)
        for name, part in zip(("gate_proj", "up_proj"), pair, strict=True)
    ]


def _join_experts(spec: BlockSpec, parts: dict[str, Tensor], *names: str) -> Tensor:
    """[num_experts, …, …], these parts of each expert below each other."""
    experts = [[parts.pop(f"mlp.experts.{i}.{name}.weight") for name in names] for i in range(spec.num_experts)]
    return torch.stack([torch.cat(own) if len(own) > 1 else own[0] for own in experts])
