"""What is checked before an engine is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginectl.cli.startup import check_start
from enginectl.config import EngineConfig, ServerConfig
from enginectl.config_sources import Resolved
from enginectl.context import Gpu, Machine
from enginectl.errors import PluginError
from enginectl.logs import LogConfig

GPU = Gpu("Test GPU", (9, 0), 80 << 30)
ON_GPU = Machine(num_cores=1, memory_bytes=1 << 33, cpu_flags=frozenset(), gpus=(GPU,), versions={"triton": "3.9.0"})


@pytest.mark.parametrize("part", ["attention", "op_set", "sampler"])
def test_a_gpus_part_is_refused_on_the_cpu_that_was_asked_for(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check asked what the machine has, not what --device says, so that the engine process failed later."""
    monkeypatch.setattr("enginectl.machine.detect_machine", lambda: ON_GPU)
    (tmp_path / "config.json").write_text("{}")

    def start(device: str) -> None:
        engine = EngineConfig(model=str(tmp_path), device=device, roles={part: "triton"})
        check_start(Resolved(engine, ServerConfig(), LogConfig(), {}))

    start("auto")
    with pytest.raises(PluginError, match=r"'triton'.*needs cuda, this machine has cpu"):
        start("cpu")
