"""Host constants: what `asyncdist tune` found out about this host, kept in a file, and the tuning made of it.

The file lies in the user's cache directory (XDG_CACHE_HOME, else ~/.cache), `asyncdist/tuning-<host>.json`, and holds
one set of constants per word of ASYNCDIST_TRANSPORT. It is read once, by rank 0, when a world is joined.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from asyncdist.concurrency import trace as events
from asyncdist.errors import DistError
from asyncdist.plan.cost.constants import ASYNCIO, ASYNCIO_LOOPBACK, Constants
from asyncdist.plan.selection.tuning import MAX_CORES, Tuning, constants_from_terms, constants_to_terms

FORMAT: Final = "asyncdist tuning"
VERSION: Final = 2
"""Of the file. Those of version 1 know nothing of shared memory and of ranks that share cores."""

MAX_FILE_BYTES: Final = 1 << 20
"""A file has a kilobyte per transport; what is larger is none of ours, and is not read."""

OFF: Final = "off"
"""Value of ASYNCDIST_TUNING that stands for built-in constants."""


def own_tuning(
    environ: Mapping[str, str], world_size: int, *, one_host: bool, transport: str, overrides: Mapping[str, str]
) -> Tuning:
    """Return what this process would have its world use, as rank 0 does.

    `one_host` says that no other host can reach it. Logs a line about a file in the cache directory that cannot be
    used; raises ValueError for one that ASYNCDIST_TUNING names, and for a LOCAL_WORLD_SIZE that is no number.
    """
    ranks_per_host = _ranks_per_host(environ, world_size, one_host=one_host)
    constants = _file_constants(environ, transport) or built_in_constants(transport)
    if constants.between is None:
        constants = replace(constants, between=ASYNCIO.between)
    constants = replace(constants, cores=host_cores(ranks_per_host))
    return Tuning(constants, ranks_per_host, tuple(sorted(overrides.items())))


def agreed_tuning(rank: int, terms: object, overrides: dict[str, str]) -> Tuning:
    """Return the tuning that rank 0 published as `terms`.

    Raises DistError if it is not to be believed, or if this rank's ASYNCDIST_ALGO says otherwise.
    """
    try:
        agreed = Tuning.from_terms(terms)
    except ValueError as error:
        raise DistError(f"rank {rank}: what rank 0 published cannot be used: {error}") from error
    if overrides and overrides != dict(agreed.overrides):
        mine = ",".join(f"{collective}:{algorithm}" for collective, algorithm in overrides.items())
        raise DistError(
            f"rank {rank}: ASYNCDIST_ALGO={mine!r} differs from rank 0's {dict(agreed.overrides)}: it must be the same "
            "on all ranks"
        )
    return agreed


def built_in_constants(transport: str) -> Constants:
    """Return what a word of ASYNCDIST_TRANSPORT stands for where nothing was measured."""
    shares_memory = transport == "shm" or (transport == "auto" and sys.platform == "linux")
    return ASYNCIO if shares_memory else ASYNCIO_LOOPBACK


def host_cores(ranks_per_host: int) -> int:
    """Return the cores that the ranks of this host share."""
    known = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else known
    if allowed == 1:  # pinned to a core of its own, as others will be to theirs: that tells nothing of the host
        allowed = min(known, ranks_per_host)
    return min(allowed, MAX_CORES)


def default_path(environ: Mapping[str, str]) -> Path | None:
    """Return where this host's file is, whether it exists or not; None for a user without a home."""
    base = environ.get("XDG_CACHE_HOME") or (environ.get("HOME") and f"{environ['HOME']}/.cache")
    if not base:
        return None
    host = re.sub(r"[^\w.-]", "_", socket.gethostname()) or "host"
    return Path(base) / "asyncdist" / f"tuning-{host}.json"


def read_file(path: Path) -> dict[str, Any]:
    """Return the parsed file. Raises ValueError, naming the file, for one that is not ours or damaged; OSError."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{path}: more than {MAX_FILE_BYTES} bytes, this is no tuning file")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT or not isinstance(value.get("transports"), dict):
        raise ValueError(f"{path}: not a tuning file")
    if value.get("version") != VERSION:
        found = str(value.get("version"))[:20]
        raise ValueError(f"{path}: a tuning file of version {found}, while this release reads version {VERSION}")
    return value


def stored_constants(path: Path, transport: str) -> Constants | None:
    """Return a file's constants for one transport, None if it has none. Raises ValueError and OSError."""
    entry = read_file(path)["transports"].get(transport)
    if entry is None:
        return None
    try:
        return constants_from_terms(entry["constants"] if isinstance(entry, dict) else entry)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path}: {transport}: {error}") from error


def save_constants(path: Path, transport: str, constants: Constants, details: Mapping[str, Any]) -> None:
    """Add constants to a file, in place of those of the same transport, or begin a new one.

    `details` are kept beside them (date, machine, figures). Readers see the old file or the new one. Raises OSError.
    """
    try:
        value = read_file(path)
    except (OSError, ValueError):
        value = {"format": FORMAT, "version": VERSION, "transports": {}}
    value["transports"][transport] = {**details, "constants": constants_to_terms(constants)}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
    try:
        with open(handle, "w") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _file_constants(environ: Mapping[str, str], transport: str) -> Constants | None:
    named = environ.get("ASYNCDIST_TUNING", "").strip()
    if named.lower() == OFF:
        return None
    if named:
        try:
            constants = stored_constants(Path(named), transport)
        except OSError as error:
            raise ValueError(f"ASYNCDIST_TUNING={named!r} cannot be read: {error.strerror}") from error
        if constants is None:
            known = ", ".join(read_file(Path(named))["transports"])
            raise ValueError(
                f"ASYNCDIST_TUNING={named!r} has no constants for transport {transport!r}, only for {known}: "
                "set ASYNCDIST_TRANSPORT, or add them by asyncdist tune"
            )
        return constants
    path = default_path(environ)
    if path is None:
        return None
    try:
        return stored_constants(path, transport)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        events.warn(
            "built-in constants are used, since those of this host cannot be: %s (measure them with `asyncdist tune`, "
            "or set ASYNCDIST_TUNING=off)",
            error,
        )
        return None


def _ranks_per_host(environ: Mapping[str, str], world_size: int, *, one_host: bool) -> int:
    """What the launcher says, if it launched this very world; else all ranks of one host, or one per host."""
    text = environ.get("LOCAL_WORLD_SIZE", "")
    if text and environ.get("WORLD_SIZE", "") == str(world_size):
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"environment variable LOCAL_WORLD_SIZE is not a number of ranks: {text!r}")
        if int(text) <= world_size:
            return int(text)
    return world_size if one_host else 1
