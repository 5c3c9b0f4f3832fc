"""Places at which a test can make the daemon die, as a power cut would: ASYNCDIST_SERVER_FAILPOINT=name:count.

The process kills itself when it passes that place for the `count`-th time. Unset, as in every real daemon, a place
costs a comparison.
"""

from __future__ import annotations

import functools
import os
import signal
from collections import Counter
from typing import Final

VARIABLE: Final = "ASYNCDIST_SERVER_FAILPOINT"
NAMES: Final = ("begun", "written", "committed", "checkpointed", "backed-up")
"""Before a batch is written, before its commit, before anyone is told; after a checkpoint; before a backup is named."""

_passed: Counter[str] = Counter()


@functools.cache
def _wanted() -> tuple[str, int]:
    name, _, count = os.environ.get(VARIABLE, "").partition(":")
    return name, int(count or 1)


def failpoint(name: str) -> None:
    """Die here if that is what a test asked for."""
    wanted, count = _wanted()
    if name == wanted:
        _passed[name] += 1
        if _passed[name] == count:
            os.kill(os.getpid(), signal.SIGKILL)
