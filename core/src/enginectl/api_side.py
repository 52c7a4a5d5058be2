"""The parts that live beside the engine, on the API side: tokenizer, detokenizer, observers and frontends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginectl.building import build_part
from enginectl.config import EngineConfig
from enginectl.context import BuildContext, Machine
from enginectl.interfaces.detokenizer import Detokenizer, TextStream
from enginectl.plugins import PluginHost
from enginectl.provider import Role

if TYPE_CHECKING:
    from enginectl.builtin.tokenizer import Tokenizer
    from enginectl.engine.client import EngineInfo
    from enginectl.types import SamplingParams


class NoText(Detokenizer, TextStream):
    """For checkpoints without a tokenizer: token ids only."""

    def start(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> TextStream:
        """One stream serves all: it has no state."""
        return self

    def push(self, token_ids: Sequence[int]) -> str:
        """No text."""
        return ""

    def flush(self) -> str:
        """No text."""
        return ""


class ApiSide:
    """Builds API-side parts from the same catalogue as the engine's."""

    def __init__(self, config: EngineConfig, host: PluginHost, machine: Machine) -> None:
        self.host = host
        self._ctx = BuildContext(config, machine)
        self._machine = machine
        self.tokenizer: Tokenizer | None = None

    def load_tokenizer(self, info: EngineInfo, chat_template: str | None = None) -> Tokenizer | None:
        """The model's tokenizer, once; None if it has none."""
        if self.tokenizer is None and info.tokenizer_dir is not None:
            from enginectl.builtin.tokenizer import Tokenizer

            self.tokenizer = Tokenizer.load(Path(info.tokenizer_dir), chat_template)
            self._ctx.parts["tokenizer"] = self.tokenizer
        return self.tokenizer

    def detokenizer(self, info: EngineInfo) -> Detokenizer:
        """The chosen detokenizer over that tokenizer."""
        if self.load_tokenizer(info) is None:
            return NoText()
        wanted = self._ctx.engine.roles.get(Role.DETOKENIZER.value)
        entry = self.host.select(Role.DETOKENIZER, self._machine, wanted).chosen[0]
        built: Detokenizer = self._build(entry)
        return built

    def all_of(self, role: Role) -> dict[str, Any]:
        """Every provider of a role that serves here, built, by name (frontends, observers)."""
        chosen = self.host.select(role, self._machine).chosen
        return {entry.provider.name: self._build(entry) for entry in chosen}

    def _build(self, entry: Any) -> Any:
        options = self.host.options(entry.plugin, self._ctx.engine.plugin_options)
        return build_part(entry, self._ctx.with_(options=options))
