"""API keys: which one a request brought, compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.requests import Request

from enginectl.config import ServerConfig
from enginectl.errors import RequestError


def bearer_key(headers: Headers) -> str | None:
    """The key in `Authorization: Bearer KEY`, or None."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


def matching_key(key: str, keys: Sequence[str]) -> int | None:
    """The place of `key` among `keys`, or None. Takes the same time whichever matches."""
    given = key.encode("utf-8", "surrogateescape")
    found = None
    for place, known in enumerate(keys):
        if hmac.compare_digest(given, known.encode()):
            found = place
    return found


def require_admin(request: Request, server: ServerConfig) -> None:
    """Let only the administrator pass: routes that change the server call this first.

    Raises RequestError: 403 when no admin key is configured or another key was sent, 401 when none was sent.
    """
    if server.admin_api_key is None:
        raise RequestError(
            "administrative routes are off; start the server with --admin-api-key to use them",
            code="admin_disabled",
            status=403,
        )
    key = bearer_key(request.headers)
    if key is None:
        raise RequestError("send the admin key as `Authorization: Bearer KEY`", code="invalid_api_key", status=401)
    if matching_key(key, (server.admin_api_key,)) is None:
        raise RequestError("this route needs the admin key", code="admin_key_required", status=403)
