"""Where threads and tasks are, and what they wait for: found when somebody asks, and by any thread.

Of a task the chain of its coroutines is walked to what the innermost awaits: an operation, other tasks, a timer, a lock
of asyncio, or a future that nothing is known of. Of a thread the innermost line of the program is named.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dis
import gc
import itertools
import linecache
import re
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Final, TypeAlias

from asyncdist.inspect.recorder import OURS

LINES_KEPT: Final = 50
"""Of the stack of a thread or of a task."""
TASKS_KEPT: Final = 1000
DEPTH: Final = 4
"""How many futures are looked through that stand for others: gather within shield within wait_for."""

_IDLE: Final = frozenset({"run_forever", "run_until_complete", "run", "_run"})
_LIBRARIES: Final = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_CHAINS: Final = (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await"))
_CALLING: Final = ("CALL", "PRECALL", "RESUME", "SEND", "YIELD_VALUE")
"""Instructions that call, or await what a call returned."""
_LOOPS: Final = frozenset({"asyncio", "concurrent", "uvloop"})
_LOCAL: Final = ("asyncio.locks", "asyncio.queues")

Place: TypeAlias = dict[str, Any]
"""`site`, `function` and `call` of a line of the program; empty where none is on the stack."""
Operations: TypeAlias = Mapping[int, dict[str, Any]]
"""What is told of entries of the recorder that are under way, by the entry's id."""


def threads(operations: Operations) -> tuple[dict[str, list[str]], dict[str, Place]]:
    """The stack of each thread, its innermost line first; and of those that run a program's code, where they are.

    Such a place says `idle` of a thread whose event loop has nothing to do. Operations that a thread waits for get its
    name as a waiter.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks, places = {}, {}
    for ident, innermost in sys._current_frames().items():
        name = f"{names.get(ident, 'unknown')} ({ident})"
        frames = list(itertools.islice(_outward(innermost), 10 * LINES_KEPT))
        stacks[name] = [line(frame) for frame in frames[:LINES_KEPT]]
        while frames and _package(frames[0]) == "asyncdist.inspect":
            del frames[0]
        if place := place_of(frames):
            turns = next((frame for frame in frames if _module(frame) != "selectors"), frames[0])
            if _package(turns).partition(".")[0] in _LOOPS or place["call"].split(".")[-1] in _IDLE:
                place["idle"] = True
            places[name] = place
            for operation in _awaited(frames, operations):
                operation.setdefault("waiters", []).append(name)
                operation.setdefault("awaited_at", place["site"])
    return stacks, places


def tasks(
    loops: Iterable[asyncio.AbstractEventLoop], operations: Operations
) -> tuple[dict[str, list[str]], dict[str, Place]]:
    """The stack of each task, its innermost line first; and where in the program it is, and what it waits for.

    `waits` is `operation`, `tasks`, `timer`, `local` (a lock, an event or a queue of asyncio), `other`, or nothing
    where the task runs; `tasks` names those it waits for, of which one is enough where there is `any`. Operations that
    it waits for get its name as a waiter.
    """
    stacks, places = {}, {}
    for loop in loops:
        with contextlib.suppress(RuntimeError):  # the loop's thread makes tasks meanwhile
            for task in itertools.islice(list(asyncio.all_tasks(loop)), TASKS_KEPT):
                name = task_key(task)
                frames, innermost = _chain(task.get_coro())
                shown = (frame for frame in frames if frame.f_code.co_name != "__await__")
                stacks[name] = [line(frame) for frame in itertools.islice(shown, LINES_KEPT)]
                with contextlib.suppress(Exception):  # of another kind of task, or it goes on meanwhile
                    places[name] = _waiting(task, name, frames, innermost, operations)
    return stacks, places


def awaited_at(task: asyncio.Task[Any], entry: object) -> str:
    """The line at which a task issues the operation of an entry, or awaits it; empty if it does neither just now."""
    told: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # it is no task of asyncio
        if task is asyncio.current_task():
            frames = list(_outward(sys._getframe()))
            ours = (frame.f_locals for frame in frames if frame.f_code.co_name in ("issue", "__await__"))
            if any(getattr(one["self"], "entry", one.get("entry")) is entry for one in ours):
                told["awaited_at"] = place_of(frames)["site"]
        else:
            _waiting(task, "", *_chain(task.get_coro()), {id(entry): told})
    return str(told.get("awaited_at", ""))


def task_key(task: asyncio.Task[Any]) -> str:
    """Name and identity."""
    return f"{task.get_name()} ({id(task):x})"


def line(frame: FrameType) -> str:
    """`/home/me/train.py:17 main`."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"


def place_of(frames: Sequence[FrameType]) -> Place:
    """The innermost line of the program among `frames`, which are innermost first; else the innermost of a library."""
    others = [frame for frame in frames if _package(frame).partition(".")[0] not in OURS]
    user = (frame for frame in others if not frame.f_code.co_filename.startswith((*_LIBRARIES, "<frozen")))
    found = next(user, next(iter(others), None))
    if found is None or found.f_code.co_filename == threading.__file__:
        return {}
    code = found.f_code
    return {"site": f"{code.co_filename}:{found.f_lineno}", "function": code.co_qualname, "call": _call(found)}


