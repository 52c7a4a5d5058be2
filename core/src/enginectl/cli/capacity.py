"""`enginectl capacity`: how many tokens and sequences fit in a given amount of KV memory.

Imports torch only for models that carry a recurrent state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from enginectl.errors import ModelError, UsageError

_KV_NOTE = "--memory is memory for KV alone: subtract the weights and the activations from the device's first."


def capacity_command(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_CONFIG", help="A model directory, config.json or .gguf.")],
    memory: Annotated[
        str, typer.Option(help="Memory for KV alone, weights not included: 24GiB, 4GB, or bytes. Needed.")
    ] = "",
    seq_len: Annotated[int, typer.Option(help="Tokens of each sequence, prompt and output.")] = 2048,
    dtype: Annotated[str, typer.Option(help="KV dtype: auto (the model's), bfloat16, float16, float32 …")] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens a KV block.")] = 16,
    max_num_seqs: Annotated[
        int, typer.Option(help="Rows running at once: a model with a recurrent state keeps one for each.")
    ] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Say how many tokens and sequences fit in a given amount of KV memory."""
    from enginectl.capacity import capacity, carries_state, probed
    from enginectl.units import parse_size

    if not memory:
        raise UsageError(
            "enginectl capacity: --memory is missing: the memory for KV alone, such as --memory 24GiB (the device's, less "
            "weights and activations); `enginectl doctor` shows what this machine has"
        )
    config, weight_bytes = load_config(Path(model))
    size = parse_size(memory, what="--memory")
    spec = None
    if carries_state(config):
        from transformers.utils import logging

        logging.set_verbosity_error()  # nothing is computed, so no word about slow kernels
        spec = probed(config, seq_len)
    result = capacity(config, size, seq_len, dtype, block_size, spec=spec, max_num_seqs=max_num_seqs)
    if as_json:
        import msgspec

        payload = {**msgspec.to_builtins(result), "weight_bytes": weight_bytes}
        typer.echo(msgspec.json.encode(payload).decode())
    else:
        _print_table(model, result, weight_bytes)


def load_config(path: Path) -> tuple[dict[str, Any], int | None]:
    """The configuration of a model directory, config.json or GGUF file, and the bytes of its weights if they are there.

    Raises ModelError.
    """
    from enginectl.builtin.weights.gguf_config import hf_config
    from enginectl.builtin.weights.gguf_file import GGUFFile, gguf_path
    from enginectl.builtin.weights.safetensors_file import read_json

    if not path.exists():
        raise ModelError(f"{path}: not found. Give a model directory, a config.json or a .gguf file")
    if path.is_dir() and (path / "config.json").is_file():
        sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
        return read_json(path / "config.json"), sum(sizes) if sizes else None
    if path.suffix == ".json":
        return read_json(path), None
    file = GGUFFile(gguf_path(path))
    return hf_config(file), sum(tensor.num_bytes for tensor in file.tensors.values())


def _print_table(model: str, result: Any, weight_bytes: int | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from enginectl.units import format_size

    table = Table(title=f"KV capacity of {model}", show_header=False, title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    rows = [("KV memory", format_size(result.memory_bytes))]
    if result.state_bytes_per_row:
        total = format_size(result.state_bytes_per_row * result.max_num_seqs)
        rows += [
            ("recurrent state a row", format_size(result.state_bytes_per_row)),
            (f"of {result.max_num_seqs:,} rows (--max-num-seqs)", total),
        ]
    if result.bytes_per_token:
        rows += [
            ("KV dtype", result.dtype),
            ("bytes a token", f"{result.bytes_per_token:,}"),
            (f"bytes a block of {result.block_size} tokens", f"{result.bytes_per_block:,}"),
            ("blocks", f"{result.num_blocks:,}"),
            ("tokens", f"{result.num_tokens:,}"),
        ]
    rows.append((f"sequences of {result.seq_len:,} tokens", f"{result.num_sequences:,}"))
    if weight_bytes is not None:
        rows.append(("weights on disk, not counted above", format_size(weight_bytes)))
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    for note in result.notes:
        console.print(note, style="yellow", soft_wrap=True, highlight=False)
    console.print(_KV_NOTE, style="dim", soft_wrap=True)
