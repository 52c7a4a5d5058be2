"""The engine process: assemble, then loop. Its socket is its life line: when the API side goes away, so does it.

Started as `python -m enginectl.engine.process FD`, with a connected socket inherited under that number.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from enginectl.engine.messages import (
    HEADER,
    Abort,
    Control,
    Failed,
    FromEngine,
    Outputs,
    Progress,
    Ready,
    Reply,
    Start,
    Stop,
    Submit,
    ToEngine,
    frame,
    to_engine_decoder,
)
from enginectl.errors import EnginectlError, RequestError

if TYPE_CHECKING:
    from enginectl.compose import Assembled
    from enginectl.engine.control import ControlDesk
    from enginectl.interfaces.adapter import AdapterBackend

log = logging.getLogger("enginectl.engine")

_STALLED_WAIT_S = 0.002
"""How long to wait for news when waiting requests need something that is not there yet."""


_PR_SET_PDEATHSIG = 1


class EngineServer:
    """Runs one engine over one socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()

    def run(self) -> int:
        """Until told to stop. Returns the exit status."""
        threading.Thread(target=self._read, name="inbox", daemon=True).start()
        start = self._inbox.get()
        assert isinstance(start, Start), "the first message says what to assemble"
        try:
            engine = self._assemble(start)
        except EnginectlError as error:
            self._send(Failed(str(error), error.exit_status, traceback.format_exc()))
            return error.exit_status
        except Exception as error:
            self._send(Failed(f"{type(error).__name__}: {error}", 1, traceback.format_exc()))
            return 1
        self._send(Ready(engine.info))
        try:
            self._loop(engine)
        except Exception as error:
            log.exception("the engine loop failed")
            self._send(Failed(f"{type(error).__name__}: {error}", 1, traceback.format_exc()))
            return 1
        engine.close()
        return 0

    def _assemble(self, start: Start) -> Assembled:
        from enginectl.logs import configure_logging

        configure_logging(start.log, process="engine")
        self._send(Progress("importing torch"))
        from enginectl.compose import compose
        from enginectl.engine.threads import use_threads
        from enginectl.machine import detect_machine

        machine = detect_machine()
        use_threads(start.config, machine)
        engine = compose(start.config, machine=machine, progress=lambda stage: self._send(Progress(stage)))
        adapter: AdapterBackend | None = engine.parts.get("adapter")
        if adapter is None:
            return engine
        for name, path in start.adapters.items():
            try:
                if path is not None:
                    adapter.load(name, path, replace=adapter.version(name) is not None)
                elif adapter.version(name) is not None:
                    adapter.unload(name)
            except Exception as error:  # its files may be gone; the engine is worth more than one adapter
                log.error("adapter %s does not come back: %s", name, error)
        return engine

    def _loop(self, engine: Assembled) -> None:
        from enginectl.engine.control import ControlDesk

        core, desk, inbox = engine.core, ControlDesk(engine), self._inbox
        step, send = core.step, self._send
        while True:
            message: ToEngine | None = None
            try:
                if not core.has_work:
                    message = inbox.get()
                elif not core.made_progress:
                    message = inbox.get(timeout=_STALLED_WAIT_S)
                else:
                    message = inbox.get_nowait()
            except queue.Empty:
                pass
            while message is not None:
                if isinstance(message, Stop):
                    return
                self._handle(message, engine, desk)
                try:
                    message = inbox.get_nowait()
                except queue.Empty:
                    message = None
            for outputs in step():
                send(Outputs(outputs))

    def _handle(self, message: ToEngine, engine: Assembled, desk: ControlDesk) -> None:
        if isinstance(message, Submit):
            for spec in message.requests:
                engine.core.add(spec)
        elif isinstance(message, Abort):
            engine.core.abort(message.keys)
        elif isinstance(message, Control):
            reply = answer(desk, message, self._inbox.put)
            if reply is not None:
                self._send(reply)

    def _read(self) -> None:
        """Frames to the inbox. When the other side is gone, the process ends at once, whatever it is doing."""
        stream = self._socket.makefile("rb", buffering=1 << 20)
        try:
            while header := stream.read(HEADER.size):
                (size,) = HEADER.unpack(header)
                body = stream.read(size)
                if len(body) < size:
                    break
                self._inbox.put(to_engine_decoder.decode(body))
        except (OSError, struct.error):  # cut off in the middle of a frame
            pass
        except msgspec.DecodeError:
            log.exception("a message that cannot be read")
            os._exit(1)
        os._exit(0)

    def _send(self, message: FromEngine) -> None:
        try:
            self._socket.sendall(frame(message))
        except OSError:  # nobody is there to read
            os._exit(0)


def answer(desk: ControlDesk, message: Control, again: Callable[[Control], None]) -> Reply | None:
    """Handle a control message; a wrong one is answered with its error.

    None: the answer is not known yet, and `again` will be called with the message, on another thread, when it is.
    """
    from enginectl.engine.control import NotYet

    try:
        return Reply(message.id, desk.handle(message.name, message.arguments))
    except NotYet as pending:
        pending.future.add_done_callback(lambda _: again(message))
        return None
    except RequestError as error:
        return Reply(message.id, error=str(error), param=error.param)
    except Exception as error:
        log.exception("control message %s failed", message.name)
        return Reply(message.id, error=f"{type(error).__name__}: {error}")


def main() -> None:
    """Entry of the engine process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent's to handle: it drains before it stops us
        signal.signal(number, signal.SIG_IGN)
    _die_with_parent()
    sock = socket.socket(fileno=int(sys.argv[1]))
    status = 1
    try:
        status = EngineServer(sock).run()
    except Exception:
        log.exception("the engine loop failed")
    finally:
        logging.shutdown()
        sock.close()
        os._exit(status)  # threads of libraries do not hold the process back


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent dies, which reaches even a process that hangs or is stopped.

    Linux only; elsewhere, and if the parent is gone already, the socket tells.
    """
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main()
