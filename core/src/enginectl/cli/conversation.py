"""A conversation in the terminal: what was said, and the commands that change it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from enginectl.cli.session import Session
from enginectl.errors import EngineDeadError, RequestError, StepError, nearest

COMMANDS = {
    "/exit": "leave (or Ctrl-D)",
    "/reset": "forget the conversation",
    "/system": "set the system message and start again; without text, remove it",
    "/help": "show this",
}


@dataclass(slots=True)
class Conversation:
    """What has been said. A message that got no answer is forgotten."""

    session: Session
    sampling: dict[str, Any]
    adapter: str | None = None
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    async def answer(self, text: str, write: Callable[[str], Any] | None = None) -> None:
        """Stream the answer to a message and remember both; an answer cut short is remembered as far as it went."""
        write = write or _write
        asked = {"role": "user", "content": text}
        said: list[str] = []
        try:
            async for chunk in self.session.stream(self._token_ids(asked), self.sampling, adapter=self.adapter):
                said.append(chunk.text)
                write(chunk.text)
        finally:
            if said:
                self.messages += [asked, {"role": "assistant", "content": "".join(said)}]

    def _token_ids(self, asked: dict[str, Any]) -> list[int]:
        tokenizer = self.session.tokenizer
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return tokenizer.encode_chat(tokenizer.apply_chat_template([*first, *self.messages, asked]))


def talk(conversation: Conversation, answer: Callable[[str], None]) -> None:
    """Read lines until the end or /exit. A failed answer is reported and the conversation goes on."""
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        import readline  # noqa: F401 - gives `input` history and editing

        print("/help lists the commands, Ctrl-D leaves.")
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line.startswith("/"):
            if not obey(conversation, line):
                return
        elif line:
            try:
                answer(line)
                print()
            except KeyboardInterrupt:
                print(" [stopped]")
            except (RequestError, StepError, EngineDeadError) as error:
                print(f"error: {error}", file=sys.stderr)


def obey(conversation: Conversation, line: str) -> bool:
    """Carry out a command. False ends the conversation."""
    word, _, rest = line.partition(" ")
    if word == "/exit":
        return False
    if word == "/reset":
        conversation.messages.clear()
    elif word == "/system":
        conversation.system = rest.strip() or None
        conversation.messages.clear()
    elif word == "/help":
        for name, meaning in COMMANDS.items():
            print(f"{name:9} {meaning}")
    else:
        print(f"no command {word!r}{nearest(word, COMMANDS) or ';'} /help lists them", file=sys.stderr)
    return True


def _write(text: str) -> None:
    print(text, end="", flush=True)
