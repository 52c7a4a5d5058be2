"""From the library's attention calls to our backend.

transformers keeps one table of attention functions a process. Ours is a trampoline without state: it finds the step's
plan through a `Site` that lies on the calling module, so that any number of engines can live in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from enginectl.interfaces.attention import AttentionBackend

NAME = "enginectl"
"""The attention implementation our models are set to. It has no mask function: backends make their own masks."""


class Step:
    """What every attention module of one model shares: the backend, and the plan of the step that is running."""

    __slots__ = ("backend", "plan")

    def __init__(self) -> None:
        self.backend: AttentionBackend | None = None
        self.plan: Any = None


class Site:
    """Where one module calls attention: which layers of the specification its calls are, in their order."""

    __slots__ = ("layers", "step", "turn")

    def __init__(self, step: Step, layers: tuple[int, ...]) -> None:
        self.step = step
        self.layers = layers
        self.turn = 0

    def next_layer(self) -> int:
        """The layer of this call. A module that calls once a forward, as nearly all do, has one."""
        layers = self.layers
        if len(layers) == 1:
            return layers[0]
        layer = layers[self.turn]
        self.turn = (self.turn + 1) % len(layers)
        return layer


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The trampoline: store this step's keys and values, attend over the paged context.

    query: [1, num_heads, num_tokens, head_dim]; key, value: [1, num_kv_heads, num_tokens, …], after RoPE; or a token
    of each of several sequences, [num_tokens, …, 1, …]. Returns ([1, num_tokens, num_heads, v_head_dim], None), or
    [num_tokens, 1, …].
    """
    site: Site = module._enginectl  # type: ignore[assignment]
    step = site.step
    backend, plan = step.backend, step.plan
    assert backend is not None, "the model was called before use_attention()"
    layer = site.next_layer()
    if query.shape[0] != 1:
        backend.write_kv(layer, key[:, :, 0], value[:, :, 0], plan)
        return backend.attend(layer, query[:, :, 0], plan, sinks=kwargs.get("s_aux")).unsqueeze(1), None
    backend.write_kv(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), plan)
    out = backend.attend(layer, query[0].transpose(0, 1), plan, sinks=kwargs.get("s_aux"))
    return out.unsqueeze(0), None


def register() -> None:
    """Make the trampoline known to transformers. Doing it again changes nothing."""
    AttentionInterface.register(NAME, attend)


def connect(callers: Sequence[nn.Module], step: Step) -> list[Site]:
    """Put a site on every module that calls attention. callers: the modules in the order of their calls.

    Returns the sites of modules that call more than once a forward.
    """
    layers: dict[nn.Module, tuple[int, ...]] = {}
    for layer, module in enumerate(callers):
        layers[module] = (*layers.get(module, ()), layer)
    sites = []
    for module, own in layers.items():
        site = Site(step, own)
        module._enginectl = site  # type: ignore[assignment]
        sites.append(site)
    return [site for site in sites if len(site.layers) > 1]
