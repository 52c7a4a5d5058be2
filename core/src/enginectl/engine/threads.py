"""Compute threads of the engine process, chosen from the cores it may use."""

from __future__ import annotations

from enginectl.config import EngineConfig
from enginectl.context import Machine
from enginectl.interfaces.ops import OpSet


def use_threads(config: EngineConfig, machine: Machine) -> int:
    """Set torch's threads; returns how many."""
    import torch

    count = config.num_threads or machine.num_cores
    torch.set_num_threads(count)
    return count


def leave_cores_to(op_set: OpSet | None) -> None:
    """One thread for torch when the op set computes on threads of its own.

    Two teams that wait by spinning take the cores from each other: a sampled token cost 80 ms instead of 16 on a busy
    machine. What is left to torch then, sampling, is small. Called: once, after the parts have sized their own teams.
    """
    if op_set is not None and op_set.has_own_threads:
        import torch

        torch.set_num_threads(1)
