"""Law 12: a queue has an end, counted in choices and in prompt tokens; beyond it the answer is 503."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from enginectl.config import EngineConfig
from enginectl.engine.client import EngineState
from enginectl.engine.messages import ToEngine
from enginectl.engine.routed import RoutedClient
from enginectl.engine.router import OutputRouter
from enginectl.errors import OverloadedError, RequestError
from enginectl.plugins import PluginHost
from enginectl.testing.fake_client import fake_info
from enginectl.types import GenerateRequest, SamplingParams, StepOutputs


class Sink(RoutedClient):
    """A client whose engine swallows everything."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(EngineConfig(model="m", **limits), PluginHost())
        self.info = fake_info(max_num_seqs=2, num_kv_tokens=1024)
        start = SimpleNamespace(push=lambda ids: "", flush=lambda: "")
        detokenizer: Any = SimpleNamespace(start=lambda ids, params: start)
        self.router = OutputRouter(detokenizer, self.info)
        self._set_state(EngineState.RUNNING)

    def _send(self, message: ToEngine) -> None:
        pass

    async def close(self) -> None:
        pass

    def submit(self, name: str, *, length: int = 10, n: int = 1) -> None:
        params = SamplingParams(n=n, max_tokens=4)
        request = GenerateRequest(request_id=name, prompt_token_ids=[5] * length, params=params)
        self._open(request, lambda: None)

    def answer(self, *keys: int) -> None:
        """Their first token."""
        assert self.router is not None
        ids = np.array(keys, np.int64).tobytes(), b"", np.full(len(keys), 7, np.int32).tobytes()
        self.router.dispatch(StepOutputs(*ids, (), (), (), None))


def test_more_choices_than_may_run_and_wait_are_refused() -> None:
    client = Sink(max_num_queued_requests=3)
    client.submit("a", n=4)
    client.submit("b")
    with pytest.raises(OverloadedError, match="open choices: 5; 2 may run and 3 wait") as caught:
        client.submit("c")
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
    assert client.router is not None
    assert set(client.router.tickets) == {"a", "b"}


def test_choices_that_never_fit_are_the_requests_fault() -> None:
    """They were told to come back later, for ever."""
    client = Sink(max_num_queued_requests=2)
    with pytest.raises(RequestError, match="n is 5; this server takes at most 4 choices at once") as refused:
        client.submit("a", n=5)
    assert refused.value.status == 400


def test_more_prompt_tokens_than_may_wait_are_refused() -> None:
    """Tokens of requests that are being answered counted as if they waited."""
    client = Sink(max_num_queued_tokens=50)
    client.submit("too big, but nobody waits", length=60)
    with pytest.raises(OverloadedError, match="60 prompt tokens wait and this request has 10, at most 50"):
        client.submit("b")
    client.answer(1)
    client.submit("c", length=20, n=2)
    with pytest.raises(OverloadedError):
        client.submit("d", length=11)
    client.submit("e", length=10)
