"""What the library says about itself: log lines by level, and trace points that are off by default.

`ASYNCDIST_DEBUG` is read when a group is initialised, never at import: unset or OFF says nothing, INFO one line per
decision (addresses, transport per peer), TRACE or TRACE:init,net,store,tune every step of those subjects.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, Final

__all__ = ["SUBJECTS", "configure_logging", "emit", "info", "tracing", "warn"]

SUBJECTS: Final = ("init", "net", "store", "tune")

_logger = logging.getLogger("asyncdist")
_traced: frozenset[str] = frozenset()


def configure_logging(value: str | None = None) -> None:
    """Apply `ASYNCDIST_DEBUG` (or `value`).

    Raises ValueError for a word that is neither OFF, INFO, TRACE nor TRACE:subjects.
    """
    global _traced
    text = (os.environ.get("ASYNCDIST_DEBUG", "") if value is None else value).strip()
    level, _, subjects = text.partition(":")
    level = level.upper()
    if level in ("", "0", "OFF"):
        _traced = frozenset()
        return
    chosen = frozenset(filter(None, subjects.lower().split(","))) or frozenset(SUBJECTS)
    if level not in ("INFO", "TRACE") or not chosen <= set(SUBJECTS):
        raise ValueError(f"ASYNCDIST_DEBUG={text!r}: use OFF, INFO, TRACE or TRACE:{','.join(SUBJECTS)}")
    _traced = chosen if level == "TRACE" else frozenset()
    if not _logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s asyncdist %(message)s", "%H:%M:%S"))
        _logger.addHandler(handler)
        _logger.propagate = False
    _logger.setLevel(logging.DEBUG if level == "TRACE" else logging.INFO)


def info(message: str, *args: object) -> None:
    """Log one line about a decision (shown from ASYNCDIST_DEBUG=INFO on)."""
    _logger.info(message, *args)


def warn(message: str, *args: object) -> None:
    """Log one line about something that is not as it should be, and is done without (always shown)."""
    _logger.warning(message, *args)


def tracing(subject: str) -> bool:
    """Whether trace points of `subject` are wanted; ask before building their fields."""
    return subject in _traced


def emit(subject: str, name: str, **fields: Any) -> None:
    """Write one trace point to the log, if its subject is traced."""
    if subject in _traced:
        _logger.debug("%s.%s %s", subject, name, " ".join(f"{key}={value}" for key, value in fields.items()))
