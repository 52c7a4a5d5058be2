"""A PEFT checkpoint to the weights of each site of the model, or the reason why it does not fit."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from enginectl.errors import RequestError, nearest
from enginectl.interfaces.model import LinearSite
from enginectl_lora_sgmv.peft_config import LoraSpec, parse_config

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
_MAX_NAMED = 3


class Pair(NamedTuple):
    """One module's part. down: [rank, in_size]. up: [out_size, rank], the scale multiplied in."""

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """sites: index of a site to a pair, or None, for each of its modules. rank: the largest."""

    version: str
    rank: int
    sites: dict[int, tuple[Pair | None, ...]]


@dataclass(frozen=True, slots=True)
class Target:
    """What adapters are read for: the model's sites, the dtype, the limit on ranks. is_pinned: page-locked tensors."""

    sites: Sequence[LinearSite]
    dtype: torch.dtype
    max_rank: int
    is_pinned: bool = False


def read_adapter(path: Path, target: Target) -> AdapterWeights:
    """Read and check everything. Raises RequestError with the reason. Thread safe."""
    config, weights = _read(path)
    spec = parse_config(config)
    halves = _halves(_tensors(weights))
    places = {module: (i, part) for i, site in enumerate(target.sites) for part, module in enumerate(site.modules)}
    _check_modules(spec, halves, places)
    found: dict[int, list[Pair | None]] = {}
    for module, sides in halves.items():
        index, part = places[module]
        site = target.sites[index]
        pair = _pair(module, sides, spec, site.in_size, site.out_sizes[part], target)
        found.setdefault(index, [None] * len(site.modules))[part] = pair
    digest = hashlib.sha256(len(config).to_bytes(8, "little") + config)
    digest.update(weights)
    return AdapterWeights(
        digest.hexdigest()[:32],
        max(pair.down.shape[0] for pairs in found.values() for pair in pairs if pair is not None),
        {index: tuple(pairs) for index, pairs in found.items()},
    )


def _read(path: Path) -> tuple[bytes, bytes]:
    if not path.is_dir():
        raise RequestError(f"no directory {str(path)!r}; give one with {CONFIG} and {WEIGHTS}")
    found = []
    for name in (CONFIG, WEIGHTS):
        try:
            found.append((path / name).read_bytes())
        except FileNotFoundError as error:
            hint = ""
            if name == WEIGHTS and (path / "adapter_model.bin").exists():
                hint = "; adapter_model.bin is a pickle, which is not read: save it again with safe_serialization=True"
            raise RequestError(f"{str(path)!r} has no {name}{hint}") from error
        except OSError as error:
            raise RequestError(f"{name} in {str(path)!r} cannot be read: {error.strerror}") from error
    return found[0], found[1]


def _tensors(weights: bytes) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(weights)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise RequestError(f"{WEIGHTS} is damaged: {error}") from error
    return tensors


def _halves(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Module to its tensors "A" and "B"."""
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            raise RequestError(f"{WEIGHTS}: tensor {name!r} is not served: {_why(name)}")
        if tensor.dtype not in _FLOATS:
            raise RequestError(f"{WEIGHTS}: tensor {name!r} is {tensor.dtype}; float32, float16 or bfloat16 is read")
        if not torch.isfinite(tensor).all():
            raise RequestError(f"{WEIGHTS} is damaged: tensor {name!r} has values that are not finite")
        halves.setdefault(match["module"], {})[match["side"]] = tensor
    for module, sides in halves.items():
        if len(sides) < 2:
            missing = "lora_B" if "A" in sides else "lora_A"
            raise RequestError(f"{WEIGHTS} is damaged: module {module!r} has no {missing}")
    return halves


def _why(name: str) -> str:
    if "lora_embedding" in name:
        return "adapters on embeddings are not supported"
    if "lora_magnitude_vector" in name:
        return "it is DoRA's, which is not supported"
    if name.endswith("bias"):
        return "biases are not supported"
    return "it is neither lora_A nor lora_B of a linear module"


def _check_modules(spec: LoraSpec, halves: dict[str, dict[str, Tensor]], places: dict[str, tuple[int, int]]) -> None:
    named = [module for module in places if spec.targets(module)]
    strange = [module for module in halves if module not in places]
    if not named and len(strange) == len(halves):
        asked = spec.target_modules if isinstance(spec.target_modules, str) else ", ".join(sorted(spec.target_modules))
        has = sorted({module.rpartition(".")[2] for module in places})
        raise RequestError(
            f"target_modules ({asked}) matches no linear that adapters may use here; the model has {', '.join(has)}"
        )
    if strange:
        raise RequestError(
            f"{WEIGHTS} holds {_some(strange)}, which adapters cannot use in this model{_reason(strange[0])}"
            f"{nearest(strange[0], places)}"
        )
    if unnamed := [module for module in halves if not spec.targets(module)]:
        raise RequestError(f"{WEIGHTS} holds {_some(unnamed)}, which target_modules does not name")
    if missing := [module for module in named if module not in halves]:
        raise RequestError(f"{WEIGHTS} is incomplete: target_modules names {_some(missing)}, which it does not hold")


def _reason(module: str) -> str:
    last = module.rpartition(".")[2]
    if last in ("lm_head", "embed_tokens", "embed_out", "wte", "wpe"):
        return ": adapters on embeddings and on the head are not supported"
    if ".experts." in module:
        return ": adapters on experts are not supported"
    return ""


def _some(modules: list[str]) -> str:
    more = f" and {len(modules) - _MAX_NAMED} more" if len(modules) > _MAX_NAMED else ""
    return ", ".join(modules[:_MAX_NAMED]) + more


def _pair(module: str, sides: dict[str, Tensor], spec: LoraSpec, in_size: int, out_size: int, target: Target) -> Pair:
    down, up, rank = sides["A"], sides["B"], spec.rank(module)
    if down.ndim != 2 or down.shape[1] != in_size:
        raise RequestError(_another_base(module, "lora_A", down, f"(rank, {in_size})"))
    if up.ndim != 2 or up.shape[0] != out_size:
        raise RequestError(_another_base(module, "lora_B", up, f"({out_size}, rank)"))
    if down.shape[0] != rank or up.shape[1] != rank:
        raise RequestError(
            f"module {module!r}: {CONFIG} says rank {rank}, its tensors have {down.shape[0]} and {up.shape[1]}"
        )
    if rank > target.max_rank:
        raise RequestError(
            f"module {module!r} has rank {rank}, and at most {target.max_rank} is served; start with "
            f"--max-lora-rank {rank}"
        )
    up = up.float() * spec.scale(module)
    made = [tensor.to(target.dtype).contiguous() for tensor in (down, up)]
    return Pair(*(tensor.pin_memory() if target.is_pinned else tensor for tensor in made))


def _another_base(module: str, side: str, tensor: Tensor, expected: str) -> str:
    return (
        f"module {module!r}: {side} is {tuple(tensor.shape)} where this model needs {expected}; the adapter is of "
        "another base model"
    )
