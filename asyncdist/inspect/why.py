"""Why a job hangs, or is slow, in one sentence that names rank, operation and line of code.

What is certain is looked for first: ranks that differ, that are lost or have left; a message whose tag nobody receives;
operations that need each other in a circle. Else the sentence names whom the oldest operation waits for in the end, and
what that rank does instead.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import Any, Final

from asyncdist.arrays.host import human_bytes
from asyncdist.concurrency.integers import spell_ranks
from asyncdist.inspect.job import STATES, Document, Job, is_send
from asyncdist.inspect.stragglers import Straggler, stragglers
from asyncdist.inspect.waits import Operation, Waits

AFTER_S: Final = 1.0
"""What has waited for less is as likely to end in a moment."""
ROUNDS: Final = 10
"""Collectives that all ranks must have run before one of them is called slow."""
LATE_SHARE: Final = 0.1
"""Of the time, that all others must have waited for a rank to call it slow."""
LATE_OFTEN: Final = 0.8
COMPUTING: Final = 0.02
"""The part of the time that a thread has the processor, at least, if it computes on a host with much to do."""
NAMED: Final = 4
"""Ranks that a sentence tells of one by one."""

SEEN: Final = frozenset({"mismatch", "lost", "left"})
"""Kinds of verdicts that other ranks have seen the reason of."""
HANGS: Final = frozenset({"tag", "deadlock", "key", "late", "unheard"})
"""Kinds of verdicts on what ranks do, or do not."""

_SAME: Final = ("collective", "root", "op", "dtype", "counts")
"""What all ranks must give alike; the last three where a rank has found a difference."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong, and with whom.

    `kind` is `mismatch`, `lost`, `left`, `tag`, `deadlock`, `key`, `late`, `unheard`, `failed`, `slow`, `unknown` or
    `healthy`. `proven`: nothing that is known of the job can end it. `ranks` are those that the others wait for, or
    that differ.
    """

    kind: str
    sentence: str
    ranks: tuple[int, ...] = ()
    proven: bool = False


class Why:
    """See the module. Operations that have waited for less than `after_s` seconds are no hang.

    With `about`, which are fields of an entry, the verdict is on that operation.
    """

    def __init__(self, job: Job, after_s: float = AFTER_S, about: Document | None = None) -> None:
        self.job = job
        self.waits = Waits(job)
        old = (each for each in self.waits.all() if each.age_s >= after_s)
        self._old = sorted(old, key=lambda each: (-each.age_s, each.rank))
        self._first = [each for each in self._old if about is None or about.items() <= each.entry.items()]
        sites = (entry.get("site", "") for each in job.documents.values() for entry in each.get("entries", ()))
        self._files: dict[str, set[str]] = defaultdict(set)
        for file in {site.rpartition(":")[0] for site in sites}:
            self._files[PurePath(file).name].add(file)

    def verdict(self) -> Verdict:
        """The first that is found, in the order of the module's text."""
        certain = (self._mismatch, self._departure, self._wrong_tag, self._deadlock)
        for look in (*certain, self._late, self._failure, self._slow):
            if (found := look()) is not None:
                return found
        known = [rank for rank in self.job.documents if rank not in self.job.missing]
        text = f"nothing is wrong as far as {_ranks(known)} can tell" if known else "no rank says anything"
        if self.job.missing:
            told = (f"rank {rank}: {self.job.why_missing(rank)}" for rank in list(self.job.missing)[:NAMED])
            return Verdict("unknown", f"{text[0].upper()}{text[1:]}, but {'; '.join(told)}.", tuple(self.job.missing))
        return Verdict("healthy", f"{text[0].upper()}{text[1:]}.")

    def hang(self) -> str:
        """The verdict's sentence, if something waits and enough is known of the ranks that it names; else nothing."""
        found = self.verdict()
        known = not any(map(self._may_do_anything, found.ranks))
        return found.sentence if found.kind in SEEN or (known and found.kind in HANGS) else ""

    # What went wrong.

    def _mismatch(self) -> Verdict | None:
        for key, calls in self.waits.calls.items():
            failed = any("CollectiveMismatchError" in call.get("error", "") for call in calls.values())
            if not failed and all("ended" in call and "error" not in call for call in calls.values()):
                continue
            kinds: dict[tuple[str, ...], list[int]] = defaultdict(list)
            for rank, call in calls.items():
                kinds[tuple(str(call.get(name)) for name in (_SAME if failed else _SAME[:2]))].append(rank)
            if len(kinds) > 1:
                several = sorted(kinds.values(), key=lambda ranks: (len(ranks), ranks[0]))
                told = [f"{_ranks(ranks)} called {self._called(calls[ranks[0]])}" for ranks in several[:NAMED]]
                text = f"Ranks differ in call #{key[2]} of {_group(calls[several[0][0]])}: {', and '.join(told)}."
                return Verdict("mismatch", text, tuple(several[0]), proven=True)
        return None

    def _departure(self) -> Verdict | None:
        """A rank is lost, or has left, that others need."""
        events = [
            entry
            for document in self.job.documents.values()
            for entry in document.get("entries", ())
            if entry["kind"] == "event" and entry["operation"] in ("rank lost", "rank left") and "peer" in entry
        ]
        for event in sorted(events, key=lambda one: (one["peer"] not in self.job.missing, one["issued"])):
            peer, calls = event["peer"], self._waiting_at(event)
            ended_later = self.job.documents.get(peer, {}).get("reason") == "SIGTERM"  # with a job that hung already
            if calls and not ended_later:
                what = self._waiters(calls, over=True)
                if event["operation"] == "rank left":
                    return Verdict("left", f"Rank {peer} has left without calling {what}.", (peer,), proven=True)
                reason = re.sub(rf"^rank \d+ lost rank {peer}: ", "", event.get("error", "it does not say why"))
                text = f"Rank {peer} is lost: {reason}. It had not called {what}."
                return Verdict("lost", text, (peer,), proven=True)
        return None

    def _waiting_at(self, event: Document) -> dict[int, Document]:
        """Of each rank the collective that waited when a rank went, by rank; of one place."""
        for calls in reversed(self.waits.calls.values()):
            first = next(iter(calls.values()))
            waiting = {
                rank: call
                for rank, call in calls.items()
                if ("ended" not in call or "error" in call) and call.get("ended", event["issued"]) >= event["issued"]
            }
            if waiting and first["group_id"] == event["group_id"] and event["peer"] not in calls:
                return waiting
        return {}

    def _failure(self) -> Verdict | None:
        """An operation has failed, and nothing is known but what it raised."""
        for rank, document in self.job.documents.items():
            for entry in reversed(document.get("entries", ())):
                if entry["kind"] == "collective" and "error" in entry and "aborted" in document.get("reason", ""):
                    text = f"{_name(entry)} failed on rank {rank}{self._at(entry)}: {entry['error']}"
                    return Verdict("failed", text[0].upper() + text[1:], (rank,))
        return None

    # What hangs.

    def _wrong_tag(self) -> Verdict | None:
        unmatched = cache(self._unmatched)
        for operation in self._old:
            peer, tag = operation.entry.get("peer", -1), operation.entry.get("tag")
            if operation.kind == "message" and operation.needs and peer != -1 and peer not in self.job.missing:
                sends = is_send(operation.entry)
                others = unmatched(operation.rank, peer, operation.entry["group_id"], sends)
                other = next((one for one in others if one["tag"] != tag), None)
                if other is not None:
                    does, did = ("sends to", "receives") if sends else ("receives from", "has sent")
                    text = (
                        f"Rank {operation.rank} {does} rank {peer} with tag {operation.entry['tag']}"
                        f"{self._at(operation.entry)}, but rank {peer} {did} with tag {other['tag']}{self._at(other)}, "
                        f"which rank {operation.rank} does not {'send' if sends else 'receive'}."
                    )
                    return Verdict("tag", text, (operation.rank, peer), proven=operation in self.waits.stuck)
        return None

    def _unmatched(self, rank: int, peer: int, group_id: str, sends: bool) -> list[Document]:
        """Messages of the other rank, to or from this one, that this rank has no partner for: the first of each tag."""
        partners = Counter(one["tag"] for one in self.waits.messages[rank, peer, group_id, sends] if "error" not in one)
        found: dict[int, Document] = {}
        for one in self.waits.messages[peer, rank, group_id, not sends]:
            if "error" not in one:
                partners[one["tag"]] -= 1
                if partners[one["tag"]] < 0:
                    found.setdefault(one["tag"], one)
        return list(found.values())

    def _deadlock(self) -> Verdict | None:
        old = set(self._old)
        cycle = [operation for operation in self.waits.cycle() if operation in old]
        if cycle:
            first = cycle.index(min(cycle, key=lambda one: one.rank))
            ranks, told = self._circle(cycle[first:] + cycle[:first])
            return Verdict("deadlock", f"Deadlock of {_ranks(ranks)}: {told}.", ranks, proven=True)
        return None

    def _circle(self, cycle: Sequence[Operation]) -> tuple[tuple[int, ...], str]:
        """The ranks of operations each of which waits for the rank of the next, and what each waits for."""
        pairs = zip(cycle, (*cycle[1:], cycle[0]), strict=True)
        told = [self._waits_for(one, after.rank) for one, after in itertools.islice(pairs, 2 * NAMED)]
        more = [f"and so on, {len(cycle)} in all"] if len(cycle) > len(told) else []
        return tuple(dict.fromkeys(one.rank for one in cycle)), "; ".join(told + more)

    def _late(self) -> Verdict | None:
        """Whom the oldest operation waits for in the end."""
        awaited = [one for one in self._first if one.waiters] or self._first
        start = next((one for one in awaited if one.needs), next(iter(awaited), None))
        return None if start is None else self._follow(start)

    def _follow(self, operation: Operation) -> Verdict:
        path = [operation]
        while True:
            operation = path[-1]
            if operation.kind == "store" and not operation.setter:
                return self._key(path)
            following = [
                after
                for rank in sorted(operation.needs)
                if rank not in self.job.missing and not self.waits.is_busy(rank) and rank not in self.waits.stopped
                for after in self.waits.operations.get(rank, ())
                if after in self._old and after.waiters
            ]
            roots = [rank for rank in sorted(operation.needs) if all(after.rank != rank for after in following)]
            if roots or not following:
                return self._odd_one_out(operation, tuple(roots))
            if following[0] in path:
                ranks, told = self._circle(path[path.index(following[0]) :])
                text = f"{_ranks(ranks, upper=True)} wait for each other: {told}{self._free(ranks)}."
                return Verdict("deadlock", text, ranks)
            path.append(following[0])

    def _free(self, ranks: Iterable[int]) -> str:
        for rank in ranks:
            for task in self.waits.tasks[rank]:
                if task.free and "site" in task.place:
                    return f"; unless a task of rank {rank} ends that, which {self._place(task.place)}"
        return ""

    def _key(self, path: Sequence[Operation]) -> Verdict:
        operation = path[-1]
        keys = ", ".join(f"'{key}'" for key in operation.entry["keys"][:NAMED])
        text = (
            f"Rank {operation.rank} waits for {'a key' if not keys else 'the key ' + keys} of the store "
            f"({operation.entry['operation']}{self._at(operation.entry)}), which nobody has set"
        )
        waits = (*path[-2:-1], *(one for one in self._old if operation.rank in one.needs and not one.any))
        if waits:
            text += f"; {self._wait_in(self._same(waits[0]), waits[0])} for rank {operation.rank}"
        return Verdict("key", text + ".", (operation.rank,), proven=operation in self.waits.stuck)

    def _odd_one_out(self, operation: Operation, roots: tuple[int, ...]) -> Verdict:
        proven = operation in self.waits.stuck
        waiting = self._wait_in(self._same(operation), operation)
        if not roots:
            ranks = tuple(operation.entry.get("waiting_for", ()))
            whom = f", and rank {operation.rank} has not heard from {_ranks(ranks)}" if ranks else ""
            what = "all ranks have called it" if operation.kind == "collective" else "both ends are there"
            text = f"{waiting[0].upper()}{waiting[1:]}{whom}, though {what}: "
            text += "look at the network between them (asyncdist doctor --network)."
            return Verdict("unheard", text, ranks)
        doing: dict[str, list[int]] = defaultdict(list)
        for rank in roots:
            doing[self.doing(rank)].append(rank)
        told = "; ".join(
            what if len(doing) == 1 else f"{_ranks(ranks)}: {what}" for what, ranks in list(doing.items())[:NAMED]
        )
        if operation.kind == "message":
            verb = "has not received" if is_send(operation.entry) else "has not sent"
            verb += f" what rank {operation.rank} waits for, in {_name(operation.entry)}{self._at(operation.entry)}"
            text = f"{_ranks(roots, upper=True)} {verb}: {told}."
        elif operation.kind == "store":
            at = self._short(operation.setter)
            text = f"{waiting[0].upper()}{waiting[1:]}, which {_ranks(roots)} would set at {at}: {told}."
        else:
            called = all(self.waits.has_called(rank, operation.key) for rank in roots)
            verb = f"{_have(roots)} called, but cannot end," if called else f"{_have(roots)} not called"
            if not called and all(map(self._may_do_anything, roots)):
                verb = "may not have called"
            text = f"{_ranks(roots, upper=True)} {verb} {self._waiters(self._calls(operation))}: {told}."
        return Verdict("late", text, roots, proven)

    def _may_do_anything(self, rank: int) -> bool:
        unheard = self.job.missing.get(rank) in ("silent", "refused", "undumped")
        return unheard and rank not in self.waits.stopped

    def doing(self, rank: int) -> str:
        """What a rank does, as far as that is known: `it sleeps in time.sleep at train.py:7 (load)`."""
        if rank in self.waits.stopped:
            return STATES["stopped"]
        if rank in self.job.missing:
            return self.job.why_missing(rank)
        if self.waits.is_busy(rank):
            said = "it " + self._place(self.waits.busy_places(rank)[-1])
            document = self.job.documents[rank]
            blocked = document.get("loop_cpu", math.inf) < COMPUTING * document.get("loop_late", 0.0)
            return said.replace("it computes", "it sleeps or is blocked", 1) if blocked else said
        old = self.waits.operations.get(rank, ())
        if self.job.documents[rank].get("awaits"):  # else nobody asked who awaits what
            old = [each for each in old if each.waiters]
        if old:
            return "it " + self._wait_in((rank,), old[0]).partition(" ")[2].partition(" ")[2]
        places = [task.place for task in self.waits.tasks[rank] if "site" in task.place]
        return "it " + self._place(places[0]) if places else "its program waits for nothing that is known"

    def _place(self, place: Mapping[str, Any]) -> str:
        call, waits = str(place.get("call") or ""), place.get("waits")
        at = f"at {self._short(str(place.get('site', '')))} ({place.get('function', '')})"
        if waits == "timer" or "sleep" in call:
            return f"sleeps in {call or 'asyncio.sleep'} {at}"
        if waits is not None:
            return f"awaits {call or 'something'} {at}"
        return f"is in {call} {at}" if call else f"computes {at}"

    # Words.

    def _calls(self, operation: Operation) -> dict[int, Document]:
        return {
            rank: call
            for rank, call in self.waits.calls[operation.key].items()
            if "ended" not in call or "error" in call
        }

    def _same(self, operation: Operation) -> tuple[int, ...]:
        """The ranks that wait in the same collective."""
        return tuple(self._calls(operation)) if operation.kind == "collective" else (operation.rank,)

    def _waiters(self, calls: Mapping[int, Document], *, over: bool = False) -> str:
        """`all_reduce #1 of group default, in which ranks 0 and 1 wait at train.py:3`."""
        first = next(iter(calls.values()))
        waits = "waited" if over else "waits" if len(calls) == 1 else "wait"
        return f"{_name(first)}, in which {_ranks(calls)} {waits}{self._at(first)}"

    def _wait_in(self, ranks: Sequence[int], operation: Operation) -> str:
        waits = "waits" if len(ranks) == 1 else "wait"
        return f"{_ranks(ranks)} {waits} in {_name(operation.entry)}{self._at(operation.entry)}"

    def _waits_for(self, operation: Operation, rank: int) -> str:
        waiting = self._wait_in((operation.rank,), operation)
        if operation.kind == "store":
            return f"{waiting}, which rank {rank} would set at {self._short(operation.setter)}"
        if operation.kind == "message":
            return f"{waiting}, which rank {rank} has not {'received' if is_send(operation.entry) else 'sent'}"
        return f"{waiting} for rank {rank}"

    def _called(self, entry: Document) -> str:
        details = [f"root {entry['root']}"] if "root" in entry else []
        details += [str(entry[name]) for name in ("op", "dtype") if name in entry]
        return f"{entry['operation']} ({', '.join(details)}){self._at(entry)}"

    def _at(self, entry: Document) -> str:
        site = entry.get("site") or entry.get("awaited_at")
        return f" at {self._short(site)}" if site else ""

    def _short(self, site: str) -> str:
        """A line by the name of its file, if that is the only one of that name."""
        file, _, line = site.rpartition(":")
        name = PurePath(file).name
        return f"{name}:{line}" if len(self._files.get(name, ())) <= 1 else site

    # What is slow.

    def stragglers(self) -> list[Straggler]:
        """Who comes last to collectives, of those that have run often enough."""
        said = [document for rank, document in self.job.documents.items() if rank not in self.job.missing]
        return [one for one in stragglers(said) if one.operations >= ROUNDS]

    def _slow(self) -> Verdict | None:
        """A rank that comes last nearly always, and that the others wait for."""
        for one in self.stragglers():
            if one.last >= LATE_OFTEN * one.operations and one.waited_s >= LATE_SHARE * one.span_s > 0:
                entries = reversed(self.job.documents[one.rank]["entries"])
                key = one.group_id, one.operation
                entry = next(each for each in entries if (each.get("group_id"), each["operation"]) == key)
                text = (
                    f"Rank {one.rank} came last to {one.last} of {one.operations} {one.operation} of group "
                    f"{one.group}, and the others waited {one.waited_s / one.span_s:.0%} of the time for it: look at "
                    f"what it does before that{self._at(entry)}; just now {self.doing(one.rank)}."
                )
                return Verdict("slow", text, (one.rank,))
        return None

    # Rank by rank.

    def rows(self) -> list[dict[str, Any]]:
        """What each rank does; of one that waits the oldest operation, and whom that waits for."""
        return [self._row(rank, document) for rank, document in self.job.documents.items()]

    def _row(self, rank: int, document: Document) -> dict[str, Any]:
        row: dict[str, Any] = {"rank": rank, "host": document.get("host"), "pid": document.get("pid")}
        waiting = min(self.waits.operations.get(rank, ()), key=lambda one: one.entry["issued"], default=None)
        busy = not document.get("loop_turns", True)
        row["state"] = document.get("state", "busy" if busy else "runs" if waiting is None else "waits")
        if rank in self.waits.stopped:
            row["state"] = "stopped"
        if "loop_late" in document:
            row["late_s"] = document["loop_late"]
        if waiting is not None:
            row |= {"operation": _name(waiting.entry), "since_s": round(waiting.age_s, 3)}
            row |= {"waits_for": [] if waiting.any else sorted(waiting.needs), "stuck": waiting in self.waits.stuck}
        row["does"] = self.doing(rank).removeprefix("it ")
        return row


