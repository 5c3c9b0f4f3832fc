"""The environment variables of asyncdist, and what is said of one that is misspelt: nothing reads it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Final

from asyncdist.concurrency import trace as events

__all__ = ["PREFIX", "VARIABLES", "misspelt", "warn_of_misspelt"]

PREFIX: Final = "ASYNCDIST_"

VARIABLES: Final = frozenset(
    """ALGO CHECK CUDA_PATH DEBUG EMPTY_BYTES JOB_ID KEEPALIVE_S ROUND SHM_BYTES SINGLE_COPY SOCKET_DIR SOCKET_IFNAME
    SPIN_US STORE STORE_OUTAGE SWITCH_INTERVAL TIMEOUT TLS_CA TLS_CERT TLS_KEY TLS_SERVER_NAME TOKEN TOKEN_FILE
    TRANSPORT TUNING""".split()  # noqa: SIM905 - a line each is no easier to read
)
"""Those that are read here, without the prefix. The daemon looks after its own, which begin with SERVER_."""

_told: set[str] = set()


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
            events.warn("environment variable %s is not known and has no effect: did you mean %s?", variable, meant)
