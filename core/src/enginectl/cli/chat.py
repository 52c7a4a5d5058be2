"""`enginectl chat`: a conversation in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from enginectl.cli import sampling
from enginectl.cli.options import Invocation, takes_config
from enginectl.errors import ModelError


@takes_config(server=False)
def chat_command(
    invocation: Invocation,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    adapter_name: Annotated[
        str | None, typer.Option("--adapter-name", metavar="NAME", help="A served adapter.")
    ] = None,
    max_tokens: sampling.MaxTokens = None,
    temperature: sampling.Temperature = None,
    top_p: sampling.TopP = None,
    top_k: sampling.TopK = None,
    stop: sampling.Stop = None,
) -> None:
    """Talk to a model. Answers stream; Ctrl-C stops an answer; /help lists the commands."""
    import asyncio

    from enginectl.cli.conversation import Conversation, talk
    from enginectl.cli.session import Session
    from enginectl.logs import configure_logging

    values = sampling.sampling_values(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, stop=stop
    )
    resolved = invocation.resolve(**({} if invocation.debug else {"log_level": "warning"}))
    configure_logging(resolved.logs)
    # The loop runs while the engine starts and answers; in between, `input` has the terminal and Ctrl-C to itself.
    with asyncio.Runner() as runner:
        session = runner.run(Session.start(resolved))
        try:
            if not session.tokenizer.has_chat_template:
                raise ModelError(
                    f"{resolved.engine.model} has no chat template; put one beside it as chat_template.jinja"
                )
            conversation = Conversation(session, values, adapter_name, system)
            talk(conversation, lambda text: runner.run(conversation.answer(text)))
        finally:
            runner.run(session.close())
