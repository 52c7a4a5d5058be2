"""The client of an engine in its own process: starts it, talks to it, notices its death and starts it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from enginectl.config import EngineConfig
from enginectl.engine.client import EngineInfo, EngineState
from enginectl.engine.messages import (
    HEADER,
    Control,
    Failed,
    FromEngine,
    Outputs,
    Progress,
    Ready,
    Reply,
    Start,
    Stop,
    ToEngine,
    frame,
    from_engine_decoder,
)
from enginectl.engine.routed import RoutedClient
from enginectl.engine.router import OutputRouter
from enginectl.errors import EnginectlError, EngineDeadError, UsageError
from enginectl.interfaces.detokenizer import Detokenizer
from enginectl.interfaces.observer import Observer
from enginectl.logs import LogConfig
from enginectl.plugins import PluginHost

log = logging.getLogger("enginectl.supervisor")

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 30.0
_MAX_CRASHES = 5
"""Deaths in a row, each before the engine served for `_STABLE_S`, after which restarting is given up."""
_STABLE_S = 10.0
_STOP_TIMEOUT_S = 3.0
_WATCH_S = 1.0
_PING = 0
"""Number of the control message that only asks whether the loop is alive; answers to others count from 1."""
_STDERR = 2


class EngineProcess(RoutedClient):
    """See `EngineClient`. Use `await start()` first, `await close()` last.

    make_detokenizer: builds the API side's detokenizer once the engine told where its tokenizer is.
    """

    def __init__(
        self,
        config: EngineConfig,
        host: PluginHost,
        make_detokenizer: Callable[[EngineInfo], Detokenizer],
        *,
        observers: Sequence[Observer] = (),
        logs: LogConfig | None = None,
        progress: Callable[[str], None] = log.info,
    ) -> None:
        super().__init__(config, host, observers)
        self._make_detokenizer = make_detokenizer
        self._logs = logs or LogConfig()
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._frames: _Frames | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self._failure: Failed | None = None
        self._has_news = False

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the engine and wait until it serves. Raises what it reported if it cannot."""
        await self._launch()
        self._supervision = asyncio.create_task(self._supervise(), name="supervisor")

    async def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        theirs.set_inheritable(True)
        command = [sys.executable, "-m", "enginectl.engine.process", str(theirs.fileno())]
        self._lost.clear()
        self._failure = None
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        with theirs:
            # A session of its own keeps a terminal's Ctrl-C from it; stdout stays clean for commands that print answers.
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                env=os.environ,
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                start_new_session=True,
            )
        self._frames = frames = _Frames(self)
        transport, _ = await loop.create_unix_connection(lambda: frames, sock=ours)
        self._transport = transport
        transport.write(frame(Start(self.config, self._logs, self._adapters)))
        info = await self._ready
        if self.router is None:
            self.router = OutputRouter(
                self._make_detokenizer(info), info, seed=self.config.seed, on_finished=self._audience.finished
            )
        self.info = self.router.info = info
        if self._is_draining:
            self._set_state(EngineState.DRAINING, "the server is shutting down")
        else:
            self._set_state(EngineState.RUNNING)

    async def _supervise(self) -> None:
        """Wait for the engine to die, bring it back with growing delays, and give up on a crash loop."""
        crashes, delay = 0, _FIRST_DELAY_S
        while True:
            served_since = time.monotonic()
            await self._until_lost()
            why = await self._death()
            if time.monotonic() - served_since > _STABLE_S:
                crashes, delay = 0, _FIRST_DELAY_S
            while True:
                crashes += 1
                if self._is_draining or crashes > _MAX_CRASHES:
                    self._give_up(why, crashes)
                    return
                log.error("%s; starting it again in %.1f s", why, delay)
                self._set_state(EngineState.RESTARTING, why)
                await asyncio.sleep(delay)
                delay = min(delay * 2, _LONGEST_DELAY_S)
                try:
                    await self._launch()
                    break
                except Exception as error:
                    await self._reap()
                    why = f"the engine did not come back: {error}"
            log.info("the engine serves again")

    def _give_up(self, why: str, crashes: int) -> None:
        times = "while the server shuts down" if self._is_draining else f"it died {crashes} times in a row"
        reason = f"{why}; {times}, so it is not started again"
        log.error(reason)
        self._set_state(EngineState.DEAD, reason)

    async def _until_lost(self) -> None:
        watchdog = asyncio.create_task(self._watch(), name="watchdog")
        try:
            await self._lost.wait()
        finally:
            watchdog.cancel()

    async def _death(self) -> str:
        """Reap the process and say why it ended."""
        status = _describe(await self._reap())
        reported = f": {self._failure.message}" if self._failure is not None else ""
        return f"the engine process ended ({status}){reported}"

    async def _watch(self) -> None:
        """Notice a death that the socket did not tell, and end an engine that hangs.

        One that has said nothing for half of step_timeout_s while requests are open is asked whether it is there; its
        loop answers between steps, whether or not it has work that it can do. The time is counted here: while this
        process is held up itself (a frozen container, say), nobody could have answered.
        """
        timeout_s = self.config.step_timeout_s
        period_s, silent_s, asked = min(_WATCH_S, timeout_s / 4), 0.0, False
        while True:
            await asyncio.sleep(period_s)
            if self._process is not None and self._process.poll() is not None and self._frames is not None:
                self.on_lost(self._frames)  # a child of the engine's may still hold the socket
            if self._has_news or self.router is None or not self.router.num_open:
                self._has_news, silent_s, asked = False, 0.0, False
                continue
            silent_s += period_s
            if silent_s > timeout_s:
                self._end_hung(silent_s)
                return
            if silent_s > timeout_s / 2 and not asked:
                asked = True
                log.warning("the engine has said nothing for %.0f s while requests are open", silent_s)
                with contextlib.suppress(EngineDeadError):
                    self._send(Control(_PING, "ping", {}))

    def _end_hung(self, silent_s: float) -> None:
        """Kill it; the supervision starts it again. Open requests end now, even if the kernel cannot end it at once."""
        assert self._process is not None, "the engine was started"
        assert self._frames is not None, "the engine was started"
        reason = f"the engine hung: no step finished for {silent_s:.0f} s (--step-timeout-s), so it was ended"
        self._failure = Failed(reason, 1, "")
        self._process.kill()
        self.on_lost(self._frames)

    async def _reap(self) -> int:
        """Make sure the process is gone; returns its exit status."""
        process = self._process
        assert process is not None, "the engine was started"
        if self._transport is not None:
            self._transport.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await asyncio.get_running_loop().run_in_executor(None, process.wait)

    async def close(self) -> None:
        """Stop the engine process. It is killed at once unless it serves and is idle, and if it does not stop in time:
        one that starts, hangs, or has requests that nobody waits for any more would only keep the caller waiting.
        """
        is_idle = self.router is not None and not self.router.num_open
        may_stop = is_idle and self._state in (EngineState.RUNNING, EngineState.DRAINING)
        if self._supervision is not None:
            self._supervision.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervision
        self._set_state(EngineState.DEAD, "the client was closed")
        self._fail_open("the engine was stopped")
        if self._process is not None:
            try:
                if may_stop:
                    await self._stop(self._process)
            finally:
                self._process.kill()
            await self._reap()
        await asyncio.to_thread(self._audience.close)

    async def _stop(self, process: subprocess.Popen[bytes]) -> None:
        """Let the loop end by itself, so that its parts are closed."""
        with contextlib.suppress(EngineDeadError, subprocess.TimeoutExpired):
            self._send(Stop())
            await asyncio.get_running_loop().run_in_executor(None, process.wait, _STOP_TIMEOUT_S)

    # -- transport -----------------------------------------------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        transport = self._transport
        if transport is None or transport.is_closing() or self._lost.is_set():
            raise EngineDeadError(f"the engine is {self._state.value}: {self._reason or 'not started'}")
        transport.write(frame(message))

    def on_message(self, message: FromEngine) -> None:
        """Called by the transport for each message, on the event loop."""
        self._has_news = True
        if isinstance(message, Outputs):
            self._on_outputs(message.outputs)
        elif isinstance(message, Reply):
            self._on_reply(message)
        elif isinstance(message, Progress):
            self._progress(message.stage)
        elif isinstance(message, Failed):
            self._failure = message
        elif isinstance(message, Ready) and self._ready is not None:
            self._ready.set_result(message.info)

    def on_lost(self, frames: _Frames) -> None:
        """Called by the transport when the connection ends: the engine is gone, or going."""
        if frames is not self._frames or self._lost.is_set():
            return  # of an earlier process, or known already
        self._lost.set()
        message = self._failure.message if self._failure is not None else "the engine process died"
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(self._startup_error(message))
            return
        if self._state is EngineState.RUNNING:
            self._set_state(EngineState.RESTARTING, message)
        self._fail_open(f"{message}; the request may be sent again")

    def _startup_error(self, message: str) -> EnginectlError:
        failure = self._failure
        if failure is None:
            return EngineDeadError("the engine process died while starting; its log says why")
        error: EnginectlError = (UsageError if failure.exit_status == 2 else EnginectlError)(message)
        error.add_note(failure.traceback)
        return error


class _Frames(asyncio.Protocol):
    """Cuts the byte stream into messages."""

    def __init__(self, owner: EngineProcess) -> None:
        self._owner = owner
        self._buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= HEADER.size:
            (size,) = HEADER.unpack_from(buffer, start)
            end = start + HEADER.size + size
            if len(buffer) < end:
                break
            message = from_engine_decoder.decode(bytes(buffer[start + HEADER.size : end]))
            start = end
            self._owner.on_message(message)
        del buffer[:start]

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.on_lost(self)


def _describe(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"
