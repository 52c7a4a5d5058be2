"""Facts about this machine, found without importing torch.

Cores and memory are those this process may use: affinity and every cgroup above it count, versions 1 and 2 alike.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from enginectl.context import Gpu, Machine
from enginectl.nvml import find_gpus

DISTRIBUTIONS = (
    "torch",
    "triton",
    "flashinfer-python",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "peft",
    "xgrammar",
    "llguidance",
    "ray",
    "numpy",
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp-proto-http",
)
"""Whose versions a provider may want to know."""

COMPILERS = ("c++", "g++", "clang++")


def detect_machine(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Machine:
    """Look at this machine once. Never raises: what cannot be found is left out.

    root: where /proc and /sys/fs/cgroup are looked for (tests put a tree of files there).
    """
    return Machine(
        num_cores=usable_cores(root),
        memory_bytes=usable_memory_bytes(root),
        cpu_flags=cpu_flags(root),
        gpus=visible_gpus(find_gpus(), environ.get("CUDA_VISIBLE_DEVICES")),
        versions=installed_versions(DISTRIBUTIONS),
        has_compiler=any(shutil.which(name, path=environ.get("PATH")) for name in COMPILERS),
    )


def usable_cores(root: Path = Path("/")) -> int:
    """Cores in this process's affinity mask, or fewer if a cgroup grants less CPU time; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quotas = [_cpu_quota(directory) for directory in _cgroup_directories(root, ("cpu",))]
    # A quota of 2.5 cores keeps two threads busy; a third would only be throttled.
    return max(1, min([cores, *(int(quota) for quota in quotas if quota is not None)]))


def usable_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes this process can still take: what the machine has available, or less if a cgroup's limit is nearer."""
    rooms = [_memory_room(directory) for directory in _cgroup_directories(root, ("memory",))]
    limits = [room for room in rooms if room is not None]
    available = _available_bytes(root)
    if available is not None:
        limits.append(available)
    return max(0, min(limits)) if limits else _physical_memory_bytes()


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Features of the first core, as /proc/cpuinfo spells them (`flags` on x86, `Features` on ARM)."""
    for line in _lines(root / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def visible_gpus(gpus: Iterable[tuple[str, Gpu]], visible: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; as in CUDA, the first bad entry ends the list.

    gpus: (UUID, Gpu) in PCI order. visible: indices or UUIDs (or a prefix of one), comma separated; None leaves all.
    """
    found = list(gpus)
    if visible is None:
        return tuple(gpu for _, gpu in found)
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.startswith("MIG-"):
            # A slice: its name and compute capability are its card's. Its memory is asked of the driver when it is used.
            matches = [gpu for _, gpu in found[:1]]
        elif entry.isdigit():
            matches = [found[int(entry)][1]] if int(entry) < len(found) else []
        else:
            matches = [gpu for uuid, gpu in found if entry and uuid.startswith(entry)]
        if not matches:
            break
        chosen.append(matches[0])
    return tuple(chosen)


def seen_from(machine: Machine, device: str) -> Machine:
    """The machine as parts that compute on this device see it: a CPU has no GPU beside it, and `cuda:N` comes first."""
    if not device.startswith("cuda"):
        return msgspec.structs.replace(machine, gpus=())
    index = int(device.partition(":")[2] or 0)
    chosen, others = machine.gpus[index : index + 1], machine.gpus[:index] + machine.gpus[index + 1 :]
    return msgspec.structs.replace(machine, gpus=chosen + others)


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Distribution name to version, for those that are installed."""
    versions: dict[str, str] = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


# -- cgroups -------------------------------------------------------------------------------------------------------


def _cgroup_directories(root: Path, controllers: tuple[str, ...]) -> Iterator[Path]:
    """Directories of this process's groups and of every group above them, for these controllers and for version 2.

    Inside a container the path in /proc/self/cgroup is often the host's; those that do not exist here are skipped, and
    the mount point itself, which then is the container's own group, always comes last.
    """
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, names, path = ([*line.split(":", 2), "", ""])[:3]
        if names and not set(names.split(",")) & set(controllers):
            continue
        tops = [mount / names, *(mount / name for name in names.split(","))] if names else [mount, mount / "unified"]
        for top in dict.fromkeys(tops):
            yield from _upwards(top, path)


def _upwards(top: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part and part != ".."]
    for length in range(len(parts), -1, -1):
        directory = top.joinpath(*parts[:length])
        if directory.is_dir():
            yield directory


def _cpu_quota(directory: Path) -> float | None:
    """Cores' worth of CPU time granted by this group, or None for no limit."""
    words = _text(directory / "cpu.max").split()
    if len(words) == 2 and words[0] != "max":
        quota, period = _number(words[0]), _number(words[1])
    else:
        quota = _number(_text(directory / "cpu.cfs_quota_us"))
        period = _number(_text(directory / "cpu.cfs_period_us"))
    if quota is None or period is None or quota <= 0 or period <= 0:
        return None
    return quota / period


def _memory_room(directory: Path) -> int | None:
    """Bytes left under this group's limit, or None for no limit. File cache that can be dropped counts as free."""
    limit = _number(_text(directory / "memory.max"))
    used = _number(_text(directory / "memory.current"))
    inactive_key = "inactive_file"
    if limit is None:
        limit = _number(_text(directory / "memory.limit_in_bytes"))
        used = _number(_text(directory / "memory.usage_in_bytes"))
        inactive_key = "total_inactive_file"
    if limit is None or limit <= 0 or limit >= 1 << 60:  # version 1 writes "no limit" as a huge number
        return None
    droppable = 0
    for line in _lines(directory / "memory.stat"):
        key, _, value = line.partition(" ")
        if key == inactive_key:
            droppable = _number(value) or 0
    return limit - max(0, (used or 0) - droppable)


# -- small files ---------------------------------------------------------------------------------------------------


def _available_bytes(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            kibibytes = _number(value.split()[0]) if value.split() else None
            return None if kibibytes is None else kibibytes * 1024
    return None


def _physical_memory_bytes() -> int:
    """For systems without /proc."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _number(text: str) -> int | None:
    try:
        return int(text.strip())
    except ValueError:
        return None
