"""Both processes log alike, and other libraries through the same handler."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from enginectl.logs import LogConfig, configure_logging


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    names = ("", "enginectl", "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger.level, list(logger.handlers), logger.propagate) for logger in loggers]
    yield
    for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers
        logger.propagate = propagate


def lines(config: LogConfig, process: str = "api") -> io.StringIO:
    stream = io.StringIO()
    configure_logging(config, process=process, stream=stream)
    return stream


def test_a_line_has_time_level_and_component() -> None:
    stream = lines(LogConfig(), "engine")
    logging.getLogger("enginectl.plugins").info("found %d", 3)
    logging.getLogger("enginectl").warning("odd")
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} info    engine/plugins: found 3", first)
    assert second.endswith("warning engine: odd")


def test_json_lines_are_one_object_each_tracebacks_included() -> None:
    stream = lines(LogConfig(log_format="json"))
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("enginectl.server").exception("failed “%s”", "x")
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert set(entry) == {"time", "level", "component", "message", "error"}
    assert (entry["level"], entry["component"], entry["message"]) == ("error", "api/server", "failed “x”")
    assert "ValueError: two" in entry["error"]


def test_uvicorn_speaks_through_the_same_handler_and_leaves_requests_to_us() -> None:
    logging.getLogger("uvicorn").addHandler(logging.StreamHandler(io.StringIO()))
    stream = lines(LogConfig())
    logging.getLogger("uvicorn.error").info("started")
    logging.getLogger("uvicorn.access").info("GET /")
    assert [line.split(": ", 1)[1] for line in stream.getvalue().splitlines()] == ["started"]


@pytest.mark.parametrize(("level", "ours", "theirs"), [("debug", 4, 3), ("info", 3, 2), ("error", 1, 1)])
def test_other_libraries_speak_from_warnings_up_unless_debugging(level: str, ours: int, theirs: int) -> None:
    for name, count in (("enginectl.x", ours), ("somebody.else", theirs)):
        stream = lines(LogConfig(log_level=level))
        for number in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger(name).log(number, "x")
        assert len(stream.getvalue().splitlines()) == count
