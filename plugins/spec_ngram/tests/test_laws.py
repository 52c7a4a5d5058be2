"""Law 2 with prompt lookup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from enginectl.testing.speculation_laws import SpeculationLaws


class TestNgram(SpeculationLaws):
    @pytest.fixture(scope="class")
    @classmethod
    def speculator(cls) -> Callable[[], dict[str, Any]]:
        section = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
        return lambda: {"plugins": ["ngram"], "plugin_options": {"ngram": section}}
