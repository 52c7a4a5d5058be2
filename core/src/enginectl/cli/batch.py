"""What `enginectl generate` does: every prompt through one engine, answers in order."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from enginectl.cli import sampling
from enginectl.cli.prompts import Prompt
from enginectl.cli.session import Session
from enginectl.config_sources import Resolved
from enginectl.errors import RequestError, StepError, UsageError


async def run_one(resolved: Resolved, prompt: Prompt, base: dict[str, Any], adapter: str | None, file: TextIO) -> int:
    """Write the one answer as it comes."""
    session = await Session.start(resolved)
    try:
        token_ids = prompt.token_ids(session.tokenizer)
        async for chunk in session.stream(token_ids, merged(session, prompt, base, len(token_ids)), adapter=adapter):
            file.write(chunk.text)
            file.flush()
        file.write("\n")
    finally:
        await session.close()
    return 0


async def run_batch(
    resolved: Resolved,
    prompts: Sequence[Prompt],
    base: dict[str, Any],
    adapter: str | None,
    write: Callable[[int, Prompt, dict[str, Any]], None],
) -> int:
    """Run every prompt and write the answers in order. Returns 1 if a prompt failed, else 0."""
    session = await Session.start(resolved)
    num_failed = 0
    try:
        with progress_bar(len(prompts)) as advance:
            async for index, answer in in_order(session, prompts, base, adapter, advance):
                write(index, prompts[index], answer)
                if "error" in answer:
                    num_failed += 1
                    print(f"error: prompt {index + 1}: {answer['error']}", file=sys.stderr)
    finally:
        await session.close()
    return 1 if num_failed else 0


async def in_order(
    session: Session,
    prompts: Sequence[Prompt],
    base: dict[str, Any],
    adapter: str | None,
    advance: Callable[[int, int], None],
) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """(index, answer) in the order of the prompts, with enough of them in flight to keep the engine busy."""
    slots = asyncio.Semaphore(2 * session.client.info.max_num_seqs)

    async def one(prompt: Prompt) -> dict[str, Any]:
        async with slots:
            return await answer_to(session, prompt, base, adapter, advance)

    tasks = [asyncio.create_task(one(prompt)) for prompt in prompts]
    try:
        for index, task in enumerate(tasks):
            yield index, await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def answer_to(
    session: Session, prompt: Prompt, base: dict[str, Any], adapter: str | None, advance: Callable[[int, int], None]
) -> dict[str, Any]:
    """The answer as plain data: its choices and token counts, or an error if this prompt alone failed."""
    choices: dict[int, dict[str, Any]] = {}
    num_prompt_tokens = 0
    try:
        token_ids = await asyncio.to_thread(prompt.token_ids, session.tokenizer)
        num_prompt_tokens = len(token_ids)
        stream = session.stream(token_ids, merged(session, prompt, base, len(token_ids)), adapter=adapter)
        async for chunk in stream:
            choice = choices.setdefault(chunk.index, {"index": chunk.index, "text": "", "num_tokens": 0})
            choice["text"] += chunk.text
            choice["num_tokens"] += len(chunk.token_ids)
            advance(0, len(chunk.token_ids))
            if chunk.finish_reason is not None:
                choice |= {"finish_reason": chunk.finish_reason.value, "stop_reason": chunk.stop_reason}
    except (RequestError, StepError, UsageError) as error:
        return {"error": str(error)}
    finally:
        advance(1, 0)
    num_tokens = sum(choice["num_tokens"] for choice in choices.values())
    return {
        "outputs": [choices[index] for index in sorted(choices)],
        "usage": {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens},
    }


def merged(session: Session, prompt: Prompt, base: dict[str, Any], num_prompt_tokens: int) -> dict[str, Any]:
    """Sampling parameters of a prompt: its own, over the command's, over the default for max_tokens."""
    room = max(1, session.client.info.max_model_len - num_prompt_tokens)
    return {"max_tokens": min(room, sampling.DEFAULT_MAX_TOKENS), **base, **(prompt.sampling or {})}


@contextmanager
def progress_bar(num_prompts: int) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, if that is a terminal. Gives a function that takes finished prompts and new tokens."""
    if not sys.stderr.isatty() or num_prompts < 2:
        yield lambda _prompts, _tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("generating", total=num_prompts, tokens=0)
        num_tokens = 0

        def advance(prompts: int, tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += tokens
            bar.update(task, advance=prompts, tokens=num_tokens)

        yield advance
