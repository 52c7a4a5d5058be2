"""Log lines of the API and the engine process: one format, one place, text for people or JSON for collectors."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

import msgspec

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
_ROUTED = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """log_level: debug, info, warning, error. log_format: text, or json for one object a line."""

    log_level: str = "info"
    log_format: str = "text"


def configure_logging(config: LogConfig, *, process: str = "api", stream: TextIO | None = None) -> None:
    """Send every logger of this process to standard error in our format. Calling it again replaces the set-up.

    process: what the component of a line begins with, `api` or `engine`. Other libraries speak from warnings up.
    """
    assert config.log_level in LEVELS, f"unchecked {config}"
    assert config.log_format in FORMATS, f"unchecked {config}"
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(process) if config.log_format == "json" else TextFormatter(process))
    level = getattr(logging, config.log_level.upper())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING) if level > logging.DEBUG else logging.INFO)
    logging.getLogger("enginectl").setLevel(level)
    for name in _ROUTED:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(level)
    # Requests are logged once, by the API itself: uvicorn's line would say less about the same request.
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)


def component(process: str, logger: str) -> str:
    """`engine/plugins` for the logger `enginectl.plugins` in the engine process."""
    name = logger.removeprefix("enginectl").lstrip(".").replace("uvicorn.error", "uvicorn")  # not only errors
    return f"{process}/{name}" if name else process


class TextFormatter(logging.Formatter):
    """`12:00:01.250 info    engine/plugins: message`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback below it if there is one."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = (
            f"{clock}.{int(record.msecs):03d} {record.levelname.lower():7} "
            f"{component(self._process, record.name)}: {record.getMessage()}"
        )
        return line + "\n" + self.formatException(record.exc_info) if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, ISO 8601), level, component, message, and error with a traceback."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{second}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "component": component(self._process, record.name),
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)
