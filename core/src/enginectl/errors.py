"""Every error a caller can meet.

Each message says what was asked, what was found, what is allowed and what to do. Two families matter to callers:
`UsageError` (the command or configuration is wrong: exit status 2) and everything else (exit status 1). Over HTTP a
`RequestError` is a 400-class answer that touched no other request.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EnginectlError(Exception):
    """Base of every error raised on purpose. `exit_status` is what the command line returns."""

    exit_status = 1


class UsageError(EnginectlError):
    """A flag, file or value is wrong. Nothing was started."""

    exit_status = 2


class ConfigError(UsageError):
    """A configuration value has the wrong name, type or range, or contradicts another."""


class PluginError(UsageError):
    """A named plugin is unknown, failed to load, clashes, was written for another API or cannot serve here."""


class UnsupportedError(PluginError):
    """Two chosen parts cannot work together, or a part cannot run on this machine. Names both parts."""


class ModelError(EnginectlError):
    """The model is missing, unreadable, or of an architecture that cannot be run exactly."""


class OutOfMemoryError(EnginectlError):
    """The weights or the smallest useful KV pool do not fit in the memory this process may use."""


class EngineDeadError(EnginectlError):
    """The engine process is gone or restarting. The request may be sent again."""


class StepError(EnginectlError):
    """A step raised for one row. That row ended with this error; no other was touched."""


class PoolError(EnginectlError):
    """The block ledger was used wrongly (double free, more blocks than there are). A bug in a plugin or in core."""


class RequestError(EnginectlError):
    """A request is wrong, or cannot be served. Raised before it reaches a step.

    status: HTTP status to answer with. param: the offending field, or None. code: short machine-readable word.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class NotFoundError(RequestError):
    """The model or route does not exist (404)."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = "not_found") -> None:
        super().__init__(message, param=param, code=code, status=404)


class DeadlineError(RequestError):
    """The request's own `timeout` passed before it was done (504)."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="timeout", code="timeout", status=504)


class OverloadedError(RequestError):
    """The queue is full or the engine is draining (503). `retry_after_s` becomes the Retry-After header."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message, code="overloaded", status=503)
        self.retry_after_s = retry_after_s


def nearest(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the closest known word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def unknown(kind: str, word: str, known: Iterable[str], *, hint: str = "") -> str:
    """The message for a name nobody knows: what was asked, the nearest name, what exists, what to do."""
    names = sorted(known)
    message = f"no {kind} named {word!r}{nearest(word, names) or ';'} known: {', '.join(names) or 'none'}"
    return f"{message}. {hint}" if hint else message
