"""`enginectl simulate`: plan capacity and compare policies without the hardware."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enginectl.cli.arguments import Arguments
from enginectl.errors import UsageError

if TYPE_CHECKING:
    from enginectl.simulate.workload import Arrival, Traffic

_LENGTHS = "Tokens: 256, or lognormal:median=260,p95=735 (sigma= instead of p95; total=, most=)."


def simulate_command(
    context: typer.Context,
    cost: Annotated[
        str, typer.Option(metavar="BASE,ROW,TOKEN", help="Milliseconds of a step, or a file of `bench fit`.")
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Schedulers, and the baselines static and contiguous. Default: fcfs."),
    ] = None,
    rate: Annotated[float, typer.Option(help="Requests a second, Poisson; 0 sends all at once.")] = 1.0,
    duration_s: Annotated[float | None, typer.Option(help="Seconds during which requests arrive.")] = None,
    num_requests: Annotated[int | None, typer.Option(min=1, help="How many arrive. Default: 1000.")] = None,
    prompt_tokens: Annotated[str, typer.Option(metavar="LENGTHS", help=_LENGTHS)] = "256",
    output_tokens: Annotated[str, typer.Option(metavar="LENGTHS", help=_LENGTHS)] = "128",
    prefix_tokens: Annotated[int, typer.Option(min=0, help="Tokens that all prompts of a tenant begin with.")] = 0,
    tenant: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SHARE", help="Split the rate over tenants by share, such as light=1,heavy=50."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON lines with arrival_s, prompt_tokens, output_tokens ….")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most sequences running at once.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Token budget of a step.")] = 8192,
    max_model_len: Annotated[int, typer.Option(min=1, help="Most tokens of one sequence.")] = 4096,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per KV block.")] = 16,
    kv_tokens: Annotated[int, typer.Option(min=1, help="Tokens that the KV pool holds.")] = 131072,
    long_prefill_token_threshold: Annotated[
        int | None, typer.Option(min=1, help="Most prompt tokens a step reads while other sequences decode.")
    ] = None,
    prefix_caching: Annotated[
        bool | None,
        typer.Option("--prefix-caching/--no-prefix-caching", help="Default: on when prompts share a prefix."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="First seed of the arrivals and lengths.")] = 0,
    num_seeds: Annotated[int, typer.Option(min=1, help="Repeat with so many seeds and show means.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a PNG of the first seed; needs matplotlib.")
    ] = None,
) -> None:
    """Run the real scheduler, allocator and prefix index against a cost model: nothing is loaded or computed.

    A step costs BASE + ROW * rows + TOKEN * tokens milliseconds. Options of a policy are given as for `serve`:
    --fair.output-weight 1.
    """
    from enginectl.cli.startup import discover_quietly, idle_options
    from enginectl.simulate import plot as plots
    from enginectl.simulate.cost import parse_cost
    from enginectl.simulate.engine import SimConfig
    from enginectl.simulate.workload import parse_lengths, poisson, read_trace

    traffic: list[Traffic] = []
    if trace is None:
        if num_requests is None and duration_s is None:
            num_requests = 1000
        prompt, output = (
            parse_lengths(prompt_tokens, "--prompt-tokens"),
            parse_lengths(output_tokens, "--output-tokens"),
        )
        traffic = make_traffic(rate, num_requests, duration_s, prompt, output, prefix_tokens, tenant or [])
        repeats = [poisson(traffic, place) for place in range(seed, seed + num_seeds)]
    else:
        if num_seeds > 1:
            raise UsageError("--num-seeds repeats random arrivals; a trace is the same each time")
        repeats = [read_trace(trace)]
    if plot is not None:
        plots.require_matplotlib()
    arguments = context.obj or Arguments()
    shared = any(arrival.prefix_tokens for arrival in repeats[0])
    config = SimConfig(
        cost=parse_cost(cost),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=kv_tokens // block_size,
        long_prefill_token_threshold=long_prefill_token_threshold,
        prefix_cache=shared if prefix_caching is None else prefix_caching,
        plugin_options={name: dict(section) for name, section in arguments.plugin_flags.items()},
    )
    host = discover_quietly()
    host.check_sections(config.plugin_options)
    origins = {
        f"plugins.{plugin}.{key.replace('-', '_')}": f"--{plugin}.{key}"
        for plugin, section in config.plugin_options.items()
        for key in section
    }
    for plugin in config.plugin_options:
        host.options(host.plugins[plugin], config.plugin_options, origins)
    policies = [name for text in policy or ["fcfs"] for name in text.split(",") if name]
    for line in idle_options(origins, _serving(policies, config, host)):
        typer.echo(f"warning: {line}", err=True)
    _compare(policies, repeats, config, host, as_json=as_json, picture=plot)


def make_traffic(
    rate: float,
    count: int | None,
    duration_s: float | None,
    prompt: Any,
    output: Any,
    prefix_tokens: int,
    tenants: list[str],
) -> list[Traffic]:
    """One stream of arrivals a tenant, the rate and the count split by share. Raises UsageError."""
    from enginectl.simulate.workload import Traffic

    if rate < 0 or (rate == 0 and count is None):
        raise UsageError(f"--rate is {rate:g}; give more than 0, or 0 with --num-requests to send all at once")
    if duration_s is not None and duration_s <= 0:
        raise UsageError(f"--duration-s is {duration_s:g}; give more than 0")
    shares = {"": 1.0}
    if tenants:
        try:
            pairs = [part.rpartition("=")[::2] for text in tenants for part in text.split(",")]
            shares = {name: float(share) for name, share in pairs}
        except ValueError as error:
            raise UsageError(f"--tenant is {' '.join(tenants)!r}; give NAME=SHARE, such as light=1") from error
        if "" in shares or min(shares.values()) <= 0:
            raise UsageError(f"--tenant is {' '.join(tenants)!r}; give NAME=SHARE with a share of more than 0")
    total = sum(shares.values())
    return [
        Traffic(
            rate=rate * share / total,
            prompt=prompt,
            output=output,
            count=None if count is None else max(1, round(count * share / total)),
            duration_s=duration_s,
            tenant=name,
            prefix_tokens=prefix_tokens,
        )
        for name, share in shares.items()
    ]


def _serving(policies: list[str], config: Any, host: Any) -> set[str]:
    """Plugins whose parts are simulated."""
    from enginectl.provider import Role

    schedulers = host.catalogue[Role.SCHEDULER]
    chosen = [schedulers[name] for name in policies if name in schedulers]
    for role in (Role.KV_ALLOCATOR, *([Role.PREFIX_INDEX] if config.prefix_cache else [])):
        chosen += host.catalogue[role].values()
    return {entry.plugin.name for entry in chosen}


def _compare(
    policies: list[str], repeats: list[list[Arrival]], config: Any, host: Any, *, as_json: bool, picture: Path | None
) -> None:
    import msgspec

    from enginectl.cli.tables import print_json, print_table
    from enginectl.errors import unknown
    from enginectl.provider import Role
    from enginectl.simulate.baselines import BASELINES
    from enginectl.simulate.plot import plot
    from enginectl.simulate.report import mean_of, summarize, table_rows
    from enginectl.simulate.run import simulate

    known = [*host.catalogue[Role.SCHEDULER], *BASELINES]
    for name in policies:
        if name not in known:
            raise UsageError(unknown("policy", name, known))
    summaries, pictured = [], []
    for name in policies:
        runs = []
        for place, arrivals in enumerate(repeats):
            result = simulate(arrivals, msgspec.structs.replace(config, policy=name), host=host, seed=place)
            runs.append(summarize(result))
            if place == 0 and picture is not None:
                pictured.append(result)
            if not runs[-1]["requests"]:
                raise UsageError(f"every request was refused: {result.first_refusal}")
        summaries.append(mean_of(runs))
    if picture is not None:
        plot(pictured, picture)
    if as_json:
        print_json({"cost": msgspec.to_builtins(config.cost), "policies": summaries})
        return
    print_table(table_rows(summaries), ["", *policies])
