"""Ranks that run different collectives in one place of the order: how that is found, and what their errors show.

Every message of a collective, and its record in shared memory, carries a fingerprint of what its sender runs. The rank
that notices a difference tells the other rank what it runs, and at which line, and asks the same, so that the errors on
both sides show both; it waits at most ANSWER_S. A rank that is asked about an operation that has timed out also says
what it runs instead. A rank that leaves says what it ran last. `StrayMessages` finds what shows only after both
operations ended.

So far differences are found between ranks that send each other something or wait for each other. With
ASYNCDIST_CHECK=full (rank 0's setting counts) every rank also reports each collective, and the line that calls it, to
the group's first rank. The first rank compares without waiting. It finds what no message shows: an operation on an
empty array here and on another one there.
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections import deque
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from asyncdist.arrays.reduce_op import PremulSum, ReduceOp
from asyncdist.collectives.backend import CollectiveWork, GroupBackend, WorkKey
from asyncdist.collectives.executor.runner import DifferentOperation, different
from asyncdist.collectives.shared.agreement import RESERVED
from asyncdist.concurrency.trace import calling_frame
from asyncdist.errors import CollectiveMismatchError, DistError, PeerLostError
from asyncdist.inspect.dumps import line_of, site_of
from asyncdist.inspect.recorder import SITE, Entry
from asyncdist.plan.problem import PRIVATE_COLLECTIVES, ROOTED
from asyncdist.transport.base_mesh import BaseMesh
from asyncdist.transport.config import LATE_S
from asyncdist.transport.protocol.frame import key_prefix
from asyncdist.transport.protocol.matching import UnexpectedWatcher
from asyncdist.world.control import Check, Mismatch, Ran
from asyncdist.world.world import CLOSED_SINCE, World

CHECK_LEVELS: Final = ("on", "full")
"""Values of ASYNCDIST_CHECK. There is no `off`: comparing fingerprints costs nothing that could be saved."""

ANSWER_S: Final = 0.5
"""How long an error waits for the other side's description, as long as a probe: a rank that cannot answer is stuck."""

ISSUED_KEPT: Final = 256
"""Collectives remembered per group, ended ones included: how far the other side may have gone on meanwhile."""

REPORTS_KEPT: Final = 1024
"""With ASYNCDIST_CHECK=full: collectives that other ranks have reported and the first rank has not issued yet, which is
how far ahead ranks can be. Later ones are not compared."""

LAST_WORDS: Final = 16
"""Collectives that a leaving rank describes, as the others may not have come to them yet: a message of about a kilobyte
to each connected rank."""

WORD_CHARS: Final = 256
"""Characters of such a description: sixteen descriptions fit a control frame, whatever the characters."""

UNNAMED: Final = "something else that it does not name"
"""What a rank is said to run if it does not answer, or does not remember so far back."""

COUNTS_SHOWN: Final = 8
"""Block lengths shown of uneven collectives."""

EARLY_KEPT: Final = 1024
"""Operations whose messages came early that are remembered: more than peers have credit to be ahead. So those that were
rejected meanwhile are forgotten in the end."""

DROPPED_KEPT: Final = 1024
"""Rejected operations remembered, as their messages may still come: as many as peers have credit to be ahead."""

_PLACE: Final = struct.Struct("<II")
_PLACE_AT: Final = 8
_HALF: Final = 1 << 31  # numbers travel as 32 bits, and no two so far apart are under way


class _Issued(NamedTuple):
    key: WorkKey
    operation: str
    recipe: tuple[Any, ...]
    place: str


def _issued(entry: Sequence[Any], line: Callable[[Entry], str] = site_of) -> _Issued:
    if isinstance(entry, _Issued):
        return entry
    site = line(entry) if isinstance(entry, list) and len(entry) > SITE else ""
    return _Issued(entry[0], entry[1], entry[2], f" at {Path(site).name}" if site else "")


class _Inquiry(NamedTuple):
    work: CollectiveWork | None
    error: CollectiveMismatchError
    timer: asyncio.TimerHandle


