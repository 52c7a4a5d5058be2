"""From a checkpoint to a transformers module with every parameter in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging as library_logging

from enginectl.builtin.transformers_family.weightless import fill
from enginectl.errors import ModelError
from enginectl.interfaces.weights import Checkpoint

MAX_NAMED = 5
"""Tensors that an error names before it says how many more there are."""


def config_object(checkpoint: Checkpoint) -> Any:
    """The library's configuration of the checkpoint; a new object each time, since loading writes to it."""
    values = plain_floats(checkpoint.config)
    return CONFIG_MAPPING[values["model_type"]].from_dict(values)


def plain_floats(value: Any) -> Any:
    """A copy in which infinities, which the library writes as `{"__float__": "Infinity"}`, are numbers."""
    if isinstance(value, dict):
        return (
            float(value["__float__"])
            if value.keys() == {"__float__"}
            else {k: plain_floats(v) for k, v in value.items()}
        )
    return [plain_floats(each) for each in value] if isinstance(value, list) else value


def weightless_module(checkpoint: Checkpoint, dtype: torch.dtype, implementation: Callable[[Any], str]) -> Any:
    """The model before a weight is read, for the probe. implementation: of attention, for a model class."""
    config = config_object(checkpoint)
    config._experts_implementation = "eager"  # reads the experts of a few tokens, where the others copy many
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        module = cls._from_config(config, attn_implementation=implementation(cls), dtype=dtype)
    fill(module)
    return module.eval()


def freeze_rotary(module: Any, max_model_len: int) -> None:
    """Frequencies that would follow the longest position of each batch stay those of `max_model_len` tokens."""
    for part in following_rotary(module):
        kinds = part.rope_type if isinstance(part.rope_type, dict) else {None: part.rope_type}
        for layer_type, kind in kinds.items():
            if not follows(kind):
                continue
            prefix, which = ("", {}) if layer_type is None else (f"{layer_type}_", {"layer_type": layer_type})
            held = getattr(part, f"{prefix}inv_freq")
            found, scaling = ROPE_INIT_FUNCTIONS[kind](part.config, held.device, seq_len=max_model_len, **which)
            part.register_buffer(f"{prefix}inv_freq", found.to(held.dtype), persistent=False)
            setattr(part, f"{prefix}attention_scaling", scaling)
        stop_following(part)


def follows(kind: str) -> bool:
    """Whether RoPE of this kind takes its frequencies from the longest position it is shown."""
    return "dynamic" in kind or kind == "longrope"


def following_rotary(module: nn.Module) -> list[Any]:
    """The rotary embeddings that do, for one kind of layer at least."""
    found = []
    for part in module.modules():
        kind = getattr(part, "rope_type", None)
        if any(follows(str(each)) for each in (kind.values() if isinstance(kind, dict) else [kind])):
            found.append(part)
    return found


def stop_following(part: Any) -> None:
    """Keep the frequencies that the embedding has."""
    kind = part.rope_type
    part.rope_type = "default" if isinstance(kind, str) else dict.fromkeys(kind, "default")


def load_module(checkpoint: Checkpoint, dtype: torch.dtype, device: str, implementation: Callable[[Any], str]) -> Any:
    """The model with its weights on the device.

    A directory of safetensors is mapped into memory; other formats give their tensors one by one. Both go through
    `from_pretrained`, which alone knows the renames and merges between a checkpoint's tensors and the modules.
    """
    config = config_object(checkpoint)
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    mapped = checkpoint.path.is_dir() and any(checkpoint.path.glob("*.safetensors"))
    source: dict[str, Any] = {"use_safetensors": True} if mapped else {"state_dict": state_dict(checkpoint, cls, dtype)}
    with no_progress_bar():
        module, info = cls.from_pretrained(
            str(checkpoint.path) if mapped else None,
            config=config,
            dtype=dtype,
            attn_implementation=implementation(cls),
            local_files_only=True,
            output_loading_info=True,
            **source,
        )
    check_complete(checkpoint, module, info)
    return module.to(device).requires_grad_(False).eval()


def state_dict(checkpoint: Checkpoint, cls: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The checkpoint's tensors, narrowed one by one so that the wide ones do not add up."""
    kept_wide = getattr(cls, "_keep_in_fp32_modules", None) or getattr(cls, "_keep_in_fp32_modules_strict", None)
    narrow = dtype != torch.float32 and not kept_wide
    return {
        name: tensor.to(dtype) if narrow and tensor.is_floating_point() else tensor
        for name, tensor in checkpoint.tensors()
    }


def check_complete(checkpoint: Checkpoint, module: nn.Module, info: dict[str, Any]) -> None:
    """Raise ModelError if a parameter was not filled, or a tensor of the checkpoint was not used."""
    problems = []
    for what, key in (("missing", "missing_keys"), ("unexpected", "unexpected_keys"), ("misshapen", "mismatched_keys")):
        names = sorted(name if isinstance(name, str) else name[0] for name in info.get(key) or ())
        if names:
            rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            problems.append(f"{what}: {', '.join(names[:MAX_NAMED])}{rest}")
    if errors := info.get("error_msgs"):
        problems.append(str(errors if isinstance(errors, str) else errors[0]))
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if empty := [name for name, tensor in tensors if tensor.is_meta]:
        problems.append(f"never filled: {', '.join(empty[:MAX_NAMED])}")
    if problems:
        raise ModelError(
            f"{checkpoint.path}: the weights do not fit {type(module).__name__} ({'; '.join(problems)}). "
            "Check that config.json and the weights are of the same model"
        )


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keep the library's bar out of the log while weights load."""
    shown = library_logging.is_progress_bar_enabled()
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            library_logging.enable_progress_bar()
