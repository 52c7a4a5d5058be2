"""`enginectl bench`: measurements of a running server."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from enginectl.cli.bench_serve import bench_serve_command, numbers
from enginectl.cli.help import SectionedCommand
from enginectl.errors import UsageError


def bench_app() -> typer.Typer:
    """The commands below `enginectl bench`."""
    app = typer.Typer(help="Measure a running server.", no_args_is_help=True, pretty_exceptions_enable=False)
    command = partial(app.command, cls=SectionedCommand)
    command("serve", short_help="Load an OpenAI-compatible server and measure it.")(bench_serve_command)
    command("fit", short_help="Fit the cost of a step to an idle server.")(fit_command)
    return app


def fit_command(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, such as http://127.0.0.1:8000.")],
    api_key: Annotated[
        str | None, typer.Option(envvar="ENGINECTL_API_KEY", help="Its API key.", show_default=False)
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Default: the first model it serves.")] = None,
    batch_sizes: Annotated[str, typer.Option(metavar="N,N…", help="Streams at once.")] = "1,2,4,8",
    prompt_lens: Annotated[str, typer.Option(metavar="N,N…", help="Prompt lengths in tokens.")] = "32,64,128,256,512",
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="The server's: longer prompts take several steps. Default: asked.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times each is measured.")] = 3,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the cost as JSON, for `simulate --cost`."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """Fit the cost of a step, base + rows + tokens, to a server that is otherwise idle."""
    import msgspec

    from enginectl.cli.tables import print_json
    from enginectl.simulate.cost import fit_cost
    from enginectl.simulate.fit import Server, budget_of, measure

    sizes, lengths = numbers(batch_sizes, "--batch-sizes"), numbers(prompt_lens, "--prompt-lens")
    server = Server(url, api_key=api_key, model=model)
    budget = max_num_batched_tokens or budget_of(server)
    probes = measure(server, batch_sizes=sizes, prompt_lens=lengths, repeats=repeats, max_num_batched_tokens=budget)
    columns = zip(*((p.num_steps, p.rows, p.tokens, p.seconds) for p in probes), strict=True)
    cost, explained = fit_cost(*(list(column) for column in columns))
    text = f"{cost.base_ms:g},{cost.row_ms:g},{cost.token_ms:g}"
    if output is not None:
        try:
            output.write_bytes(msgspec.json.encode(cost) + b"\n")
        except OSError as error:
            raise UsageError(f"--output {output}: cannot be written: {error.strerror}") from error
    if as_json:
        print_json({**msgspec.to_builtins(cost), "explained": explained, "probes": msgspec.to_builtins(probes)})
        return
    print(f"a step takes {cost.base_ms:.3f} ms + {cost.row_ms:.4f} ms a row + {cost.token_ms:.4f} ms a token")
    print(f"{explained:.1%} of the variance of {len(probes)} measurements is explained")
    print(f"enginectl simulate --cost {output or text} …")
