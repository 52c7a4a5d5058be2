"""Which server to load. By default only one on this machine."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

import msgspec

from enginectl.errors import UsageError


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """An address, and what goes in front of every path and into every request's headers."""

    host: str
    port: int
    is_tls: bool = False
    prefix: str = ""
    api_key: str | None = None

    @property
    def url(self) -> str:
        """The address without the API's path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.prefix}"

    def head(self, method: str, path: str) -> bytes:
        """The request line and the headers, up to the value of content-length."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"host: {host}:{self.port}",
            "user-agent: enginectl-bench",
            "accept: */*",
            "content-type: application/json",
        ]
        if self.api_key is not None:
            lines.append(f"authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "content-length: "]).encode("latin-1")


def parse_target(url: str, *, api_key: str | None = None, allow_remote: bool = False) -> Target:
    """Read an address, with or without a trailing /v1. Raises UsageError if it is none, or not on this machine."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{url!r} is not an address ({error}); give http://HOST:PORT") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
        raise UsageError(f"{url!r} is not an address; give http://HOST:PORT")
    if not (parts.hostname + parts.path + (api_key or "")).isprintable() or not (api_key or "").isascii():
        raise UsageError(f"the address {url!r} or the API key has characters that no HTTP header takes")
    if not allow_remote and not _is_loopback(parts.hostname):
        raise UsageError(
            f"{parts.hostname!r} is not this machine; a load test can take a server down, "
            "so give --allow-remote if it is yours to load"
        )
    return Target(
        host=parts.hostname,
        port=port or (443 if parts.scheme == "https" else 80),
        is_tls=parts.scheme == "https",
        prefix=parts.path.rstrip("/").removesuffix("/v1"),
        api_key=api_key,
    )


def _is_loopback(host: str) -> bool:
    """By the name alone: nothing is asked of a name server."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
