"""The client of an engine in this process: the loop runs on a thread of its own, chunks arrive on the event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Sequence

from enginectl.compose import Assembled
from enginectl.engine.client import EngineState
from enginectl.engine.control import ControlDesk
from enginectl.engine.messages import Abort, Control, Stop, Submit, ToEngine
from enginectl.engine.process import answer
from enginectl.engine.routed import RoutedClient
from enginectl.engine.router import OutputRouter
from enginectl.errors import EngineDeadError
from enginectl.interfaces.detokenizer import Detokenizer
from enginectl.interfaces.observer import Observer

log = logging.getLogger("enginectl.engine")


class InProcessClient(RoutedClient):
    """See `EngineClient`. Make it on the event loop that will use it."""

    def __init__(self, engine: Assembled, detokenizer: Detokenizer, observers: Sequence[Observer] = ()) -> None:
        super().__init__(engine.config, engine.host, observers)
        self.info = engine.info
        self.engine = engine
        self.router = OutputRouter(
            detokenizer, engine.info, seed=engine.config.seed, on_finished=self._audience.finished
        )
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._set_state(EngineState.RUNNING)
        self._thread.start()

    def _send(self, message: ToEngine) -> None:
        if self._state is EngineState.DEAD:
            raise EngineDeadError(f"the engine is dead: {self._reason}")
        self._inbox.put(message)

    def _run(self) -> None:
        core, desk = self.engine.core, ControlDesk(self.engine)
        call = self._loop.call_soon_threadsafe
        try:
            while True:
                for message in self._messages(core.has_work, core.made_progress):
                    if isinstance(message, Stop):
                        return
                    if isinstance(message, Submit):
                        for spec in message.requests:
                            core.add(spec)
                    elif isinstance(message, Abort):
                        core.abort(message.keys)
                    elif isinstance(message, Control):
                        reply = answer(desk, message, self._inbox.put)
                        if reply is not None:
                            call(self._on_reply, reply)
                for outputs in core.step():
                    call(self._on_outputs, outputs)
        except Exception as error:
            log.exception("the engine loop failed")
            reason = f"{type(error).__name__}: {error}"
            call(self._set_state, EngineState.DEAD, reason)
            call(self._fail_open, f"the engine loop failed: {reason}")

    def _messages(self, busy: bool, progressing: bool) -> list[ToEngine]:
        found: list[ToEngine] = []
        try:
            if not busy:
                found.append(self._inbox.get())
            elif not progressing:
                found.append(self._inbox.get(timeout=0.002))
            while True:
                found.append(self._inbox.get_nowait())
        except queue.Empty:
            return found

    async def close(self) -> None:
        """Stop the thread and free the engine."""
        if self._thread.is_alive():
            self._inbox.put(Stop())
            await self._loop.run_in_executor(None, self._thread.join)
        self._set_state(EngineState.DEAD, "the client was closed")
        self._fail_open("the engine was stopped")
        self.engine.close()
        await asyncio.to_thread(self._audience.close)