def parse_check(text: str) -> str:
    """Return the level that ASYNCDIST_CHECK names; empty is `on`. Raises ValueError for anything else."""
    level = text.strip().lower() or "on"
    if level not in CHECK_LEVELS:
        raise ValueError(f"ASYNCDIST_CHECK={text!r}: use {' or '.join(CHECK_LEVELS)}")
    return level


class MismatchFinder:
    """Knows what the members of one group run, and asks them where that differs.

    `works` are the operations under way. `fail(key, error)` ends an operation that is under way here, and the group.
    """

    def __init__(
        self,
        world: World,
        group_id: int,
        ranks: tuple[int, ...],
        backend: GroupBackend,
        works: Mapping[WorkKey, CollectiveWork],
        fail: Callable[[WorkKey, CollectiveMismatchError], None],
    ) -> None:
        self._world = world
        self._group_id = group_id
        self._ranks = ranks
        self._backend = backend
        self._works = works
        self._fail = fail
        self._issued: deque[Sequence[Any]] = deque(maxlen=ISSUED_KEPT)
        self.issued: Callable[[Sequence[Any]], None]
        """Notes a collective that is about to start here: its key, operation and recipe key, and what else follows."""
        self.check_fully(world.options.get("check") == "full" and len(ranks) > 1)
        self._inquiries: dict[WorkKey, _Inquiry] = {}
        self._reports: dict[WorkKey, dict[str, tuple[int, str]]] = {}
        self._last_words: dict[int, dict[WorkKey, tuple[str, str]]] = {}
        """What members that have left ran last."""
        self.differing: dict[WorkKey, int] = {}
        """Places of the order where another rank, and which, was found to run something else: nothing ends well now."""
        self.stopped = asyncio.Event()

    def check_fully(self, full: bool) -> None:
        """Whether to report all collectives from now on."""
        self._full = full
        # Where that is enough, the recorder's entry and no Python call: all collectives come along here.
        self.issued = self._issue_and_report if full else self._issued.append

    def _issue_and_report(self, issued: Sequence[Any]) -> None:
        entry = _Issued(issued[0], issued[1], issued[2], _calling_line())
        self._issued.append(entry)
        self._report(entry)

    def differs(self, key: WorkKey, rank: int) -> None:
        """Global rank `rank` runs something else in that place of the order, where all may have ended here."""
        if not self.stopped.is_set():
            if not self.differing:
                self._world.loop.call_soon(self._inquire_first)
            self.differing.setdefault(key, rank)

    def _inquire_first(self) -> None:
        """Ask about the first difference that was found: the others may be its consequences."""
        key, rank = next(iter(self.differing.items()))
        if not self.stopped.is_set():
            error = self.inquire(key, None, different(rank))
            if error is not None:
                self._fail(key, error)

    def inquire(
        self, key: WorkKey, work: CollectiveWork | None, error: CollectiveMismatchError
    ) -> CollectiveMismatchError | None:
        """Ask the other side of `error` what it runs. Its answer fails `work`, or the group where there is none.

        Until then the operation is under way, though nothing moves. Returns the error to fail with where no rank can be
        asked.
        """
        if error.peer is None:
            return error
        if key in self._inquiries:
            return None
        message = Mismatch(self._group_id, *key, self._describe(key) or "", True)
        if not self._world.tell((error.peer,), message, dial=True):
            return self._answered(key, error, "")
        self._inquiries[key] = _Inquiry(work, error, self._await_answer(key))
        return None

    def _await_answer(self, key: WorkKey) -> asyncio.TimerHandle:
        loop = self._world.loop
        return loop.call_later(ANSWER_S, self._no_answer, key, loop.time() + ANSWER_S)

    def _no_answer(self, key: WorkKey, due_s: float) -> None:
        if self._world.loop.time() - due_s > LATE_S:  # this rank was busy: the answer may be here, unread
            self._inquiries[key] = self._inquiries[key]._replace(timer=self._await_answer(key))
        else:
            self._conclude(key, "")

    def heard(self, sender: int, tag: int, sequence: int, text: str, asked: bool) -> None:
        """Another member says what it runs: it has found a difference (`asked`), or it answers this rank's question."""
        key = (tag, sequence)
        own = self._describe(key)
        if asked:
            self._world.tell((sender,), Mismatch(self._group_id, tag, sequence, own or "", False), dial=False)
        inquiry = self._inquiries.get(key)
        if inquiry is not None:
            if sender == inquiry.error.peer:
                self._conclude(key, text)
        elif asked and key in self._works:
            alike = _bare(own or "") == _bare(text) and self._is_private(key)
            self._fail(key, self._lengths_differ(sender) if alike else self._difference(key, own, sender, text))

    def last_words(self) -> dict[WorkKey, tuple[str, str]]:
        """Return what this rank ran last, by place: what must be equal everywhere, and how to show it."""
        newest = list(map(_issued, list(self._issued)[-LAST_WORDS:]))
        return {entry.key: (self._terms(entry)[:WORD_CHARS], self._described(entry)[:WORD_CHARS]) for entry in newest}

    def say_last_words(self) -> None:
        """Tell the connected members what this rank ran last, as it leaves and cannot be asked later."""
        words = [[*key, *word] for key, word in self.last_words().items()]
        if words:
            self._world.tell(self._ranks, Ran(self._group_id, words), dial=False)

    def heard_last(self, sender: int, words: list[tuple[int, int, str, str]]) -> None:
        """Another member leaves, and says what it ran last."""
        said = self._last_words[sender] = {(tag, number): (terms, text) for tag, number, terms, text in words}
        for key, inquiry in list(self._inquiries.items()):
            if inquiry.error.peer == sender and key in said:
                self._conclude(key, said[key][1])

    def why_left(self, key: WorkKey, error: PeerLostError) -> DistError:
        """Return why an operation lacks a member that left: `error`, unless that member ran something else there."""
        entry = self._find(key)
        terms, text = self._last_words.get(error.rank, {}).get(key, ("", ""))
        if entry is None or not text or terms == self._terms(entry)[:WORD_CHARS]:
            return error
        return self._difference(key, self._describe(key), error.rank, text)

    def tell(self, rank: int, tag: int, sequence: int) -> None:
        """Tell `rank`, where an operation is late, what this rank runs in its place, if anything: that may be why."""
        entry = self._find((tag, sequence))
        if entry is not None:
            self._send_check(rank, entry)

    def reported(self, sender: int, tag: int, sequence: int, terms: str, shown: str) -> None:
        """A member reports what it has issued and how to show it."""
        key = (tag, sequence)
        entry = self._find(key)
        if entry is not None:
            error = self._compare(entry, {terms: (sender, shown)})
            if error is not None:
                self._fail(key, error)
        elif self._full and (key in self._reports or len(self._reports) < REPORTS_KEPT):
            reports = self._reports.setdefault(key, {})
            if len(reports) < len(self._ranks):  # honest ranks report once
                reports.setdefault(terms, (sender, shown))

    def stop(self, *, told: bool = False) -> dict[WorkKey, CollectiveMismatchError]:
        """Stop asking, as the group is aborted or closed. Returns the differences without an answer, by place.

        `told`: another rank has said what differs. It knows less of differences in lengths, so only those are returned.
        """
        found = {
            key: self._answered(key, inquiry.error, "")
            for key, inquiry in self._inquiries.items()
            if not told or self._by_length(key, inquiry.error)
        }
        for inquiry in self._inquiries.values():
            inquiry.timer.cancel()
        self._inquiries.clear()
        self._reports.clear()
        self.stopped.set()
        return found

    def _conclude(self, key: WorkKey, text: str) -> None:
        inquiry = self._inquiries.pop(key)
        inquiry.timer.cancel()
        if inquiry.work is None or self._works.get(key) is inquiry.work:
            self._fail(key, self._answered(key, inquiry.error, text))

    def _answered(self, key: WorkKey, error: CollectiveMismatchError, text: str) -> CollectiveMismatchError:
        """Return the error to raise where the other side of `error` runs `text`; empty if it does not say."""
        assert error.peer is not None, "only errors that name the other side are asked about"
        own = self._describe(key)
        text = text or self._last_words.get(error.peer, {}).get(key, ("", ""))[1]
        # Unless the other side says otherwise it is the lengths that differ, which the transport has named.
        alike = _bare(text) in ("", CLOSED_SINCE, _bare(own or "")) and self._by_length(key, error)
        return error if alike else self._difference(key, own, error.peer, text)

    def _difference(self, key: WorkKey, own: str | None, peer: int, text: str) -> CollectiveMismatchError:
        unnamed = "something else, and is gone since" if self._world.mesh.is_gone(peer) else UNNAMED
        sides = sorted([(self._world.rank, own or UNNAMED), (peer, text or unnamed)])
        shown = ", ".join(f"rank {rank} runs {side}" for rank, side in sides)
        if own and _bare(own) == _bare(text):
            shown += ", but planned differently: is the release of asyncdist the same everywhere?"
        tag, number = key
        place = f"collective #{number} of tag {tag}" if tag else f"collective #{number}"
        return CollectiveMismatchError(f"ranks differ in {place}: {shown}", peer)

    def _lengths_differ(self, peer: int) -> CollectiveMismatchError:
        text = f"rank {peer} expects another length of what rank {self._world.rank} sends to it"
        return CollectiveMismatchError(text, peer)

    def _describe(self, key: WorkKey) -> str | None:
        entry = self._find(key)
        return None if entry is None else self._described(entry)

    def _described(self, entry: _Issued) -> str:
        algorithm = self._backend.algorithm_of(entry.recipe)
        return self._show(entry, f" ({algorithm})" if algorithm else "")

    def _show(self, entry: _Issued, algorithm: str = "") -> str:
        terms = describe_call(entry.recipe, self._ranks)
        return f"{entry.operation}{terms and ' '}{terms}{algorithm}{entry.place}"

    def _terms(self, entry: _Issued) -> str:
        """What must be equal on all ranks; all_gather and all_gather_into_tensor are the same there."""
        return f"{entry.recipe[0]} {describe_call(entry.recipe, self._ranks)}"

    def _is_private(self, key: WorkKey) -> bool:
        entry = self._find(key)
        return entry is not None and entry.recipe[0] in PRIVATE_COLLECTIVES

    def _by_length(self, key: WorkKey, error: CollectiveMismatchError) -> bool:
        """Whether `error` says which lengths differ, which only the two ends know."""
        return self._is_private(key) and not isinstance(error, DifferentOperation)

    def _find(self, key: WorkKey) -> _Issued | None:
        return next((_issued(entry, line_of) for entry in reversed(self._issued) if entry[0] == key), None)

    # ASYNCDIST_CHECK=full.

    def _report(self, entry: _Issued) -> None:
        if self._world.rank == self._ranks[0]:
            error = self._compare(entry, self._reports.pop(entry.key, {}))
            if error is not None:  # later, as the operation is not under way yet: this is within its call
                self._world.loop.call_soon(self._fail, entry.key, error)
        else:
            self._send_check(self._ranks[0], entry)

    def _send_check(self, rank: int, entry: _Issued) -> None:
        message = Check(self._group_id, *entry.key, self._terms(entry), self._show(entry))
        self._world.tell((rank,), message, dial=True)

    def _compare(self, entry: _Issued, reports: Mapping[str, tuple[int, str]]) -> CollectiveMismatchError | None:
        own = self._terms(entry)
        for terms, (rank, shown) in reports.items():
            if terms != own:
                return self._difference(entry.key, self._show(entry), rank, shown)
        return None


