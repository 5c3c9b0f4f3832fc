"""Places at which a test can make the daemon die, as a power cut would: ASYNCDIST_SERVER_FAILPOINT=name:count.

The process kills itself when it passes that place for the `count`-th time. Unset, as in every real daemon, a place
costs a comparison.
"""

from __future__ import annotations

import os
import signal
from typing import Final

VARIABLE: Final = "ASYNCDIST_SERVER_FAILPOINT"
NAMES: Final = ("begun", "written", "committed", "checkpointed", "backed-up")
"""Before a batch is written, before its commit, before anyone is told; after a checkpoint; before a backup is named."""

_name, _, _count = os.environ.get(VARIABLE, "").partition(":")
_passes_left = int(_count or 1)


def failpoint(name: str) -> None:
    """Die here if that is what a test asked for."""
    global _passes_left
    if name == _name:
        _passes_left -= 1
        if _passes_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
