"""What is known about one HTTP request: its id, and the counts that its access-log line shows."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

REQUEST_ID_PATTERN = r"^[A-Za-z0-9._:@/+=-]{1,128}$(?!\s)"
"""Ids callers may choose; they appear in headers and in the log. (`$` alone would allow a newline at the end.)"""

_KEY = "enginectl.record"
_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)


@dataclass(slots=True)
class RequestRecord:
    """Filled in by the handler. Times are time.monotonic() seconds. tenant: the API key's number, "" without keys.

    suffix: makes an id from a header unique inside the engine, since proxies give one id to several requests.
    trace_headers: of the W3C trace context, where the caller traces.
    """

    request_id: str
    started_s: float = field(default_factory=time.monotonic)
    status: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    first_token_s: float | None = None
    tenant: str = ""
    client_gone: bool = False
    suffix: str = ""
    trace_headers: dict[str, str] = field(default_factory=dict)

    def name(self, request_id: str) -> None:
        """Take the id from the body, which the caller promises to be unique."""
        self.request_id, self.suffix = request_id, ""

    def saw_token(self) -> None:
        """The first token arrived; later calls change nothing."""
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()


def new_record(wanted_id: str | None) -> RequestRecord:
    """A record under the caller's id when it is fit for a header and a log line, else under a new one."""
    if wanted_id is not None and _REQUEST_ID.fullmatch(wanted_id) is not None:
        return RequestRecord(wanted_id, suffix=f"-{uuid.uuid4().hex[:12]}")
    return RequestRecord(uuid.uuid4().hex)


def attach(scope: MutableMapping[str, Any], record: RequestRecord) -> None:
    """Let handlers find the record."""
    scope[_KEY] = record


def record_of(scope: MutableMapping[str, Any]) -> RequestRecord:
    """The record of this request; a fresh one outside `server.build_app`."""
    record = scope.get(_KEY)
    if not isinstance(record, RequestRecord):
        record = new_record(None)
        attach(scope, record)
    return record
