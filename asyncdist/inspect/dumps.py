"""Dumps: what the recorder knows, as JSON; written when somebody asks, and before a group that has failed is torn down.

A dump says what this rank has done of late, what is under way and whom that waits for, as far as this rank knows. Times
are seconds since 1970. It has no contents of arrays, but call sites, names of tasks and keys of the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import dis
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final
from weakref import ref

from asyncdist.arrays.host import decode_meta
from asyncdist.concurrency.trace import warn
from asyncdist.inspect import stacks
from asyncdist.inspect.counts import bytes_of, numbers
from asyncdist.inspect.recorder import (
    ENDED,
    GROUP,
    ISSUED,
    NBYTES,
    NOTE,
    OPERATION,
    PEER,
    PLACE,
    RECORDER,
    SHAPE,
    SITE,
    TASK,
    Entry,
    GroupFacts,
)
from asyncdist_server.wire.key_text import shown

FORMAT: Final = "asyncdist flight recorder"
VERSION: Final = 1
"""Of the JSON; a reader refuses a later one."""
DIRECTORY: Final = "ASYNCDIST_DUMP_DIR"
DUMPS_KEPT: Final = 4
"""Dumps that a process writes by itself for one rank: the first failure counts, what follows of it says little."""

SLOW_S: Final = 15.0
"""How long an operation waits before a line of the log says for whom, unless ASYNCDIST_SLOW_S says otherwise."""
ROOTED: Final = frozenset({"broadcast", "reduce", "gather", "scatter"})

_written: dict[Path, int] = {}


def document(rank: int, reason: str, *, under_way: bool = False, with_tasks: bool = True) -> dict[str, Any]:
    """What this process knows of global rank `rank`, as JSON has it; with `under_way` only what is, or ended last."""
    wall_s = time.time() - time.monotonic()
    entries = [entry for entry in _copy() if entry[GROUP] is None or entry[GROUP].rank == rank]
    if under_way:
        entries = _newest(entries)
    groups = {id(entry[GROUP]): entry[GROUP] for entry in entries if entry[GROUP] is not None}
    groups |= {id(world): world for world in RECORDER.worlds if world.rank == rank}
    operations = {id(entry): _described(entry, wall_s) for entry in entries}
    waiting = {each: told for each, told in operations.items() if "ended" not in told}
    threads, places = stacks.threads(waiting)
    tasks, awaits = stacks.tasks(_loops(groups.values()) if with_tasks else (), waiting)
    return {
        "format": FORMAT,
        "version": VERSION,
        "rank": rank,
        "world_size": max((len(world.ranks) for world in RECORDER.worlds if world.rank == rank), default=0),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "program": sys.argv[:1],
        "time": time.time(),
        "reason": reason,
        "groups": [
            {"id": f"{group.group_id:016x}", "name": group.name, "ranks": list(group.ranks)}
            for group in groups.values()
        ],
        "clock": _clock(list(groups.values())),
        "counts": numbers(rank),
        "entries": [operations[id(entry)] for entry in entries],
        "stopped": _stopped(groups.values(), waiting.values()),
        "threads": threads,
        "tasks": tasks,
        "places": places,
        "awaits": awaits,
    }


def _clock(groups: Sequence[GroupFacts]) -> dict[str, Any]:
    """Whose clock this rank's is, and how far those of other hosts are ahead of it."""
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        host = socket.gethostname()
    known = groups[-1].compared.items() if groups else ()  # ranks of an earlier world may have been elsewhere
    compared = [{"rank": rank, "ahead_s": ahead_s, "bound_s": bound_s} for rank, (bound_s, ahead_s) in known]
    return {"host": host, "compared": compared}


def _stopped(groups: Iterable[GroupFacts], operations: Iterable[Mapping[str, Any]]) -> list[int]:
    """Ranks of this host that operations wait for and whose processes are stopped."""
    waited_for = {rank for told in operations for rank in (*told.get("waiting_for", ()), told.get("peer", -1))}
    backends = list(filter(None, (group.group() for group in groups)))
    return sorted(rank for rank in waited_for if rank >= 0 and any(each.stopped(rank) for each in backends))


