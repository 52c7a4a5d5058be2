"""docs/reference/start-up-errors.md: every command of its tables is run, and says what the page says."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from enginectl.cli import main
from enginectl.context import Machine

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "start-up-errors.md"
MACHINE = Machine(num_cores=4, memory_bytes=16 << 30, cpu_flags=frozenset({"avx2"}))
PORT = "8000"
_ROW = re.compile(r"^\| `enginectl (?P<command>[^|]*)` \| (?P<message>.*) \| (?P<status>\d) \|$", re.MULTILINE)


class Row(NamedTuple):
    command: str
    message: str
    status: str


ROWS = [Row(*(cell.replace("\\|", "|") for cell in row)) for row in _ROW.findall(PAGE.read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def taken() -> Iterator[str]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with something that looks like a model, on a machine whose size is known."""
    for name in ("model", "docs"):
        (tmp_path / name).mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).touch()
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ENGINECTL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("enginectl.machine.detect_machine", lambda: MACHINE)


def run(command: str, port: str, capsys: pytest.CaptureFixture[str]) -> Row:
    words = [port if word == PORT else word for word in shlex.split(command)]
    status = main(words)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    message = captured.err.removeprefix("error: ").rstrip("\n").replace(f"port {port}", f"port {PORT}")
    return Row(command, message, str(status))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.command)
def test_the_command_line_says_what_the_page_says(row: Row, taken: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(row.command, taken, capsys) == row


def test_the_page_has_at_least_twenty_ways_to_start_a_server_wrong() -> None:
    assert len({row.command for row in ROWS if row.command.startswith("serve")}) >= 20
