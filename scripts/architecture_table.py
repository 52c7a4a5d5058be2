#!/usr/bin/env python
"""Checks architectures against `generate` and writes what came out into docs/reference/architectures.{json,md}.

    python scripts/architecture_table.py                 every architecture, a few minutes on one core
    python scripts/architecture_table.py llama mamba2    these; the others keep their results
    python scripts/architecture_table.py --changed       those whose results are of another transformers, or missing

The models, and what each is there to exercise, are in `enginectl.testing.architectures`. Ends with 1 if one is not as
the registry says.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import transformers
from gen_reference import PAGES, generate

from enginectl.errors import EnginectlError
from enginectl.testing.architecture_check import reference, serve, traits_of
from enginectl.testing.architectures import ARCHITECTURES, REFUSALS
from enginectl.testing.tiny_models import save_refusal, save_tiny_model

RESULTS = PAGES / "architectures.json"


def check(name: str, directory: Path) -> dict[str, Any]:
    """The result of an architecture: by which route it is served, at both depths, and whether it is exact."""
    architecture = ARCHITECTURES[name]
    path = save_tiny_model(name, directory, tokenizer=False)
    expected = reference(path)
    found: dict[str, Any] = {"type": architecture.model_type, "transformers": transformers.__version__}
    try:
        for depth in (0, 1):
            served = serve(path, depth=depth, whole_prompts=architecture.whole_prompts)
            if served.tokens != expected:
                return found | {"route": served.route, "wrong": f"other tokens than generate, at overlap depth {depth}"}
            if not served.num_preemptions or (served.num_chunks > 0) is architecture.whole_prompts:
                return found | {"route": served.route, "wrong": "not strained: no row was preempted, or none chunked"}
        found |= {"route": served.route, "traits": sorted(traits_of(served.spec))}
        if architecture.native:
            found["native"] = serve(path, family="native").tokens == expected
    except EnginectlError as error:
        found["wrong"] = str(error).removeprefix(f"{path}: ")
    return found


def check_refusal(name: str, directory: Path) -> dict[str, Any]:
    """The result of what must not load: the reason it gives."""
    found: dict[str, Any] = {"type": REFUSALS[name].model_type, "transformers": transformers.__version__}
    path = save_refusal(name, directory)
    try:
        serve(path)
    except EnginectlError as error:
        reason = str(error).removeprefix(f"{path}: ")
        return found | ({"refused": reason} if REFUSALS[name].reason in reason else {"wrong": reason})
    return found | {"wrong": "it is served"}


def is_right(name: str, result: dict[str, Any]) -> bool:
    """Whether a result is what the registry says."""
    if name in REFUSALS:
        return "refused" in result
    architecture = ARCHITECTURES[name]
    as_said = (result.get("route"), result.get("traits")) == (architecture.route, sorted(architecture.traits))
    return as_said and result.get("native", False) is architecture.native


def main() -> int:
    """Check, write, report."""
    parser = argparse.ArgumentParser(description="Check architectures and write the table of them.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures of the registry; all if none is given")
    parser.add_argument("--changed", action="store_true", help="only those without a result of this transformers")
    asked = parser.parse_args()
    known = [*ARCHITECTURES, *REFUSALS]
    if strange := set(asked.names) - set(known):
        parser.error(f"not in the registry: {', '.join(sorted(strange))}")
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    for name in asked.names or known:
        if asked.changed and results.get(name, {}).get("transformers") == transformers.__version__:
            continue
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model"
            results[name] = check(name, path) if name in ARCHITECTURES else check_refusal(name, path)
        print(f"{name}: {'as expected' if is_right(name, results[name]) else results[name]}", flush=True)
        ordered = {each: results[each] for each in known if each in results}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    if set(results) == set(known):
        (PAGES / "architectures.md").write_text(generate()["architectures.md"], encoding="utf-8")
    wrong = [name for name in known if name in results and not is_right(name, results[name])]
    print(f"{len(known)} in the registry, {len(results)} checked; not as expected: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    sys.exit(main())
