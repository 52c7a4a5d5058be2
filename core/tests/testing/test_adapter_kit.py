"""The adapter kit passes what is right and fails each mutant in the test named for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from enginectl.errors import EnginectlError
from enginectl.testing.adapter import AdapterConformance, MakeBackend, write_kinds
from enginectl.testing.adapter_reference import (
    ForgetsScale,
    ForgetsUsers,
    LendsFullSlots,
    LoopAdapters,
    ReplacesUnderRows,
    ShiftsSegments,
    SwapsSlots,
)

KIT = AdapterConformance()


class TestLoop(AdapterConformance):
    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        return LoopAdapters


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (ShiftsSegments, KIT.test_rows_equal_the_reference),
        (ForgetsScale, KIT.test_rows_equal_the_reference),
        (SwapsSlots, KIT.test_rows_equal_the_reference),
        (SwapsSlots, KIT.test_rows_do_not_depend_on_which_slot_is_whose),
        (ReplacesUnderRows, KIT.test_replacing_leaves_running_rows_alone),
        (ForgetsUsers, KIT.test_unload_waits_for_the_last_user),
        (LendsFullSlots, KIT.test_a_slot_is_shared_and_waited_for),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mutant_fails_the_test_named_for_it(
    mutant: type[LoopAdapters], check: Callable[[MakeBackend, list[Path]], None], tmp_path: Path
) -> None:
    with pytest.raises((AssertionError, EnginectlError)):
        check(mutant, write_kinds(tmp_path))
