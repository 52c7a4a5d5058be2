"""Every benchmark that needs no peer and no GPU, in its short form: some minutes. `make bench` runs this.

    python bench/run_all.py [--list] [NAME …]

NAME: only these. What comes out are figures for a look and for before and after; those in the documentation come from the
benchmarks' long forms, beside peers, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEMO_MODEL = HERE.parent / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"

RUNS = {
    "compare": (
        "decoding and prompts, beside this machine's roofline",
        "--rounds 1 --workloads W1 W2 W3 --model MODEL",
    ),
    "cpu_kernels": ("kernels alone: GB/s, GFLOP/s, whole steps", "--seconds 0.1"),
    "host_overhead": ("what a step costs around the model", "--steps 200"),
    "prefix_cache": ("what the prefix cache saves and costs", "--repeats 3 --model MODEL"),
    "shared_prefix": ("32 requests behind one prefix", "--rounds 1 --model MODEL"),
    "ngram_propose": ("proposing drafts", "--steps 50"),
    "lora": ("adapters in the batch", "--parts used host --rounds 5 --model MODEL"),
    "busy_neighbour": ("decoding while a core is loaded", "--rounds 1 --model MODEL"),
    "startup": ("from `enginectl serve` to the first token", "--rounds 1 --model MODEL"),
    "serve": ("over HTTP, 16 streaming clients", "--rounds 1 --concurrency 16 --num-requests 32 --model MODEL"),
}
"""Script to what it measures and its options."""


def main() -> int:
    """Run them one after another; the status says whether all of them ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--list", action="store_true", help="say what would run, and end")
    args = parser.parse_args()
    if wrong := [name for name in args.names if name not in RUNS]:
        parser.error(f"no benchmark named {', '.join(wrong)}; there are {', '.join(RUNS)}")
    model = os.environ.get("ENGINECTL_DEMO_MODEL") or str(DEMO_MODEL)
    failed = []
    for name in args.names or RUNS:
        what, options = RUNS[name]
        print(f"\n== {name}: {what}\n   python bench/{name}.py {options}", flush=True)
        if args.list:
            continue
        begin = time.monotonic()
        words = [model if word == "MODEL" else word for word in options.split()]
        done = subprocess.run([sys.executable, str(HERE / f"{name}.py"), *words], check=False)
        print(f"   {time.monotonic() - begin:.0f} s", flush=True)
        if done.returncode:
            failed.append(name)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
