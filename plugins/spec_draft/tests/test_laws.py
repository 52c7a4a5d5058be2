"""Law 2 with a draft model: the target cut to its first layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginectl.testing.speculation_laws import SpeculationLaws

CutModel = Callable[[Path, int], Path]


class TestDraft(SpeculationLaws):
    @pytest.fixture(scope="class")
    @classmethod
    def speculator(cls, target: Path, cut_model: CutModel) -> Callable[[], dict[str, Any]]:
        draft = {"model": str(cut_model(target, 2))}
        return lambda: {"plugins": ["draft"], "plugin_options": {"draft": draft}}
