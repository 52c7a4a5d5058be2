"""How much of a GPU is left for the KV pool: measured around the weights and a run of the largest step.

Imports no torch before something is measured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from enginectl.errors import OutOfMemoryError, UnsupportedError
from enginectl.units import format_size

MARGIN_BYTES = 256 << 20
"""Left free: fragments, the libraries' workspaces of other shapes, and what a neighbour takes meanwhile."""


class DeviceMemory(ABC):
    """What can be asked of a GPU's memory."""

    @abstractmethod
    def free_and_total(self) -> tuple[int, int]:
        """Bytes that nobody holds, and bytes there are, whoever holds them."""

    @abstractmethod
    def held(self) -> int:
        """Bytes that this process's allocator holds, for tensors or between them."""

    @abstractmethod
    def peak(self) -> int:
        """The most bytes it held since `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Begin anew."""

    @abstractmethod
    def release(self) -> None:
        """Give memory that no tensor holds back to the device."""


class CudaMemory(DeviceMemory):
    """torch's allocator and the driver."""

    def __init__(self, device: str) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        import torch

        return torch.cuda.mem_get_info(self._device)

    def held(self) -> int:
        import torch

        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        import torch

        return torch.cuda.max_memory_reserved(self._device)

    def reset_peak(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        import torch

        torch.cuda.empty_cache()


class KVMemory:
    """Made before the weights are loaded, so that it knows what the engine itself takes.

    utilization: the share of the device that this engine may use, whatever others hold of it; but no more than is free.
    """

    def __init__(self, memory: DeviceMemory, utilization: float) -> None:
        self._memory = memory
        self._utilization = utilization
        memory.release()
        self._free_before, self._total = memory.free_and_total()

    @contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """Turns out of memory while weights are loaded into an error that says what there was."""
        with _out_of_memory(
            f"{what} do not fit into the {self._share()}: {format_size(self._free_before)} were free, "
            f"{self._held_by_others()}; use a smaller model or --dtype, or free the GPU"
        ):
            yield

    def measure(self, step: Callable[[], object], record: Callable[[], object] = lambda: None) -> int:
        """Bytes for KV beside what is loaded, what `step`, the largest there is, takes while it runs, and what recorded
        steps keep: that of which `record` returns the holder.

        Raises OutOfMemoryError if the step does not fit, or nothing is left.
        """
        memory = self._memory
        memory.release()
        loaded = memory.held()
        memory.reset_peak()
        with _out_of_memory(
            f"the largest step does not fit beside {format_size(loaded)} of weights into the {self._share()}, "
            f"{self._held_by_others()}; lower --max-num-batched-tokens or --max-num-seqs, or free the GPU"
        ):
            step()
        working = memory.peak() - loaded
        memory.release()
        before = memory.held()
        holder = record()
        memory.release()
        working += memory.held() - before
        del holder
        memory.release()
        free, total = memory.free_and_total()
        own = max(0, self._free_before - free)
        left = min(int(total * self._utilization) - own, free) - working - MARGIN_BYTES
        if left <= 0:
            raise OutOfMemoryError(
                f"nothing is left for the KV cache: of the {self._share()}, the engine took {format_size(own)} and its "
                f"largest step takes {format_size(working)}; {format_size(free)} are free, {self._held_by_others()}. "
                "Free the GPU, raise --gpu-memory-utilization, or lower --max-num-batched-tokens or --max-num-seqs"
            )
        return left

    def _share(self) -> str:
        return f"{self._utilization:.0%} of {format_size(self._total)} that --gpu-memory-utilization allows"

    def _held_by_others(self) -> str:
        return f"{format_size(self._total - self._free_before)} were held by others before it started"


@contextmanager
def _out_of_memory(message: str) -> Iterator[None]:
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(message) from error


def use_cuda(device: str) -> None:
    """Make the device the thread's current one, where kernels are launched.

    Raises UnsupportedError if this torch cannot compute on it, with the reason.
    """
    import torch

    if not torch.cuda.is_available():
        built = "was built without CUDA" if torch.version.cuda is None else "finds no driver that serves it"
        raise UnsupportedError(
            f"--device {device}: torch {torch.__version__} {built}; install torch's CUDA build (or a newer driver), or "
            "use --device cpu"
        )
    index, count = int(device.partition(":")[2] or 0), torch.cuda.device_count()
    if index >= count:
        seen = ", ".join(f"cuda:{i}" for i in range(count))
        raise UnsupportedError(f"--device {device}: torch sees no such GPU, only {seen}")
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    check_architecture(name, capability, torch.cuda.get_arch_list())
    torch.cuda.set_device(index)


def check_architecture(name: str, capability: tuple[int, int], built_for: list[str]) -> None:
    """Raise UnsupportedError if kernels built for these (sm_80, compute_90 …) do not run on a GPU of this capability.

    Machine code serves later minor versions of its major version, intermediate code everything later.
    """
    found = capability[0] * 10 + capability[1]
    for entry in built_for:
        kind, _, digits = entry.partition("_")
        number = int(digits.rstrip("abcdefghijklmnopqrstuvwxyz"))
        if number <= found and (kind == "compute" or number // 10 == capability[0]):
            return
    raise UnsupportedError(
        f"{name} has compute capability {capability[0]}.{capability[1]}, and this torch was built for "
        f"{', '.join(built_for)}; install a torch build for it"
    )
