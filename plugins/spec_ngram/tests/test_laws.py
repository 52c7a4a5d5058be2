"""Law 2 with prompt lookup."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from enginectl.testing.speculation_laws import SpeculationLaws


class TestNgram(SpeculationLaws):
    @pytest.fixture(scope="class")
    @classmethod
    def speculator(cls, target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        return {"plugins": ["ngram"], "plugin_options": {"ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3}}}
