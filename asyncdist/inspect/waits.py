"""The wait-for graph of a job: which operation of which rank waits for what other ranks have not done.

An operation needs ranks: a collective those that have not called it, a message its other end, a wait for the store
any rank. Each task or thread of a rank waits for operations or for other tasks, or may go on by itself. From those that
may, everything is released that can still happen: an operation once a task goes on of each rank that it needs. What is
not released then is stuck for good.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import stat
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from asyncdist.inspect.job import Document, Job, is_send

Key: TypeAlias = tuple[str, int, int]
"""Group id, tag and sequence number of a collective."""
Way: TypeAlias = tuple[int, int, str, bool]
"""Rank, peer and group id of messages, and whether the rank sends them."""

MAX_SOURCE_BYTES: Final = 1 << 20
"""A program that is longer is not looked at."""
_SETTERS = frozenset({"set", "add", "append", "compare_set", "multi_set", "queue_push", "set_if_absent"})


@dataclass(eq=False, slots=True)
class Operation:
    """One that is under way on `rank`, for `age_s` seconds; it needs all `needs`, or `any` of them."""

    rank: int
    entry: Document
    age_s: float
    needs: frozenset[int] = frozenset()
    any: bool = False
    setter: str = ""
    """Of a wait for the store: the line at which the rank in `needs` would set the key."""
    waiters: list[Task] = field(default_factory=list)
    """The tasks and threads that wait for it."""

    @property
    def kind(self) -> str:
        """`collective`, `message` or `store`."""
        return str(self.entry["kind"])

    @property
    def key(self) -> Key:
        """Of a collective."""
        return self.entry["group_id"], self.entry["tag"], self.entry["sequence"]


@dataclass(eq=False, slots=True)
class Task:
    """A task of asyncio, or a thread, of `rank`.

    It waits for all its `operations` and the tasks that `awaits` names, or for `any` of them; `free`: for none.
    """

    rank: int
    name: str
    place: Mapping[str, Any]
    operations: list[Operation] = field(default_factory=list)
    awaits: list[str] = field(default_factory=list)
    any: bool = False
    free: bool = False
    released: bool = False


class Waits:
    """The graph of one job. `stuck` are the operations that can never end, as far as the documents say."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.groups: dict[str, tuple[int, ...]] = {}
        self.calls: dict[Key, dict[int, Document]] = defaultdict(dict)
        self._called: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
        self._absent: dict[Key, frozenset[int]] = {}
        self.messages: dict[Way, list[Document]] = defaultdict(list)
        self._open: set[tuple[int, int, str, bool, int]] = set()
        """Way and tag of messages under way."""
        self.operations: dict[int, list[Operation]] = defaultdict(list)
        self.tasks: dict[int, list[Task]] = {}
        for rank, document in job.documents.items():
            if rank not in job.missing:
                self._read(rank, document)
        self.stopped = {rank for document in job.documents.values() for rank in document.get("stopped", ())}
        for operation in self.all():
            self._find_needs(operation)
        self.stuck = set(self.all()) - self._released()

    def all(self) -> Iterator[Operation]:
        """All operations under way."""
        return (operation for each in self.operations.values() for operation in each)

    def needed(self) -> set[int]:
        """All ranks that an operation cannot do without."""
        return {rank for operation in self.all() if not operation.any for rank in operation.needs}

    def is_busy(self, rank: int) -> bool:
        """Whether the event loop of a rank, or its one thread, does not turn."""
        places = self.job.documents[rank].get("places", {}).values()
        return bool(places) and not any(place.get("idle") for place in places) and bool(self.busy_places(rank))

    def busy_places(self, rank: int) -> list[Mapping[str, Any]]:
        """Where threads of a rank are that run or sleep, and do not wait for an operation."""
        waiting = {task.name for operation in self.operations.get(rank, ()) for task in operation.waiters}
        places = self.job.documents[rank].get("places", {})
        return [place for name, place in places.items() if not place.get("idle") and name not in waiting]

    def has_called(self, rank: int, key: Key) -> bool:
        """Whether a rank has called a collective, or a later one of its tag."""
        return self._called[key[:2]].get(rank, -1) >= key[2]

    def cycle(self) -> list[Operation]:
        """Operations that are stuck and need each other in a circle, each one the rank of the next; or none."""
        done: set[Operation] = set()
        for start in self.stuck:
            path: list[Operation] = []
            branches = [iter((start,))]
            while branches:
                operation = next(branches[-1], None)
                if operation is None:
                    branches.pop()
                    if path:
                        done.add(path.pop())
                elif operation in path:
                    return path[path.index(operation) :]
                elif operation not in done and (operation.kind != "store" or operation.setter):
                    path.append(operation)
                    branches.append(self._stuck_on(sorted(operation.needs)))
        return []

    def _stuck_on(self, ranks: Iterable[int]) -> Iterator[Operation]:
        return (each for rank in ranks for each in self.operations.get(rank, ()) if each in self.stuck and each.waiters)

    # What the documents say.

    def _read(self, rank: int, document: Document) -> None:
        for group in document["groups"]:
            self.groups[group["id"]] = tuple(group["ranks"])
        ours = {name for name, place in document["awaits"].items() if place.get("ours") and "site" not in place}
        for entry in document["entries"]:
            if entry["kind"] == "collective":
                place = self._called[entry["group_id"], entry["tag"]]
                place[rank] = max(place.get(rank, -1), entry["sequence"])
                self.calls[entry["group_id"], entry["tag"], entry["sequence"]][rank] = entry
            elif entry["kind"] == "message":
                way = rank, entry["peer"], entry["group_id"], is_send(entry)
                self.messages[way].append(entry)
                if "ended" not in entry:
                    self._open.add((*way, entry["tag"]))
            internal = entry["kind"] == "store" and ours.issuperset(entry.get("waiters", ("",)))
            if "ended" not in entry and entry["kind"] != "event" and not internal:
                self.operations[rank].append(Operation(rank, entry, document["time"] - entry["issued"]))
        self.tasks[rank] = list(self._tasks_of(rank, document))

    def _tasks_of(self, rank: int, document: Document) -> Iterator[Task]:
        waited: dict[str, list[Operation]] = defaultdict(list)
        for operation in self.operations.get(rank, ()):
            for name in operation.entry.get("waiters", ("",)):
                waited[name].append(operation)
        places = {name: place for name, place in document["awaits"].items() if name in waited or not place.get("ours")}
        for name, place in places.items():
            awaits = [one for one in place.get("tasks", ()) if one in places]
            free = place.get("waits") != "local" and not awaits and not waited[name]
            yield self._known(Task(rank, name, place, waited[name], awaits, bool(place.get("any")), free))
        for name, place in document["places"].items():
            if name in waited or not (places or place.get("idle")):
                yield self._known(Task(rank, name, place, waited[name], free=name not in waited))
        if not places and not document["places"] and waited:  # nothing is known of tasks
            yield self._known(Task(rank, "", {}, [one for each in waited.values() for one in each]))

    def _known(self, task: Task) -> Task:
        for operation in task.operations:
            operation.waiters.append(task)
        return task

    # What an operation needs.

    def _find_needs(self, operation: Operation) -> None:
        entry, rank = operation.entry, operation.rank
        if operation.kind == "store":
            operation.any, operation.needs = True, frozenset(self.job.documents)
            for other, line in self._setters(entry["keys"], operation):
                operation.any, operation.needs, operation.setter = False, frozenset((other,)), line
                break
        elif operation.kind == "message":
            if entry["peer"] < 0:
                operation.any = True
                operation.needs = frozenset(self.groups.get(entry["group_id"], ())) - {rank}
            elif not self._has_partner(operation) or self._cannot_answer(entry["peer"]):
                operation.needs = frozenset((entry["peer"],))
        else:
            if operation.key not in self._absent:
                self._absent[operation.key] = frozenset(self._find_absent(operation.key))
            operation.needs = self._absent[operation.key] - {rank}

    def _find_absent(self, key: Key) -> Iterator[int]:
        """Members that have not called a collective, or cannot go on with it."""
        unheard = {one for call in self.calls[key].values() for one in call.get("waiting_for", ())}
        for rank in set(self.groups.get(key[0], ())) & self.job.documents.keys():
            if rank in self.job.missing:
                if rank in unheard or not unheard:
                    yield rank
            elif not self.has_called(rank, key) or (rank in unheard and self._cannot_answer(rank)):
                yield rank

    def _cannot_answer(self, rank: int) -> bool:
        return rank in self.job.missing or rank in self.stopped or self.is_busy(rank)

    def _has_partner(self, operation: Operation) -> bool:
        """Whether the other end of a message is under way too."""
        entry = operation.entry
        what = entry["group_id"], not is_send(entry), entry["tag"]
        return any((entry["peer"], peer, *what) in self._open for peer in (operation.rank, -1))

    def _setters(self, keys: list[str], waiting: Operation) -> Iterator[tuple[int, str]]:
        """Ranks whose code would set one of the keys further down in a function that waits now, and the lines."""
        for rank, tasks in self.tasks.items():
            for task in tasks:
                file, _, line = task.place.get("site", "").rpartition(":")
                if line.isdigit() and task not in waiting.waiters:
                    for key in keys:
                        if at := _sets_later(file, int(line), key):
                            yield rank, f"{file}:{at}"

    # What can still happen.

    def _released(self) -> set[Operation]:
        released: set[Operation] = set()
        live: set[int] = set()
        left: dict[Operation, int] = {}
        needed_by: dict[int, list[Operation]] = defaultdict(list)
        ready: deque[Operation | Task] = deque()
        for operation in self.all():
            left[operation] = 1 if operation.any else len(operation.needs)
            for rank in operation.needs:
                needed_by[rank].append(operation)
            if not operation.needs:
                ready.append(operation)
        ready += (task for tasks in self.tasks.values() for task in tasks if task.free)

        def goes_on(rank: int) -> None:
            if rank not in live:
                live.add(rank)
                for operation in needed_by[rank]:
                    left[operation] -= 1
                    if left[operation] <= 0:
                        ready.append(operation)

        for rank in self.job.documents:
            if rank in self.job.missing or not self.tasks[rank]:
                goes_on(rank)
        while ready:
            one = ready.popleft()
            if isinstance(one, Operation):
                released.add(one)
                ready += filter(functools.partial(_goes_on, released, self.tasks[one.rank]), one.waiters)
            elif not one.released:
                one.released = True
                goes_on(one.rank)
                others = (other for other in self.tasks[one.rank] if not other.released)
                ready += filter(functools.partial(_goes_on, released, self.tasks[one.rank]), others)
        return released


