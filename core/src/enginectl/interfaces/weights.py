"""Weights sources: a path on disk to a configuration, tensors and a tokenizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class Checkpoint(ABC):
    """An opened checkpoint. Opening reads metadata only."""

    path: Path
    config: dict[str, Any]
    """As in a Hugging Face config.json, `model_type` and `architectures` included."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """Name of the dtype most weights are stored in; for quantised files the one they dequantise to."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the weights as stored."""

    @property
    @abstractmethod
    def generation_config(self) -> dict[str, Any]:
        """As in generation_config.json; empty if there is none."""

    @abstractmethod
    def tokenizer_dir(self) -> Path | None:
        """A directory with tokenizer.json, tokenizer_config.json and chat template; None if there is no tokenizer."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) pairs under the names and shapes of the Hugging Face model class, on the CPU."""


class WeightsSource(ABC):
    """Recognises and opens one format."""

    @abstractmethod
    def matches(self, path: Path) -> bool:
        """Whether the path looks like this format. Cheap: names and magic numbers."""

    @abstractmethod
    def open(self, path: Path) -> Checkpoint:
        """Read the metadata. Raises ModelError if the file is damaged or not supported, with the reason."""
