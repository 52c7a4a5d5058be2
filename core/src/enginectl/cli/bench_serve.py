"""`enginectl bench serve`: load a running server and report what its clients see."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enginectl.errors import EnginectlError, UsageError

if TYPE_CHECKING:
    from enginectl.loadtest.arrivals import Level, Workload
    from enginectl.loadtest.run import Run
    from enginectl.loadtest.target import Target


def bench_serve_command(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, such as http://127.0.0.1:8000.")],
    concurrency: Annotated[
        str | None, typer.Option(metavar="N,N…", help="Clients that ask again when answered. Default: 1,8,32.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="R,R…", help="Instead: requests a second, Poisson arrivals.")
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option(
            min=1, help="Requests of each level and repeat. Default: 4 a client, at least 16; 60 s of a rate."
        ),
    ] = None,
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens; in a chat, words.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Output tokens.")] = 64,
    lognormal_sigma: Annotated[
        float, typer.Option(min=0.0, max=4.0, help="Draw lengths lognormal about these medians; 0: fixed.")
    ] = 0.0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Chat completions with words; default: token completions.")
    ] = False,
    warmup: Annotated[
        int | None, typer.Option(min=0, help="Requests before each level, not counted. Default: one a client; 8.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measure each level so often and show medians.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts, lengths and arrivals.")] = 0,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="After so long a request counts as failed.")] = 600.0,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Default: the first model it serves.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="ENGINECTL_API_KEY", help="Its API key.", show_default=False)
    ] = None,
    token_range: Annotated[
        str, typer.Option(metavar="FIRST-LAST", help="Prompt token ids are drawn from these.")
    ] = "100-899",
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Ask for the whole output length.")
    ] = True,
    extra_body: Annotated[
        str | None, typer.Option(metavar="JSON", help='Further fields of every request, as {"speculation": "off"}.')
    ] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Load a server that is not on this machine.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a PNG; needs matplotlib.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page that needs nothing else.")] = None,
) -> None:
    """Load an OpenAI-compatible server: time to first token, between tokens and to the end, throughput, errors.

    Every request streams, at temperature 0, with a prompt of its own.
    """
    from enginectl.loadtest.run import Plan, load_test
    from enginectl.loadtest.target import parse_target

    levels = make_levels(concurrency, rate)
    extra = _object(extra_body)
    if plot is not None:
        from enginectl.simulate.plot import require_matplotlib

        require_matplotlib()
    target = parse_target(url, api_key=api_key, allow_remote=allow_remote)
    workload = make_workload(
        target,
        model=model,
        input_len=input_len,
        output_len=output_len,
        lognormal_sigma=lognormal_sigma,
        api="chat" if chat else "completions",
        token_range=_range(token_range),
        ignore_eos=ignore_eos,
        extra_body=extra,
    )
    plan = Plan(
        workload=workload,
        levels=levels,
        num_requests=num_requests,
        warmup=warmup,
        repeats=repeats,
        seed=seed,
        timeout_s=timeout_s,
    )
    show(target, workload, load_test(target, plan, tell), as_json=as_json, plot=plot, html=html)


def make_levels(concurrency: str | None, rate: str | None) -> list[Level]:
    """The levels that two flags ask for. Raises UsageError."""
    from enginectl.loadtest.arrivals import Level

    if rate is None:
        return [Level(concurrency=number) for number in numbers(concurrency or "1,8,32", "--concurrency")]
    if concurrency is not None:
        raise UsageError("--concurrency and --rate are two ways to press; give one of them")
    try:
        rates = [float(part) for part in rate.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < one < 1e6 for one in rates):
        raise UsageError(f"--rate is {rate!r}; give requests a second above 0, comma separated")
    return [Level(rate=one) for one in rates]


def numbers(text: str, flag: str) -> list[int]:
    """Whole numbers of at least 1, comma separated. Raises UsageError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"{flag} is {text!r}; give whole numbers of at least 1, comma separated")
    return [int(part) for part in parts]


def make_workload(target: Target, *, model: str | None, **options: Any) -> Workload:
    """What to ask, with the model's name and limit as the server tells them. Raises EnginectlError or UsageError."""
    from enginectl.errors import unknown
    from enginectl.loadtest.arrivals import Workload
    from enginectl.loadtest.run import ask_server

    served = {str(one["id"]): one for one in ask_server(target)}
    if model is not None and model not in served:
        raise UsageError(unknown("model", model, served))
    name = model or next(iter(served))
    return Workload(model=name, max_model_len=served[name].get("max_model_len"), **options)


def tell(level: Level, repeat: int, run: Run) -> None:
    """A line on standard error for every repeat."""
    import sys

    from enginectl.loadtest.report import summarize

    one = summarize(run)
    failed = f", {one['requests'] - one['finished']} failed" if one["errors"] else ""
    rate = one["output_tokens_per_s"]
    print(f"{level.name}, repeat {repeat + 1}: {rate:,.1f} tokens/s in {run.duration_s:.1f} s{failed}", file=sys.stderr)


def show(
    target: Target,
    workload: Workload,
    levels: list[list[Run]],
    *,
    as_json: bool,
    plot: Path | None = None,
    html: Path | None = None,
) -> None:
    """Print and write what was measured. Raises EnginectlError, after that, if no request was answered."""
    from enginectl.cli.tables import print_json, print_table
    from enginectl.loadtest.page import write_page
    from enginectl.loadtest.plot import plot as draw
    from enginectl.loadtest.report import first_failures, report, table

    summaries, failures = report(levels), first_failures(levels)
    facts = {
        "url": target.url,
        "model": workload.model,
        "api": workload.api,
        "input_len": workload.input_len,
        "output_len": workload.output_len,
        "lognormal_sigma": workload.lognormal_sigma,
    }
    if as_json:
        print_json({**facts, "levels": summaries, "failures": failures})
    else:
        print_table(*table(summaries))
        for kind, detail in failures.items():
            print(f"{kind}: {detail}")
    if plot is not None:
        draw(levels, summaries, plot)
    if html is not None:
        write_page(facts, levels, summaries, html)
    if not any(one["finished"] for summary in summaries for one in summary["repeats"]):
        kind, detail = next(iter(failures.items()))
        raise EnginectlError(f"no request was answered; {kind}: {detail}")


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal()) or int(first) > int(last):
        raise UsageError(f"--token-range is {text!r}; give FIRST-LAST, such as 100-899")
    return int(first), int(last) + 1


def _object(text: str | None) -> dict[str, Any]:
    import msgspec

    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise UsageError(f"--extra-body is {text!r}, not a JSON object: {error}") from error
