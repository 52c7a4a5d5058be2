"""What is left for the KV pool, over a device whose memory is a number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from enginectl.errors import OutOfMemoryError, UnsupportedError
from enginectl.kv_memory import MARGIN_BYTES, DeviceMemory, KVMemory, check_architecture, use_cuda

GIB = 1 << 30
TOTAL = 80 * GIB


class FakeMemory(DeviceMemory):
    """others: bytes that other engines and processes hold. cached: bytes that the allocator keeps for nobody."""

    def __init__(self, others: int = 0) -> None:
        self.others = others
        self.tensors = 0
        self.cached = 0
        self._peak = 0

    def take(self, size: int) -> None:
        """Allocate, or raise as torch does."""
        if self.others + self.tensors + self.cached + size > TOTAL:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate …")
        self.tensors += size
        self._peak = max(self._peak, self.held())

    def drop(self, size: int) -> None:
        """Give back to the allocator, not to the device."""
        self.tensors -= size
        self.cached += size

    def step(self, size: int) -> Callable[[], None]:
        """A step that takes so much while it runs."""

        def run() -> None:
            self.take(size)
            self.drop(size)

        return run

    def free_and_total(self) -> tuple[int, int]:
        return TOTAL - self.others - self.tensors - self.cached, TOTAL

    def held(self) -> int:
        return self.tensors + self.cached

    def peak(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self.held()

    def release(self) -> None:
        self.cached = 0


def kv_bytes(memory: FakeMemory, utilization: float = 0.9, weights: int = 16 * GIB, step: int = 2 * GIB) -> int:
    kv = KVMemory(memory, utilization)
    with kv.loading("the weights"):
        memory.take(weights)
    memory.take(GIB)
    memory.drop(GIB)  # what loading left in the allocator is not lost
    return kv.measure(memory.step(step))


def test_what_the_share_leaves_beside_weights_and_the_largest_step() -> None:
    """72 GiB of 80, less 16 of weights and 2 of activations."""
    assert kv_bytes(FakeMemory()) == int(TOTAL * 0.9) - 18 * GIB - MARGIN_BYTES


def test_the_pool_and_the_step_fit_together() -> None:
    """With everything allowed, what is promised can be taken, and the step still runs."""
    memory = FakeMemory()
    memory.take(kv_bytes(memory, 1.0))
    memory.step(2 * GIB)()


def test_two_engines_of_a_half_each_share_a_gpu() -> None:
    """The share is of this engine, whatever others hold."""
    memory = FakeMemory()
    first = kv_bytes(memory, 0.5)
    memory.take(first)
    before = memory.tensors
    second = kv_bytes(memory, 0.45)
    memory.take(second)
    memory.step(2 * GIB)()
    assert first == 40 * GIB - 18 * GIB - MARGIN_BYTES
    assert memory.tensors - before <= 0.45 * TOTAL


@pytest.mark.parametrize(("others", "left"), [(8, 54), (40, 22), (60, 2)])
def test_memory_of_another_process_makes_the_pool_smaller(others: int, left: int) -> None:
    """What is free bounds what the share would allow."""
    memory = FakeMemory(others * GIB)
    found = kv_bytes(memory)
    assert found == min(left * GIB, int(TOTAL * 0.9) - 18 * GIB) - MARGIN_BYTES
    memory.take(found)
    memory.step(2 * GIB)()


@pytest.mark.parametrize(
    ("others", "utilization", "step", "words"),
    [
        (70, 0.9, 2, r"the weights do not fit .*10 GiB were free, 70 GiB were held by others"),
        (62, 0.9, 3, r"the largest step does not fit beside 16 GiB of weights.*lower --max-num-batched-tokens"),
        (62, 0.9, 2, r"nothing is left for the KV cache.*62 GiB were held by others.*raise --gpu-memory-utilization"),
        (0, 0.2, 2, r"nothing is left for the KV cache: of the 20% of 80 GiB .* took 16 GiB and .* takes 2 GiB"),
    ],
)
def test_too_little_is_an_error_that_says_why(others: int, utilization: float, step: int, words: str) -> None:
    """What was asked, found, and what to do."""
    with pytest.raises(OutOfMemoryError, match=words):
        kv_bytes(FakeMemory(others * GIB), utilization, step=step * GIB)


class Holder:
    """Holds memory until nobody holds it, and then leaves it in the allocator."""

    def __init__(self, memory: FakeMemory, size: int) -> None:
        self._memory, self._size = memory, size
        memory.take(size)

    def __del__(self) -> None:
        self._memory.drop(self._size)


def test_what_graphs_keep_is_left_for_them() -> None:
    """They are recorded after the pool is there; measured, and given back until then."""
    memory = FakeMemory()
    kv = KVMemory(memory, 0.9)
    plain = kv.measure(memory.step(2 * GIB))
    assert plain - kv.measure(memory.step(2 * GIB), lambda: Holder(memory, GIB // 2)) == GIB // 2
    assert memory.held() == 0


def test_what_lies_between_tensors_counts_for_the_step() -> None:
    """A step of 1 GiB of tensors for which the allocator took 3: the pool must not be promised the other two."""
    memory = FakeMemory()
    kv = KVMemory(memory, 0.9)

    def fragmented() -> None:
        memory.take(2 * GIB)
        memory.drop(2 * GIB)
        memory.step(GIB)()

    assert kv.measure(memory.step(GIB)) - kv.measure(fragmented) == 2 * GIB


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),
        ((8, 0), ["sm_86", "sm_90"], False),
        ((7, 0), ["sm_75", "sm_80"], False),
        ((12, 0), ["sm_80", "sm_90a"], False),
        ((12, 0), ["sm_80", "compute_90"], True),
    ],
)
def test_an_architecture_that_torch_was_not_built_for_is_refused(
    capability: tuple[int, int], built_for: list[str], runs: bool
) -> None:
    """Instead of "no kernel image is available" at the first step."""
    if runs:
        check_architecture("Test GPU", capability, built_for)
        return
    with pytest.raises(UnsupportedError, match=rf"Test GPU has compute capability {capability[0]}\.{capability[1]}"):
        check_architecture("Test GPU", capability, built_for)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here")
def test_a_torch_without_cuda_is_said_to_be_one() -> None:
    """A GPU and a CPU build of torch: the most frequent mistake."""
    with pytest.raises(UnsupportedError, match=r"--device cuda:0: torch \S+ (was built without CUDA|finds no driver)"):
        use_cuda("cuda:0")
