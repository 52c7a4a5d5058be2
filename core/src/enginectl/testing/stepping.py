"""Requests that a test steps by hand, on an engine in its own process."""

from __future__ import annotations

from collections.abc import Sequence

from enginectl import Engine, SamplingParams
from enginectl.engine.router import Ticket


def ask(engine: Engine, prompt: Sequence[int], params: SamplingParams, *, adapter: str | None = None) -> Ticket:
    """Queue a request. Nothing is computed yet."""
    return engine._submit(engine._requests([list(prompt)], params, {"adapter": adapter}))[0]


def finish(engine: Engine, *tickets: Ticket, max_steps: int = 3000) -> list[dict[int, list[int]]]:
    """Step until all have ended. Returns the tokens by choice that each has got since it was last looked at."""
    for _ in range(max_steps):
        if all(ticket.is_done for ticket in tickets):
            break
        engine._step()
    else:
        raise AssertionError(f"not all of {len(tickets)} requests ended within {max_steps} steps")
    found = []
    for ticket in tickets:
        assert ticket.failure is None, ticket.failure
        choices: dict[int, list[int]] = {}
        for chunk in ticket.take():
            choices.setdefault(chunk.index, []).extend(chunk.token_ids)
        found.append(choices)
    return found
