"""Request bodies: strict JSON into a msgspec struct; whatever is wrong with one is a 400 that names the place."""

from __future__ import annotations

import re
from typing import Generic, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request

from enginectl.errors import RequestError, nearest

T = TypeVar("T", bound=msgspec.Struct)

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)
_PLACE = re.compile(r"^(?P<problem>.*?) - at (?P<key>`key` in )?`\$(?:\.(?P<path>.*?))?`$", re.DOTALL)


class JsonBody(Generic[T]):
    """Reads bodies of one struct type."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._fields = kind.__struct_fields__

    async def read(self, request: Request) -> T:
        """The decoded body. Raises RequestError (400) that names the field, the problem and what is allowed."""
        _check_headers(request.headers)
        return self.decode(await request.body())

    def decode(self, body: bytes) -> T:
        """As `read`, from bytes."""
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as exc:
            raise self._field_error(str(exc)) from None
        except RecursionError:
            raise RequestError("the body is nested too deeply", code="invalid_json") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            found = "it is empty" if not body else str(exc)
            raise RequestError(f"the body is not a valid JSON object in UTF-8: {found}", code="invalid_json") from None

    def _field_error(self, message: str) -> RequestError:
        problem, path = _split(message)
        if match := _UNKNOWN.fullmatch(problem):
            name = match["name"]
            param = f"{path}.{name}" if path else name
            close = "" if path else nearest(name, self._fields)
            hint = close or "; /openapi.json lists what is accepted"
            return RequestError(f"unknown parameter {param[:100]!r}{hint}", param=param, code="unknown_parameter")
        if match := _MISSING.fullmatch(problem):
            param = f"{path}.{match['name']}" if path else match["name"]
            return RequestError(f"missing parameter {param!r}", param=param, code="missing_parameter")
        where = f"{path}: " if path else "the body: "
        return RequestError(f"{where}{problem[:1].lower()}{problem[1:]}", param=path or None, code="invalid_value")


def _split(message: str) -> tuple[str, str]:
    """`Expected `int` - at `$.a.b`` as problem and path `a.b`."""
    match = _PLACE.match(message)
    if match is None:
        return message, ""
    problem = f"{match['problem']} as a key" if match["key"] else match["problem"]
    return problem, match["path"] or ""


def _check_headers(headers: Headers) -> None:
    media_type, _, parameters = headers.get("content-type", "").partition(";")
    if media_type.strip().lower() != "application/json":
        found = repr(media_type[:100]) if media_type else "none"
        raise RequestError(f"the Content-Type must be application/json; found {found}", code="invalid_content_type")
    charset = re.search(r"charset\s*=\s*\"?([^\s;\"]+)", parameters, re.IGNORECASE)
    if charset is not None and charset[1].lower() not in ("utf-8", "utf8"):
        raise RequestError(f"the charset must be utf-8; found {charset[1][:40]!r}", code="invalid_content_type")
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise RequestError(f"Content-Encoding {encoding[:40]!r} is not supported; send the body uncompressed")