def _loops(groups: Iterable[GroupFacts]) -> set[asyncio.AbstractEventLoop]:
    """Those of the groups, and that of a program whose groups are in the communication thread."""
    own = asyncio._get_running_loop()
    backends = filter(None, (group.group() for group in groups))
    return {backend.loop for backend in backends} | ({own} if own is not None else set())


def _copy() -> list[Entry]:
    while True:
        with contextlib.suppress(RuntimeError):  # another thread has recorded something meanwhile
            return list(RECORDER.entries)


def _newest(entries: list[Entry]) -> list[Entry]:
    """Those under way, and of each group and tag the collective or message that was issued last of those that ended."""
    last = {(id(entry[GROUP]), _tag(entry)): entry for entry in entries if entry[ENDED] is not None}
    kept = {id(entry) for entry in last.values()}
    return [entry for entry in entries if entry[ENDED] is None or id(entry) in kept]


def _tag(entry: Entry) -> Any:
    return entry[PLACE][0] if isinstance(entry[PLACE], tuple) else entry[PLACE]


def _described(entry: Entry, wall_s: float) -> dict[str, Any]:
    facts: GroupFacts | None = entry[GROUP]
    found: dict[str, Any]
    if facts is None:
        keys = entry[SHAPE] if isinstance(entry[SHAPE], tuple) else (entry[SHAPE],)
        found = {"kind": "store", "keys": [shown(key) for key in keys if isinstance(key, bytes)]}
    elif isinstance(entry[PLACE], tuple):
        found = {"kind": "collective", **_collective(entry)}
    elif entry[PLACE] is not None:
        found = {"kind": "message", **_message(entry)}
    else:
        found = {"kind": "event"} | ({} if entry[PEER] is None else {"peer": entry[PEER]})
    found["operation"] = entry[OPERATION]
    if facts is not None:
        found |= {"group": facts.name, "group_id": f"{facts.group_id:016x}"}
    if site := site_of(entry):
        found |= {"site": site, "function": entry[SITE][0].co_qualname}
    task = entry[TASK] if isinstance(entry[TASK], str | None) else entry[TASK]()
    if task is not None:
        found["task"] = task if isinstance(task, str) else task.get_name()
    if isinstance(entry[NOTE], str):
        found["error"] = entry[NOTE]
    found["issued"] = round(entry[ISSUED] + wall_s, 6)
    if entry[ENDED] is not None:
        found["ended"] = round(entry[ENDED] + wall_s, 6)
    return found


def _collective(entry: Entry) -> dict[str, Any]:
    facts: GroupFacts = entry[GROUP]
    tag, sequence = entry[PLACE]
    collective, counts, dtype, root, op, detail = entry[SHAPE]
    found = {"tag": tag, "sequence": sequence, "collective": collective, "dtype": dtype.name, "counts": counts}
    found["bytes"] = bytes_of(entry)
    if collective in ROOTED:
        found["root"] = facts.ranks[root]
    if op is not None:
        found["op"] = str(op)
    if detail:
        found["detail"] = detail
    group = facts.group()
    if group is not None:
        found["algorithm"] = group.algorithm_of(entry[SHAPE])
        if entry[ENDED] is None:
            found["waiting_for"] = list(group.waiting_for(tag, sequence))
    if isinstance(entry[NOTE], int):
        found["last"] = facts.ranks[entry[NOTE]]
    return found


def _message(entry: Entry) -> dict[str, Any]:
    facts: GroupFacts = entry[GROUP]
    found: dict[str, Any] = {"tag": entry[PLACE], "peer": entry[PEER], "bytes": entry[NBYTES]}
    with contextlib.suppress(ValueError):  # objects, or an array of the sender's choice
        dtype, shape = decode_meta(entry[SHAPE])
        found |= {"dtype": dtype.name, "shape": list(shape)}
    group = facts.group()
    if group is not None and entry[PEER] >= 0:
        found["transport"] = group.transport_to(entry[PEER])
    return found


