"""What a launched rank prints when it ends because of another: two lines, so that those of the other one are seen."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

from asyncdist.errors import GroupAbortedError, PeerLostError

__all__ = ["shorten_if_uncaught"]

_LAUNCHED: Final = "TORCHELASTIC_RUN_ID"
_ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
_SHORT: Final = "_asyncdist_short"
"""An error with this attribute is printed in short; its value is the error file."""
_WHERE: Final = "(this rank ended because of that; its traceback: {}ASYNCDIST_DEBUG=INFO prints it)"


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