def _waiting(
    task: asyncio.Task[Any], name: str, frames: Sequence[FrameType], innermost: Any, operations: Operations
) -> Place:
    place: Place = place_of(frames)
    if frames and _package(frames[-1]).partition(".")[0] == "asyncdist":
        place["ours"] = True
    waiter = getattr(task, "_fut_waiter", None)
    awaited: list[dict[str, Any]] = []
    found: list[asyncio.Future[Any]] = []
    for thing in (*_stands_for(frames), waiter, innermost):
        _look_into(thing, operations, awaited, found)
    awaited += _awaited(frames, operations)
    for operation in awaited:
        if name not in operation.setdefault("waiters", []):
            operation["waiters"].append(name)
        if "site" in place:
            operation.setdefault("awaited_at", place["site"])
    place["tasks"] = list(dict.fromkeys(task_key(one) for one in found if isinstance(one, asyncio.Task)))
    if frames and frames[0].f_code is asyncio.sleep.__code__:
        place["waits"] = "timer"
    elif awaited or place["tasks"]:
        place["waits"] = "operation" if awaited else "tasks"
        place["any"] = any(_waits_for_any(frame) for frame in frames)
    elif any(_module(frame) in _LOCAL for frame in frames[:2]):
        place["waits"] = "local"
    elif waiter is not None:
        place["waits"] = "other"
    return place


def _chain(waiting: Any) -> tuple[list[FrameType], Any]:
    """The frames of a coroutine and of what it awaits, innermost first, and what the innermost awaits."""
    frames: list[FrameType] = []
    while waiting is not None and len(frames) < 10 * LINES_KEPT:
        for frame, awaits in _CHAINS:
            if hasattr(waiting, frame):
                if getattr(waiting, frame) is None:
                    return frames[::-1], None
                frames.append(getattr(waiting, frame))
                waiting = getattr(waiting, awaits)
                break
        else:
            inner = _behind(waiting)
            if inner is None:
                break
            waiting = inner
    return frames[::-1], waiting


def _behind(opaque: Any) -> Any:
    """The coroutine, generator or future behind an iterator that has no name for it, as that of a future."""
    if asyncio.isfuture(opaque):
        return None
    for one in gc.get_referents(opaque):
        if asyncio.isfuture(one) or any(hasattr(one, frame) for frame, _ in _CHAINS):
            return one
    return None


def _stands_for(frames: Sequence[FrameType]) -> Iterator[Any]:
    """What the functions of asyncio wait for that wait for several, or with a time-out."""
    for frame in itertools.takewhile(lambda one: _package(one).partition(".")[0] in OURS, frames):
        if _module(frame) == "asyncio.tasks":
            yield from (frame.f_locals.get(name) for name in ("fs", "fut"))
        elif _module(frame) == "asyncio.taskgroups":
            yield getattr(frame.f_locals.get("self"), "_tasks", None)


def _waits_for_any(frame: FrameType) -> bool:
    if _module(frame) != "asyncio.tasks":
        return False
    return frame.f_locals.get("return_when") in (asyncio.FIRST_COMPLETED,) or "as_completed" in frame.f_code.co_qualname


def _look_into(
    thing: Any, operations: Operations, awaited: list[dict[str, Any]], found: list[asyncio.Future[Any]], depth: int = 0
) -> None:
    """Find operations and futures behind something that is awaited."""
    if thing is None or depth > DEPTH:
        return
    if isinstance(thing, list | tuple | set | frozenset):
        for one in list(thing)[:TASKS_KEPT]:
            _look_into(one, operations, awaited, found, depth + 1)
        return
    awaited += _entries_of(thing, operations)
    if not asyncio.isfuture(thing) or thing.done():
        return
    found.append(thing)
    if isinstance(thing, asyncio.Task):
        return
    _look_into(getattr(thing, "_children", None), operations, awaited, found, depth + 1)
    for callback, *_ in getattr(thing, "_callbacks", None) or ():  # of what asyncio.shield() has made
        if getattr(callback, "__module__", "") == "asyncio.tasks":
            for cell in getattr(callback, "__closure__", None) or ():
                if asyncio.isfuture(cell.cell_contents) and cell.cell_contents is not thing:
                    _look_into(cell.cell_contents, operations, awaited, found, depth + 1)


def _awaited(frames: Sequence[FrameType], operations: Operations) -> list[dict[str, Any]]:
    """The operations that the innermost function of ours waits for."""
    for frame in itertools.takewhile(lambda one: _package(one).partition(".")[0] in {*OURS, "threading"}, frames):
        if _package(frame).partition(".")[0] == "asyncdist":
            held = (one for thing in frame.f_locals.values() for one in _entries_of(thing, operations))
            if found := list({id(one): one for one in held}.values()):
                return found
    return []


def _entries_of(thing: Any, operations: Operations) -> list[dict[str, Any]]:
    """Of a Work, of one that stands for others, or of a reply of the store."""
    if not hasattr(thing, "entry"):
        return []
    parts = (thing, getattr(thing, "_inner", None), *getattr(thing, "_parts", ()))
    return [operations[id(part.entry)] for part in parts if id(getattr(part, "entry", None)) in operations]


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


def _package(frame: FrameType) -> str:
    return frame.f_globals.get("__package__") or ""


def _call(frame: FrameType) -> str:
    """What that line calls at this moment, as `time.sleep`; empty where that is not known. Without the arguments."""
    code, at = frame.f_code, max(frame.f_lasti, 0)
    while at > 0 and dis.opname[code.co_code[at]] == "CACHE":  # behind a call of a Python function
        at -= 2
    if not dis.opname[code.co_code[at]].startswith(_CALLING):
        return ""
    with contextlib.suppress(Exception):  # no source, or another one by now
        position = next(itertools.islice(code.co_positions(), at // 2, None))
        first, last, start, end = position
        if first is not None and last is not None:
            text = linecache.getlines(code.co_filename, frame.f_globals)[first - 1 : last]
            encoded = [one.encode() for one in text]
            encoded[-1] = encoded[-1][:end]
            encoded[0] = encoded[0][start:]
            node = ast.parse(b"".join(encoded).decode().strip(), mode="eval").body
            if isinstance(node, ast.Await):
                node = node.value
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            return name if re.fullmatch(r"[\w.]{1,100}", name) else ""
    return ""
