"""What each layer's attention really is, seen by running one tiny forward.

Configurations name windows, chunks and head sizes in many ways, and some models use none of them. The truth is what
arrives at the attention function: the shapes, the scale, the soft cap, and the mask function the model asked for.
The same forward tells it before a weight is read, by a model whose parameters take no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from enginectl.errors import ModelError
from enginectl.interfaces.model import LayerSpec

NAME = "enginectl-probe"
"""The attention implementation during the probe."""

FAR = 1 << 20
"""A distance that no window reaches."""


@dataclass(frozen=True, slots=True)
class Mask:
    """Stands in for a mask: how the model would have computed it."""

    visible: Callable[..., Any]
    local_size: int | None

    def sees(self, query: int, key: int) -> bool:
        """Whether the query at one position sees the key at another."""
        return bool(self.visible(0, 0, torch.tensor(query), torch.tensor(key)))


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor that a layer keeps of each sequence. kind: "conv" or "recurrent"; index: which of the layer's."""

    layer: int
    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of one sequence."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Probe:
    """What one forward showed: its attention layers, the module that calls attention for each, and other state."""

    layers: tuple[LayerSpec, ...]
    callers: tuple[nn.Module, ...] = ()
    states: tuple[StateShape, ...] = ()


class Log:
    """Lies on the modules of the model that is probed and collects their calls."""

    def __init__(self) -> None:
        self.layers: list[LayerSpec] = []
        self.callers: list[nn.Module] = []


def describe_mask(**kwargs: Any) -> Mask:
    """The mask function during the probe."""
    return Mask(kwargs["mask_function"], kwargs.get("local_size"))


def record(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The attention function during the probe: notes the call, returns zeros."""
    log: Log = module._enginectl  # type: ignore[assignment]
    window, chunk = reach(attention_mask)
    if kwargs.get("position_bias") is not None:
        raise ModelError("its attention adds a position bias to the scores, which no backend takes")
    scaling = kwargs.get("scaling")
    layer = LayerSpec(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=key.shape[3],
        v_head_dim=value.shape[3],
        scale=float(query.shape[3] ** -0.5 if scaling is None else scaling),
        window=window,
        chunk=chunk,
        soft_cap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux") is not None,
    )
    log.layers.append(layer)
    log.callers.append(module)
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def reach(mask: Any) -> tuple[int | None, int | None]:
    """(window, chunk) of a layer, checked against what its mask function says of single pairs."""
    if not isinstance(mask, Mask):
        raise ModelError("it makes its attention masks itself, so what each layer sees is unknown")
    size = mask.local_size
    if size is None:
        expect(mask, (FAR, 0, True), (5, 5, True), (5, 6, False))
        return None, None
    if size > 1 and not mask.sees(size, size - 1):
        expect(mask, (2 * size - 1, size, True), (2 * size, 2 * size - 1, False), (2 * size, 2 * size + 1, False))
        return None, size
    expect(mask, (FAR, FAR - size + 1, True), (FAR, FAR - size, False), (5, 5, True), (5, 6, False))
    return size, None


def expect(mask: Mask, *pairs: tuple[int, int, bool]) -> None:
    """Raise ModelError if the mask shows one of (query, key) otherwise than said."""
    for query, key, expected in pairs:
        if mask.sees(query, key) is not expected:
            what = "shows" if not expected else "hides"
            raise ModelError(f"its attention mask {what} key {key} to query {query}, which is no causal mask we know")


def register() -> None:
    """Make the probe's functions known to transformers. Doing it again changes nothing."""
    AttentionInterface.register(NAME, record)
    AttentionMaskInterface.register(NAME, describe_mask)


def probe(model: Any, *, device: str) -> Probe:
    """Run two tokens through a model that is set to `NAME`. Raises ModelError if a layer's attention does not arrive."""
    log = run(model, probe_inputs(device) | {"use_cache": False})
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    check_count(len(log.layers), max(1, num_layers))
    return Probe(tuple(log.layers), tuple(log.callers))


def run(model: Any, inputs: dict[str, Any]) -> Log:
    """One forward with a log on every module. Returns its attention calls in order."""
    log = Log()
    for module in model.modules():
        module._enginectl = log
    try:
        with torch.inference_mode():
            model(**inputs)
    finally:
        for module in model.modules():
            del module._enginectl
    return log


def check_count(num_found: int, num_expected: int) -> None:
    """Raise ModelError if layers attend by themselves."""
    if num_found < num_expected:
        raise ModelError(f"only {num_found} of its {num_expected} layers call the attention interface")


def probe_inputs(device: str) -> dict[str, Any]:
    """Two tokens, of which the first's logits are wanted."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    keep = torch.zeros(1, dtype=torch.long, device=device)
    return {"input_ids": ids, "position_ids": torch.arange(2, device=device).unsqueeze(0), "logits_to_keep": keep}
