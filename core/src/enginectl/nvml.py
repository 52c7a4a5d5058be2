"""NVIDIA GPUs through the driver's management library (NVML), by ctypes: no CUDA context, no torch, milliseconds."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

from enginectl.context import Gpu

LIBRARIES = ("libnvidia-ml.so.1", "nvml.dll")
NAME_BYTES = 96


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class NvmlError(Exception):
    """A call of the library failed. The number is NVML's own."""


def find_gpus() -> list[tuple[str, Gpu]]:
    """(UUID, Gpu) of every NVIDIA GPU in PCI order; empty where there is no driver or it does not answer."""
    library = _load()
    if library is None:
        return []
    try:
        _check(library.nvmlInit_v2())
    except (NvmlError, AttributeError):
        return []
    try:
        return _devices(library)
    except (NvmlError, AttributeError):
        return []
    finally:
        with suppress(AttributeError):
            library.nvmlShutdown()


def _load() -> Any | None:
    for name in LIBRARIES:
        with suppress(OSError):
            return ctypes.CDLL(name)
    return None


def _devices(library: Any) -> list[tuple[str, Gpu]]:
    count = ctypes.c_uint()
    _check(library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    devices: list[tuple[str, Gpu]] = []
    for index in range(count.value):
        # A GPU that is lost or that this user may not open leaves the others usable.
        with suppress(NvmlError):
            devices.append(_device(library, index))
    return devices


def _device(library: Any, index: int) -> tuple[str, Gpu]:
    handle = ctypes.c_void_p()
    _check(library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)))
    major, minor, memory = ctypes.c_int(), ctypes.c_int(), _Memory()
    _check(library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)))
    _check(library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)))
    name = _string(library.nvmlDeviceGetName, handle)
    uuid = _string(library.nvmlDeviceGetUUID, handle)
    return uuid, Gpu(name=name, compute_capability=(major.value, minor.value), memory_bytes=memory.total)


def _string(function: Any, handle: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(NAME_BYTES)
    _check(function(handle, buffer, ctypes.c_uint(NAME_BYTES)))
    return buffer.value.decode(errors="replace")


def _check(status: int) -> None:
    if status != 0:
        raise NvmlError(f"NVML answered {status}")