def site_of(entry: Entry) -> str:
    """`/home/me/train.py:17`, the line that issued it; empty where none is known."""
    if entry[SITE] is None or entry[SITE][0].co_filename == threading.__file__:
        return ""
    code, last = entry[SITE]
    line = code.co_firstlineno
    for start, at in dis.findlinestarts(code):
        if start > last:
            break
        line = at if at is not None else line
    return f"{code.co_filename}:{line}"


def line_of(entry: Entry) -> str:
    """The line that issued it; where that is not known, the one at which the task that issued it awaits it."""
    task = entry[TASK]() if isinstance(entry[TASK], ref) else None
    return site_of(entry) or (stacks.awaited_at(task, entry) if task is not None else "")


def write(path: Path, found: Mapping[str, Any]) -> None:
    """Write a document whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(found, separators=(",", ":")) + "\n")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def folder_of(environ: Mapping[str, str]) -> Path | None:
    """Where ranks write dumps by themselves; None where they do not."""
    folder = environ.get(DIRECTORY, "").strip()
    job = re.sub(r"[^\w.-]", "_", environ.get("ASYNCDIST_JOB_ID", "")).strip(".")
    return Path(folder, job) if folder else None


def dump_failure(rank: int, reason: str, environ: Mapping[str, str] = os.environ) -> None:
    """Write a dump where ASYNCDIST_DUMP_DIR says so. Never raises: what has failed is worse.

    Those of a launched job are in a folder for each attempt.
    """
    folder = folder_of(environ)
    if folder is None:
        return
    first = folder / f"rank_{rank}.json"
    number = _written[first] = _written.get(first, -1) + 1
    if number < DUMPS_KEPT:
        path = first if not number else first.with_suffix(f".{number}.json")
        try:
            write(path, document(rank, reason))
        except Exception as error:
            warn("rank %d: cannot write what it did into %s: %s", rank, path, error)


def dump_aborted(group: GroupFacts, rank: int | None, text: str) -> None:
    """Record that a group is aborted, because of `rank`, and write a dump before it is torn down."""
    RECORDER.event(group, "group aborted", rank, text)
    dump_failure(group.rank, f"group {group.name} was aborted: {text}")


def dump_on_sigterm(environ: Mapping[str, str] = os.environ) -> None:
    """Where ASYNCDIST_DUMP_DIR is set, let SIGTERM write dumps before it does what it did. Only in the main thread."""
    before = signal.getsignal(signal.SIGTERM)
    here = threading.current_thread() is threading.main_thread()
    if not here or not environ.get(DIRECTORY) or isinstance(before, _OnSigterm) or before == signal.SIG_IGN:
        return
    signal.signal(signal.SIGTERM, _OnSigterm(before))


class _OnSigterm:
    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        own = os.environ.get("RANK", "")
        ranks = {world.rank for world in RECORDER.worlds} or {int(own) if own.isdecimal() else 0}
        for member in sorted(ranks):
            dump_failure(member, "SIGTERM")
        if callable(self._before):
            self._before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def slow_s_from_environ(environ: Mapping[str, str], loop: object) -> float:
    """After how many seconds an operation counts as slow; never, for 0. Raises ValueError for what is no number.

    In virtual time never, unless it is said: a timer would be something that can still happen in a deadlock.
    """
    text = environ.get("ASYNCDIST_SLOW_S", "").strip()
    try:
        slow_s = float(text) if text else 0.0 if getattr(loop, "virtual_time", False) else SLOW_S
    except ValueError:
        raise ValueError(f"ASYNCDIST_SLOW_S={text!r} is not a number of seconds") from None
    return slow_s if slow_s > 0 else math.inf
