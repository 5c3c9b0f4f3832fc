"""Telling a failure from what it brought down.

The worker that fails first is not always the first to end: the others hear of it within microseconds, and may be gone
while it still unwinds. Their last words give them away.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

__all__ = ["is_consequence"]

_EXCEPTION_LINE: Final = re.compile(rb"[ |+]*([\w.]+(?:Error|Exception|Interrupt|Exit))(?::|$)")
_CONSEQUENCES: Final = (b"asyncdist.errors.PeerLostError", b"asyncdist.errors.GroupAbortedError")


def is_consequence(last_lines: Iterable[bytes]) -> bool:
    """Whether a worker's last lines end with an exception that says that another worker failed."""
    exceptions = [match for line in last_lines if (match := _EXCEPTION_LINE.match(line))]
    return bool(exceptions) and exceptions[-1][1] in _CONSEQUENCES
