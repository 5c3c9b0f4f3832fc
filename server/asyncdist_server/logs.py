"""What the daemon tells its log: one event a line, a name and fields, as text or as JSON, and few lines under attack.

    log = EventLog(logging.getLogger("asyncdist_server"))
    log.warning("connection_refused", peer="127.0.0.1:50112", reason="the tokens differ")

Nothing is set up by this: the process that runs the daemon decides, `configure` is what `asyncdist-server` decides.
Fields may come from strangers: they cannot begin a new line, nor pass for another field.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
import time
from collections.abc import Callable
from typing import Any, Final, Literal

LogFormat = Literal["text", "json"]
FORMATS: Final = ("text", "json")
LEVELS: Final = ("debug", "info", "warning", "error")

LINES_PER_WINDOW: Final = 20
"""Lines of one event in a window. Who knocks a thousand times a second fills no disk, and hides no other event."""
WINDOW_S: Final = 1.0
"""After so long what was left out is counted in one line, and lines are written again."""
MAX_FIELD_CHARACTERS: Final = 500
"""Longest text of a field: a stranger may say much."""
_PLAIN: Final = re.compile(r"[\w.:/@+\-\[\]]+", re.ASCII)
"""Values that need no quotes."""

Timer = Callable[[float, Callable[[], None]], Any]


class Event:
    """A log message: its name and fields. As text: ``name key=value key="some words"``."""

    __slots__ = ("fields", "name")

    def __init__(self, name: str, fields: dict[str, Any]) -> None:
        self.name = name
        self.fields = {
            key: value[:MAX_FIELD_CHARACTERS] if isinstance(value, str) else value
            for key, value in fields.items()
            if value is not None
        }

    def __str__(self) -> str:
        return " ".join((self.name, *(f"{key}={_shown(value)}" for key, value in self.fields.items())))


def _shown(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


class EventLog:
    """Writes events to a logger, at most `LINES_PER_WINDOW` of each name in a window of `WINDOW_S`.

    `start_timer` (delay in seconds, function) lets the count of what was left out be written in time; `close` writes
    what is due then.
    """

    def __init__(
        self, logger: logging.Logger, start_timer: Timer | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._start_timer = start_timer
        self._clock = clock
        self._window_began_s = -WINDOW_S
        self._lines: dict[str, int] = {}
        self._timer: Any = None

    def info(self, name: str, **fields: Any) -> None:
        """Write an event that is as it should be."""
        self._log(logging.INFO, name, fields)

    def warning(self, name: str, **fields: Any) -> None:
        """Write an event to look at some day."""
        self._log(logging.WARNING, name, fields)

    def error(self, name: str, **fields: Any) -> None:
        """Write an event to look at now."""
        self._log(logging.ERROR, name, fields)

    def close(self) -> None:
        """Write what is due; the timer is no longer needed."""
        if self._timer is not None:
            self._timer.cancel()
        self._report()

    def _log(self, level: int, name: str, fields: dict[str, Any]) -> None:
        if not self._logger.isEnabledFor(level):
            return
        now = self._clock()
        if now - self._window_began_s >= WINDOW_S:
            self._report()
            self._window_began_s = now
        lines = self._lines[name] = self._lines.get(name, 0) + 1
        if lines <= LINES_PER_WINDOW:
            self._logger.log(level, Event(name, fields))
        elif self._timer is None and self._start_timer is not None:
            self._timer = self._start_timer(self._window_began_s + WINDOW_S - now, self._report)

    def _report(self) -> None:
        """Say how many lines were left out, and begin to count anew."""
        self._timer = None
        lines, self._lines = self._lines, {}
        for name, count in lines.items():
            if count > LINES_PER_WINDOW:
                fields = {"suppressed": name, "lines": count - LINES_PER_WINDOW}
                self._logger.warning(Event("lines_suppressed", fields))


class TextFormatter(logging.Formatter):
    """``2026-03-01T12:00:00.123Z warning connection_refused peer=...``; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text."""
        text = f"{_time_of(record)} {record.levelname.lower()} {record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class JSONFormatter(logging.Formatter):
    """One JSON object a line: time, level, event, its fields; of what is no event, logger and message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        told: dict[str, Any] = {"time": _time_of(record), "level": record.levelname.lower()}
        if isinstance(record.msg, Event):
            told |= {"event": record.msg.name, **record.msg.fields}
        else:
            told |= {"event": "message", "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def _time_of(record: logging.LogRecord) -> str:
    when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def configure(log_format: LogFormat, level: str) -> None:
    """Let the whole process log to standard error like this."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
