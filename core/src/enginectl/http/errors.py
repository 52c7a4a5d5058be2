"""Errors as HTTP answers, in OpenAI's form `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from enginectl.errors import DeadlineError, EnginectlError, EngineDeadError, OverloadedError, RequestError

MAX_MESSAGE_CHARS = 2000
"""A longer message is cut: it quotes what the caller sent."""

_RETRY_AFTER_DEAD_S = 5


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong. param: the offending field. code: a short word for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class HttpError(msgspec.Struct, frozen=True):
    """An exception as status, body and headers. unexpected: nobody raised it on purpose, so it belongs in the log."""

    status: int
    body: ErrorBody
    headers: dict[str, str]
    unexpected: bool = False


def describe(exc: BaseException) -> HttpError:
    """How an exception is answered. Only messages of our own errors are shown to the caller."""
    if isinstance(exc, RequestError):
        headers = {"Retry-After": str(exc.retry_after_s)} if isinstance(exc, OverloadedError) else {}
        if exc.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if exc.status == 413:
            headers["Connection"] = "close"
        if isinstance(exc, DeadlineError):
            headers["X-Should-Retry"] = "false"  # the official clients would, and the caller's time is over
        return _http_error(exc.status, str(exc), exc.param, exc.code, headers)
    if isinstance(exc, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(exc.status_code)
        return _http_error(exc.status_code, str(exc.detail), None, code, dict(exc.headers or {}))
    if isinstance(exc, EngineDeadError):
        return _http_error(503, str(exc), None, "engine_unavailable", {"Retry-After": str(_RETRY_AFTER_DEAD_S)})
    if isinstance(exc, EnginectlError):
        return _http_error(500, str(exc), None, "engine_error", {})
    known = _http_error(500, "internal error; the server's log has the details", None, "internal_error", {})
    return msgspec.structs.replace(known, unexpected=True)


def _http_error(status: int, message: str, param: str | None, code: str | None, headers: dict[str, str]) -> HttpError:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    detail = ErrorDetail(message=_printable(message), type=kind, param=param and _printable(param), code=code)
    return HttpError(status, ErrorBody(detail), headers)


def _printable(text: str) -> str:
    if len(text) > MAX_MESSAGE_CHARS:
        text = text[:MAX_MESSAGE_CHARS] + "…"
    return text.encode("utf-8", "replace").decode()


def error_response(exc: BaseException) -> Response:
    """The whole answer for an exception."""
    error = describe(exc)
    return json_response(error.body, error.status, error.headers)


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer. Values msgspec does not know are shown as text."""
    content = msgspec.json.encode(value, enc_hook=str)
    return Response(content, status_code=status, headers=headers, media_type="application/json")