def _goes_on(released: set[Operation], tasks: list[Task], task: Task) -> bool:
    """Whether a task of a rank can go on, now that an operation, or one of the rank's `tasks`, can."""
    if task.place.get("waits") == "local":
        return any(other.released for other in tasks)
    go_on = {other.name: other.released for other in tasks} if task.awaits else {}
    ended = [operation in released for operation in task.operations]
    ended += [go_on.get(name, True) for name in task.awaits]
    return any(ended) if task.any else all(ended)


@functools.lru_cache(1024)
def _sets_later(file: str, line: int, key: str) -> int:
    """The line below `line`, in the same function, that sets `key` in a store; 0 if there is none."""
    functions = [one for one in _functions(file) if one.lineno <= line <= (one.end_lineno or 0)]
    for node in ast.walk(max(functions, key=lambda one: one.lineno)) if functions else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SETTERS:
            first = node.args[0] if node.args else None
            if node.lineno > line and isinstance(first, ast.Constant) and first.value in (key, key.encode()):
                return node.lineno
    return 0


@functools.lru_cache(256)
def _functions(file: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    try:
        found = os.stat(file)  # a document may name any file of this host, also a device or a pipe
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_SOURCE_BYTES:
            return []
        tree = ast.parse("".join(linecache.getlines(file)))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
