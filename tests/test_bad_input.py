"""Bad input through the real command line: one clear message, exit status 2 for usage and 1 for failure, no traceback."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from enginectl import Engine
from enginectl.errors import EnginectlError

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class Case:
    """arguments: of `serve`, in which {name} is a path. status: expected. parts: what the message contains."""

    arguments: tuple[str, ...]
    status: int
    parts: tuple[str, ...]


QUICK = {
    "wrong flag": Case(("{model}", "--max-len", "5"), 2, ("no such flag --max-len", "did you mean '--max-model-len'?")),
    "wrong value": Case(("{model}", "--port", "many"), 2, ("--port", "'many'", "allowed: a whole number")),
    "unknown plugin": Case(("{model}", "--plugins", "ngrma"), 2, ("no plugin named 'ngrma'", "known:")),
    "unknown provider": Case(("{model}", "--attention", "trition"), 2, ("no attention named 'trition'", "known:")),
    "no model": Case((), 2, ("no model: give MODEL",)),
    "port in use": Case(("{model}", "--port", "{port}"), 2, ("port {port}", "another process listens there", "--port")),
}
"""Found before anything is started."""

ENGINE = {
    "missing model": Case(("{missing}",), 1, ("no model at", "{missing}", "give a directory")),
    "truncated GGUF": Case(("{cut_gguf}",), 1, ("{cut_gguf}", "cut off")),
    "damaged safetensors": Case(("{damaged}",), 1, ("{damaged}", "safetensors")),
    "context too long": Case(("{model}", "--max-model-len", "100000"), 2, ("--max-model-len 100000", "8192")),
    "no memory": Case(("{model}", "--kv-cache-memory-bytes", "1KiB"), 1, ("1 KiB", "raise --kv-cache-memory-bytes")),
}
"""Found by the engine process."""

CASES = QUICK | ENGINE

OTHERS: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "empty directory": ({"model": "{empty}"}, 1, ("{empty}", "no model", "safetensors")),
    "not a GGUF file": ({"model": "{text_gguf}"}, 1, ("{text_gguf}", "GGUF")),
    "cut safetensors": ({"model": "{cut}"}, 1, ("{cut}", "bytes")),
    "wrong config.json": ({"model": "{no_config}"}, 1, ("{no_config}", "config.json")),
    "unknown architecture": ({"model": "{strange}"}, 1, ("no model family can run 'perceptron'",)),
    "too little memory": (
        {"model": "{model}", "kv_cache_memory_bytes": "64KiB", "max_model_len": 4096},
        1,
        ("fewer than --max-model-len 4096",),
    ),
    "no such GPU": ({"model": "{model}", "device": "cuda:99"}, 2, ("--device cuda:99",)),
    "wrong type": ({"model": "{model}", "max_num_seqs": "many"}, 2, ("max_num_seqs", "'many'", "a whole number")),
    "unknown option": ({"model": "{model}", "max_num_seq": 3}, 2, ("'max_num_seq'", "did you mean 'max_num_seqs'?")),
    "object for a name": ({"model": "{model}", "frontend": object()}, 2, ("frontend", "object")),
}
"""The same messages reach users of the Python API, as exceptions with the exit status."""


def strip(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


@pytest.fixture(scope="module")
def paths(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models good and bad, by name."""
    root = tmp_path_factory.mktemp("bad")
    found = {name: root / name for name in ("missing", "empty", "damaged", "cut", "no_config", "strange")}
    found["empty"].mkdir()
    for name in ("damaged", "cut", "no_config", "strange"):
        shutil.copytree(tiny_llama, found[name])
    weights = found["damaged"] / "model.safetensors"
    weights.write_bytes(b"\xff" * 64 + weights.read_bytes()[64:])
    strip(found["cut"] / "model.safetensors", 1000)
    (found["no_config"] / "config.json").write_text("{not json")
    config = json.loads((tiny_llama / "config.json").read_text())
    strange = {**config, "model_type": "perceptron", "architectures": ["PerceptronForCausalLM"]}
    (found["strange"] / "config.json").write_text(json.dumps(strange))
    found["text_gguf"] = root / "text.gguf"
    found["text_gguf"].write_text("hello\n" * 100)
    found["cut_gguf"] = root / "cut.gguf"
    write_gguf(found["cut_gguf"])
    strip(found["cut_gguf"], 256)
    return {"model": str(tiny_llama), **{name: str(path) for name, path in found.items()}}


def write_gguf(path: Path) -> None:
    """A whole GGUF file with one tensor."""
    import numpy as np
    from gguf import GGUFWriter

    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((64, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def results(paths: dict[str, str], enginectl: Run) -> dict[str, tuple[Case, subprocess.CompletedProcess[str]]]:
    """Every case, run; two at a time, since most of them wait for imports."""
    with socket.create_server(("127.0.0.1", 0)) as taken, ThreadPoolExecutor(2) as pool:
        words = {**paths, "port": str(taken.getsockname()[1])}

        def run(case: Case) -> tuple[Case, subprocess.CompletedProcess[str]]:
            arguments = [argument.format(**words) for argument in case.arguments]
            parts = tuple(part.format(**words) for part in case.parts)
            arguments += [] if "--port" in arguments else ["--port", "0"]
            done = enginectl("serve", *arguments, "--log-level", "warning", env={"OMP_NUM_THREADS": "1"})
            return Case(case.arguments, case.status, parts), done

        return dict(zip(CASES, pool.map(run, CASES.values()), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_one_clear_message(name: str, results: dict[str, tuple[Case, subprocess.CompletedProcess[str]]]) -> None:
    case, done = results[name]
    lines = [line for line in done.stderr.splitlines() if " warning " not in line]
    assert done.returncode == case.status, done.stderr
    assert done.stdout == ""
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert "internal error" not in lines[0]
    for part in case.parts:
        assert part.lower() in lines[0].lower()
    assert len(lines[0]) < 600


@pytest.mark.parametrize("name", OTHERS)
def test_the_python_api_says_the_same(name: str, paths: dict[str, str]) -> None:
    options, status, parts = OTHERS[name]
    values = {key: value.format(**paths) if isinstance(value, str) else value for key, value in options.items()}
    with pytest.raises(EnginectlError) as error:
        Engine(num_threads=1, dtype="float32", **values).close()
    assert error.value.exit_status == status
    for part in parts:
        assert part.format(**paths).lower() in str(error.value).lower()


def test_debug_shows_the_traceback_of_the_engine_process(paths: dict[str, str], enginectl: Run) -> None:
    done = enginectl("serve", paths["damaged"], "--port", "0", "--debug")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") >= 1
    assert "in compose" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


def test_usage_mistakes_are_found_before_anything_heavy_is_imported(enginectl: Run) -> None:
    start = time.monotonic()
    assert enginectl("serve", "M", "--plugins", "nobody").returncode == 2
    assert time.monotonic() - start < 2.0