def describe_call(recipe: tuple[Any, ...], ranks: tuple[int, ...]) -> str:
    """`float32[1024] SUM root 3`, from `Call.recipe_key` and the group's global ranks."""
    collective, counts, dtype, root, op, detail = recipe
    parts = []
    if collective in PRIVATE_COLLECTIVES:
        parts.append(dtype.name)
    elif collective != "barrier" and not dtype.name.startswith("void"):
        parts.append(f"{dtype.name}[{_spell(counts)}]")
    if isinstance(op, ReduceOp):
        parts.append(op.name)
    elif op is not None:
        parts.append("PREMUL_SUM" if isinstance(op, PremulSum) else repr(op))
    if collective in ROOTED:
        parts.append(f"root {ranks[root]}")
    if detail and collective != "barrier":  # whose detail is its operation's name
        parts.append(f"of {detail}")
    return " ".join(parts)


def _bare(description: str) -> str:
    """The description of a collective without the line that calls it."""
    return re.sub(r" at .*:\d+$", "", description)


def _spell(counts: int | tuple[int, ...]) -> str:
    if isinstance(counts, int):
        return str(counts)
    if len(set(counts)) == 1:
        return str(counts[0])
    return ", ".join(map(str, counts[:COUNTS_SHOWN])) + (", ..." if len(counts) > COUNTS_SHOWN else "")


