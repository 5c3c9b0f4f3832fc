"""What a launched rank prints when it ends because of another: two lines, so that those of the other one are seen."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

from asyncdist.errors import GroupAbortedError, PeerLostError

__all__ = ["shorten_if_uncaught"]

_LAUNCHED: Final = "TORCHELASTIC_RUN_ID"
_ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
_WHERE: Final = "(this rank ended because of that; its traceback: {}ASYNCDIST_DEBUG=INFO prints it)"


def shorten_if_uncaught(error: BaseException, environ: Mapping[str, str] = os.environ) -> None:
    """Let Python print `error` in short, should it end the process: if a launcher shows what ended the other rank."""
    first = _consequence(error)
    if first is None or _LAUNCHED not in environ or environ.get("ASYNCDIST_DEBUG"):
        return
    otherwise = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, where: TracebackType | None) -> None:
        if value is not error:
            otherwise(kind, value, where)
            return
        path = environ.get(_ERROR_FILE, "")
        written = bool(path) and _write(Path(path), value)
        short = "".join(traceback.format_exception_only(first))
        print(short + _WHERE.format(f"{path}, or " if written else ""), file=sys.stderr)

    sys.excepthook = hook


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
