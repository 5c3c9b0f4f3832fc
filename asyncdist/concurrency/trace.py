"""What the library says to people: log lines, trace points, misspelt variables, the calling line, short tracebacks.

`ASYNCDIST_DEBUG` is read when a group is initialised, never at import: unset or OFF says nothing, INFO one line per
decision (addresses, transport per peer), TRACE or TRACE:init,net,store,tune every step of those subjects.

A launched rank that ends because another one did prints two lines, so that those of the other are seen.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final

from asyncdist.errors import GroupAbortedError, PeerLostError

SUBJECTS: Final = ("init", "net", "store", "tune")

PREFIX: Final = "ASYNCDIST_"

VARIABLES: Final = frozenset(
    """ADVERTISE ALGO CALL_SITES CHECK CUDA_PATH DEBUG DUMP_DIR EMPTY_BYTES HUGE_PAGES INSPECT JOB_ID KEEPALIVE_S
    LOSSES METRICS PORT_RANGE ROUND SHM_BYTES SINGLE_COPY SLOW_S SOCKET_DIR SOCKET_IFNAME SPIN_US STORE STORE_OUTAGE
    STREAMS SWITCH_INTERVAL TIMEOUT TLS_CA TLS_CERT TLS_KEY TLS_SERVER_NAME TOKEN TOKEN_FILE TRANSPORT TUNING""".split()  # noqa: SIM905 - a line each is no easier to read
)
"""Those that are read here, without the prefix. The daemon looks after its own, which begin with SERVER_."""

_OURS: Final = frozenset({"asyncdist", "asyncio", "threading", "concurrent", "contextvars", "uvloop"})
"""Packages whose lines are not what calls."""
_LAUNCHED: Final = "TORCHELASTIC_RUN_ID"
_ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
_SHORT: Final = "_asyncdist_short"
"""An error with this attribute is printed in short; its value is the error file."""
_WHERE: Final = "(this rank ended because of that; its traceback: {}ASYNCDIST_DEBUG=INFO prints it)"

_logger = logging.getLogger("asyncdist")
_traced: frozenset[str] = frozenset()
_told: set[str] = set()


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


def shows_info() -> bool:
    """Whether such lines are shown: ask before finding out what is for them alone."""
    return _logger.isEnabledFor(logging.INFO)


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


def misspelt(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that resemble one of ours and are none, each with what is meant.

    Others may be the program's own.
    """
    found = {}
    for variable in sorted(environ):
        name = variable.removeprefix(PREFIX)
        if name == variable or name in VARIABLES or name.startswith("SERVER_"):
            continue
        for near in difflib.get_close_matches(name, VARIABLES, 1):
            found[variable] = PREFIX + near
    return found


def warn_of_misspelt(environ: Mapping[str, str]) -> None:
    """Say so once in a process, and of the ranks of a host by the first."""
    if environ.get("LOCAL_RANK", "0") != "0":
        return
    for variable, meant in misspelt(environ).items():
        if variable not in _told:
            _told.add(variable)
            warn("environment variable %s is not known and has no effect: did you mean %s?", variable, meant)


def calling_frame() -> FrameType | None:
    """Return the innermost frame of neither the library nor what it runs on; None in the communication thread, say."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame = frame.f_back
    return frame


def shorten_if_uncaught(error: BaseException, environ: Mapping[str, str] = os.environ) -> None:
    """Let Python print `error` in short, should it end the process: if a launcher shows what ended the other rank."""
    if _consequence(error) is None or _LAUNCHED not in environ or environ.get("ASYNCDIST_DEBUG"):
        return
    setattr(error, _SHORT, environ.get(_ERROR_FILE, ""))
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


class _Hook:
    """Prints marked errors in short, and all others as they were printed before."""

    def __init__(self, otherwise: Callable[..., object]) -> None:
        self._otherwise = otherwise

    def __call__(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        path = getattr(error, _SHORT, None)
        first = _consequence(error)
        if path is None or first is None:
            self._otherwise(kind, error, where)
            return
        written = bool(path) and _write(Path(path), error)
        short = "".join(traceback.format_exception_only(first))
        print(short + _WHERE.format(f"{path}, or " if written else ""), file=sys.stderr)


def _consequence(error: BaseException) -> PeerLostError | GroupAbortedError | None:
    """The error that says that another rank ended, if that is all that `error` says."""
    if isinstance(error, BaseExceptionGroup):
        found = [_consequence(each) for each in error.exceptions]
        return found[0] if all(found) else None
    return error if isinstance(error, PeerLostError | GroupAbortedError) else None


def _write(path: Path, error: BaseException) -> bool:
    """Write torch's error file, unless the script has written one."""
    text = "".join(traceback.format_exception(error))
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError), path.open("x") as file:
        json.dump({"message": {"message": str(error), "extraInfo": extra}}, file)
        return True
    return False