def _calling_line() -> str:
    """` at train.py:12`, the line that calls the library; empty where there is none, as in the communication thread."""
    frame = calling_frame()
    return f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""


class StrayMessages:
    """Messages of one group that came before their receives: those left over show that their sender ran something else.

    Two ranks that each take themselves for the root send and wait for nothing. All that one sees of the other are
    messages of an operation that has ended here without them.

    `works` are the operations under way, `sequences` how many of each tag were issued. Each difference is told to
    `differs(tag, sequence, rank)`; from then on nothing of the group may end well.
    """

    def __init__(
        self,
        mesh: BaseMesh,
        group_id: int,
        works: Collection[WorkKey],
        sequences: Mapping[int, int],
        differs: Callable[[int, int, int], None],
    ) -> None:
        self._mesh = mesh
        self._watched: list[bytes] = []
        self._works = works
        self._sequences = sequences
        self._differs = differs
        self._dropped: dict[WorkKey, None] = {}
        self.early: dict[WorkKey, list[tuple[int, bytes, Container[bytes]]]] = {}
        """Messages that came before their receives, by operation."""
        self._watch(group_id, self._came_early)

    def watch_parts(self, group_id: int, tag: int) -> None:
        """Watch messages with that id too: they are parts of operations of `tag`, and their tag is the number."""
        self._watch(group_id, partial(self._part_came_early, tag))

    def left_over(self, key: WorkKey) -> bool:
        """Whether messages of an operation are left that has ended here; their sender runs something else."""
        for rank, message, parked in self.early.pop(key, ()):
            if message in parked:
                self._differs(*key, rank)
                return True
        return False

    def forget(self, key: WorkKey) -> None:
        """Ignore messages of an operation that was rejected or given up."""
        self.early.pop(key, None)
        if len(self._dropped) >= DROPPED_KEPT:
            del self._dropped[next(iter(self._dropped))]
        self._dropped[key] = None

    def stop(self) -> None:
        """Stop watching."""
        for group in self._watched:
            self._mesh.watchers.pop(group, None)
        self.early.clear()

    def _watch(self, group_id: int, watcher: UnexpectedWatcher) -> None:
        group = key_prefix(group_id, 0, 0)[:_PLACE_AT]
        self._watched.append(group)
        self._mesh.watch(group, watcher)

    def _came_early(self, rank: int, message: bytes, parked: Container[bytes]) -> None:
        tag, low = _PLACE.unpack_from(message, _PLACE_AT)
        self._note(rank, tag, low, message, parked)

    def _part_came_early(self, tag: int, rank: int, message: bytes, parked: Container[bytes]) -> None:
        low, _ = _PLACE.unpack_from(message, _PLACE_AT)
        self._note(rank, tag, low, message, parked)

    def _note(self, rank: int, tag: int, low: int, message: bytes, parked: Container[bytes]) -> None:
        if low in RESERVED:
            return
        issued = self._sequences.get(tag, 0)
        number = low if issued < _HALF else issued + (low - issued + _HALF) % (2 * _HALF) - _HALF
        key: WorkKey = (tag, number)
        if number < issued and key not in self._works:
            if key not in self._dropped:
                self._differs(tag, number, rank)
            return
        messages = self.early.get(key)
        if messages is None:
            if len(self.early) >= EARLY_KEPT:
                del self.early[next(iter(self.early))]
            messages = self.early[key] = []
        messages.append((rank, message, parked))
