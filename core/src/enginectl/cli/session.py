"""An engine and its tokenizer, for commands that talk to it without a server."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from enginectl.cli.sampling import with_defaults
from enginectl.cli.startup import check_start, launch_engine
from enginectl.errors import ModelError, StepError
from enginectl.types import GenerateRequest, OutputChunk

if TYPE_CHECKING:
    from enginectl.builtin.tokenizer import Tokenizer
    from enginectl.config_sources import Resolved
    from enginectl.engine.client import EngineClient


@dataclass(slots=True)
class Session:
    """A running engine. Open it and use it in one event loop."""

    client: EngineClient
    tokenizer: Tokenizer

    @classmethod
    async def start(cls, resolved: Resolved) -> Session:
        """Launch the engine. Raises EnginectlError; no process is left behind."""
        started = await launch_engine(resolved, check_start(resolved))
        if started.api.tokenizer is None:
            await started.client.close()
            raise ModelError(f"{resolved.engine.model}: it has no tokenizer; name its directory with --tokenizer")
        return cls(started.client, started.api.tokenizer)

    async def stream(
        self, token_ids: Sequence[int], sampling: dict[str, Any], *, adapter: str | None = None
    ) -> AsyncIterator[OutputChunk]:
        """Chunks of one request as they come. Closing the iterator aborts the request.

        sampling: fields of SamplingParams; the rest are the model's defaults. Raises RequestError, EngineDeadError, and
        StepError if the engine ended a choice with an error.
        """
        request = GenerateRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=list(token_ids),
            params=with_defaults(sampling, self.client.info.sampling_defaults, self.tokenizer),
            adapter=adapter,
        )
        # The contract lets the iterator be closed early; that is what ends the request.
        chunks_of = cast("AsyncGenerator[list[OutputChunk], None]", self.client.generate(request))
        async with aclosing(chunks_of) as stream:
            async for chunks in stream:
                for chunk in chunks:
                    yield chunk
                    if chunk.error is not None:
                        raise StepError(chunk.error)

    async def close(self) -> None:
        """Stop the engine."""
        await self.client.close()
