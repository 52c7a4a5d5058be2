"""What every worker does: say ready, then time batches of token prompts.

A worker is run by the interpreter of its engine's own environment, so this file imports the standard library only.
Lines in: {"prompts": [[ids]], "max_tokens": n}. Lines out: {"seconds": s, "tokens": [[ids]]}.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable

Generate = Callable[[list[list[int]], int], list[list[int]]]


def serve(make: Callable[[str, dict[str, str]], Generate]) -> None:
    """make(model, options) loads the engine and returns what completes a batch greedily, ignoring EOS."""
    model, options = sys.argv[1], dict(pair.split("=", 1) for pair in sys.argv[2:])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints goes to standard error
    begin = time.perf_counter()
    generate = make(model, options)
    _say(answers, {"ready_s": time.perf_counter() - begin})
    for line in sys.stdin:
        order = json.loads(line)
        begin = time.perf_counter()
        tokens = generate(order["prompts"], order["max_tokens"])
        _say(answers, {"seconds": time.perf_counter() - begin, "tokens": tokens})
    with contextlib.suppress(OSError):
        answers.close()
    os._exit(0)


def _say(stream: object, message: dict[str, object]) -> None:
    print(json.dumps(message), file=stream, flush=True)  # type: ignore[call-overload]