def _name(entry: Document) -> str:
    """`all_reduce #3 of group default (tag 2)`, `send of 32 MiB to rank 1`, `get of 'key' of the store`."""
    tag = f" (tag {entry['tag']})" if entry.get("tag") else ""
    if entry["kind"] == "collective":
        return f"{entry['operation']} #{entry['sequence']} of {_group(entry)}{tag}"
    if entry["kind"] == "store":
        return f"{entry['operation']} of {', '.join(map(repr, entry['keys'][:NAMED]))} of the store"
    other = "any rank" if entry["peer"] < 0 else f"rank {entry['peer']}"
    if not is_send(entry):
        return f"{entry['operation']} from {other}{tag}"
    return f"{entry['operation']} of {human_bytes(entry.get('bytes', 0))} to {other}{tag}"


def _group(entry: Document) -> str:
    return f"group {entry['group']}"


def _ranks(ranks: Iterable[int], *, upper: bool = False) -> str:
    """`rank 1`, `ranks 0 and 2`, `ranks 0, 1, 2, ..., 99 (100 ranks)`."""
    some = sorted(ranks)
    word = "Rank" if upper else "rank"
    if len(some) == 1:
        return f"{word} {some[0]}"
    return f"{word}s " + (f"{some[0]} and {some[1]}" if len(some) == 2 else spell_ranks(some))


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
