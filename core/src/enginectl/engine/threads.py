"""Compute threads of the engine process, chosen from the cores it may use."""

from __future__ import annotations

from enginectl.config import EngineConfig
from enginectl.context import Machine


def use_threads(config: EngineConfig, machine: Machine) -> int:
    """Set torch's threads; returns how many."""
    import torch

    count = config.num_threads or machine.num_cores
    torch.set_num_threads(count)
    return count
