"""`enginectl generate`: complete prompts in a batch, without a server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from enginectl.cli import sampling
from enginectl.cli.options import Invocation, takes_config
from enginectl.errors import UsageError

if TYPE_CHECKING:
    from enginectl.cli.prompts import Prompt

FORMATS = ("text", "jsonl")


@takes_config(server=False)
def generate_command(
    invocation: Invocation,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]…", show_default=False)] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--input", "-i", metavar="FILE", help='JSON lines with "prompt" or "messages"; - is standard input.'
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: standard output.")
    ] = None,
    output_format: Annotated[
        str | None, typer.Option("--format", metavar="FORMAT", help="text, or jsonl (the default with --input).")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="A prompt is a user's message, not raw text.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="System message; implies --chat.")] = None,
    adapter_name: Annotated[
        str | None, typer.Option("--adapter-name", metavar="NAME", help="A served adapter.")
    ] = None,
    max_tokens: sampling.MaxTokens = None,
    temperature: sampling.Temperature = None,
    top_p: sampling.TopP = None,
    top_k: sampling.TopK = None,
    stop: sampling.Stop = None,
    num_choices: Annotated[int, typer.Option("--n", min=1, help="Choices per prompt.")] = 1,
) -> int:
    """Complete prompts: arguments, standard input, or a file of JSON lines. Answers keep the order of the prompts."""
    import asyncio

    from enginectl.cli.batch import run_batch, run_one
    from enginectl.cli.prompts import read_prompts
    from enginectl.logs import configure_logging

    values = sampling.sampling_values(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, stop=stop
    )
    output_format = output_format or ("jsonl" if source is not None else "text")
    if output_format not in FORMATS:
        raise UsageError(f"--format is {output_format!r}; allowed: {', '.join(FORMATS)}")
    # What the user sees is the answers: the engine's own lines wait for trouble, or for --log-level.
    resolved = invocation.resolve(**({} if invocation.debug else {"log_level": "warning"}))
    configure_logging(resolved.logs)
    if not prompts and source is None:
        _check_model(resolved.engine.model)
    items = read_prompts(prompts or (), source, as_chat=chat, system=system)
    base = {**values, "n": num_choices}
    with open_output(output) as file:
        if output_format == "text" and len(items) == 1 and num_choices == 1:
            return asyncio.run(run_one(resolved, items[0], base, adapter_name, file))
        write = JsonWriter(file) if output_format == "jsonl" else TextWriter(file, num_prompts=len(items))
        return asyncio.run(run_batch(resolved, items, base, adapter_name, write))


def _check_model(model: str) -> None:
    """Raises ModelError for what was meant as a prompt and stands where MODEL does."""
    from enginectl.config_checks import model_path
    from enginectl.errors import ModelError

    try:
        model_path(model)
    except ModelError as error:
        raise ModelError(f"{error}. MODEL comes before the prompts: enginectl generate MODEL {model!r}") from None


class TextWriter:
    """Answers as text. Several prompts or choices are told apart by a line `==> prompt 2 <==`."""

    def __init__(self, file: TextIO, *, num_prompts: int) -> None:
        self._file = file
        self._num_prompts = num_prompts

    def __call__(self, index: int, prompt: Prompt, answer: dict[str, Any]) -> None:
        """Write one answer; an error goes to standard error instead."""
        outputs = answer.get("outputs", ())
        for output in outputs:
            words = [f"prompt {index + 1}"] if self._num_prompts > 1 else []
            words += [f"choice {output['index'] + 1}"] if len(outputs) > 1 else []
            if words:
                self._file.write(f"==> {', '.join(words)} <==\n")
            self._file.write(f"{output['text']}\n")
        self._file.flush()


class JsonWriter:
    """Answers as JSON lines: index, the caller's id, the prompt, and outputs and usage, or error."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __call__(self, index: int, prompt: Prompt, answer: dict[str, Any]) -> None:
        """Write one line."""
        import json

        asked = {"prompt": prompt.text} if prompt.messages is None else {"messages": prompt.messages}
        named = {} if prompt.id is None else {"id": prompt.id}
        self._file.write(json.dumps({"index": index, **named, **asked, **answer}, ensure_ascii=False) + "\n")
        self._file.flush()


@contextmanager
def open_output(path: Path | None) -> Iterator[TextIO]:
    """The file to write to, or standard output. Raises UsageError."""
    if path is None:
        yield sys.stdout
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output {path}: cannot be written: {error.strerror}") from error
    with file:
        yield file
