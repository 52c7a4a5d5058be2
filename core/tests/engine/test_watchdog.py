"""The watchdog of the engine process: one that hangs is ended, one that only has nothing to do is not."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from enginectl.config import EngineConfig
from enginectl.engine.messages import Control, Reply, ToEngine
from enginectl.engine.supervisor import EngineProcess
from enginectl.errors import DeadlineError
from enginectl.plugins import PluginHost
from enginectl.testing.fake_client import fake_info
from enginectl.types import GenerateRequest, SamplingParams

TIMEOUT_S = 0.2


class Process(EngineProcess):
    """Without a process: `is_alive` says whether the loop would answer."""

    def __init__(self, *, is_alive: bool) -> None:
        config = EngineConfig(model="m", step_timeout_s=TIMEOUT_S)
        super().__init__(config, PluginHost(only_named=True), lambda info: None)  # type: ignore[arg-type, return-value]
        self._is_alive = is_alive
        self.pings, self.killed, self.lost = 0, False, False
        self.router = SimpleNamespace(num_open=1)  # type: ignore[assignment]
        self._process = SimpleNamespace(poll=lambda: None, kill=self._kill)  # type: ignore[assignment]
        self._frames: Any = object()

    def _kill(self) -> None:
        self.killed = True

    def _send(self, message: ToEngine) -> None:
        assert isinstance(message, Control)
        assert message.name == "ping"
        self.pings += 1
        if self._is_alive:
            self.on_message(Reply(message.id))

    def on_lost(self, frames: Any) -> None:
        self.lost = True


@pytest.mark.parametrize("is_alive", [True, False])
async def test_only_an_engine_that_does_not_answer_is_ended(is_alive: bool) -> None:
    """Requests may wait for long, for a grammar that compiles, say, without a step."""
    client = Process(is_alive=is_alive)
    watch = asyncio.create_task(client._watch())
    await asyncio.sleep(5 * TIMEOUT_S)
    watch.cancel()
    assert client.killed == client.lost == (not is_alive)
    assert client.pings >= (2 if is_alive else 1)


async def test_an_engine_is_not_ended_because_this_process_stood_still() -> None:
    """A container that was frozen and goes on: the engine was ended at once, without being asked."""
    client = Process(is_alive=True)
    watch = asyncio.create_task(client._watch())
    await asyncio.sleep(TIMEOUT_S / 3)
    time.sleep(2 * TIMEOUT_S)
    await asyncio.sleep(TIMEOUT_S)
    watch.cancel()
    assert not client.killed
    assert client.pings > 0


async def test_an_idle_engine_is_left_alone() -> None:
    client = Process(is_alive=False)
    client.router = SimpleNamespace(num_open=0)  # type: ignore[assignment]
    watch = asyncio.create_task(client._watch())
    await asyncio.sleep(3 * TIMEOUT_S)
    watch.cancel()
    assert (client.killed, client.pings) == (False, 0)


async def test_a_deadline_holds_though_the_engine_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    from enginectl.api_side import NoText
    from enginectl.engine.client import EngineState
    from enginectl.engine.router import OutputRouter

    monkeypatch.setattr("enginectl.engine.routed._LATE_S", 0.05)
    client = Process(is_alive=False)
    client.info = fake_info(num_kv_tokens=1024)
    client.router = OutputRouter(NoText(), client.info)
    client._set_state(EngineState.RUNNING)
    sent: list[ToEngine] = []
    monkeypatch.setattr(client, "_send", sent.append)
    request = GenerateRequest(request_id="r", prompt_token_ids=[5], params=SamplingParams(), timeout_s=0.05)
    with pytest.raises(DeadlineError, match=r"timeout of 0.05 s exceeded; the step that ran then has not ended yet"):
        async for _ in client.generate(request):
            pass
    assert [type(message).__name__ for message in sent] == ["Submit", "Abort"]
    assert client.router.num_open == 0
