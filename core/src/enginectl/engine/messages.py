"""What crosses the boundary between the API process and the engine process: tagged msgspec structs, length-prefixed."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from enginectl.config import EngineConfig
from enginectl.engine.client import EngineInfo
from enginectl.logs import LogConfig
from enginectl.types import EngineRequest, StepOutputs

HEADER = struct.Struct("<I")
"""Length of the message that follows, bytes."""


class Start(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """First message to an engine process: what to assemble. adapters: path of each that was loaded at run time, to be
    loaded again, and None for each that was unloaded.
    """

    config: EngineConfig
    log: LogConfig
    adapters: dict[str, str | None] = {}


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Choices to run."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Keys of choices nobody waits for."""

    keys: list[int]


class Control(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A control message: reset_prefix_cache, load_adapter, unload_adapter, list_adapters, or a plugin's own."""

    id: int
    name: str
    arguments: dict[str, Any]


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End the process."""


class Progress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Start-up has reached this stage."""

    stage: str


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine serves."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine cannot start or go on. exit_status: 2 for a usage error, 1 otherwise."""

    message: str
    exit_status: int
    traceback: str = ""


class Outputs(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What a step produced."""

    outputs: StepOutputs


class Reply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to a control message; error is set if it was refused."""

    id: int
    value: Any = None
    error: str | None = None
    param: str | None = None


ToEngine = Start | Submit | Abort | Control | Stop
FromEngine = Progress | Ready | Failed | Outputs | Reply

encoder = msgspec.msgpack.Encoder()
to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)


def frame(message: ToEngine | FromEngine) -> bytes:
    """The message with its length in front."""
    body = encoder.encode(message)
    return HEADER.pack(len(body)) + body
