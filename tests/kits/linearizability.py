"""Whether a history of concurrent operations could have come from one object that does one thing at a time.

A `History` is what concurrent clients asked of a shared object, when, and what they were told.

    report = check_history(history.operations, RegisterModel())
    assert report.linearizable, report.explanation

A history is linearizable if every operation can be given one instant between its call and its return such that what
all clients were told is what the object, asked in that order, would have told them. An operation that ended `UNKNOWN`
may have such an instant at any time after its call (before its return, if it has one), or none.

The search is Wing and Gong's ("Testing and verifying concurrent objects", 1993) with the memory of Lowe ("Testing for
linearizability", 2017): take any operation that was called before all those not yet taken had returned, see whether
the model allows its result, go on, and go back where nothing fits; never look twice at the same operations taken with
the same state left behind. What only reads is taken as soon as it fits, with no way back. Keys are judged one by one,
as linearizability is a property of each object by itself. The search is exponential at worst, in the number of
operations at a time and of unknown ones. It is therefore bounded: a history that is not decided within the bound is not
linearizable as far as a test is concerned.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = [
    "IMPOSSIBLE",
    "MAX_STEPS",
    "REFUSED",
    "UNKNOWN",
    "History",
    "KeyVerdict",
    "Model",
    "Operation",
    "Report",
    "check_history",
]

MAX_STEPS: Final = 1_000_000
"""Most states visited for one key: some ten seconds. A history of a correct object needs about one per operation."""

QUICK_STEPS: Final = 20_000
"""Most states visited before the search is tried in other ways, and only to show people how far one can get."""

FEW_UNKNOWN: Final = (0, 1, 2, 4, 8)
"""Other ways: with no more unknown operations than these, as most of them are of no use, and a search that is stuck
tries all of them where it is before it goes back to where it went wrong."""

SHOWN_OPERATIONS: Final = 12
"""Most operations of the longest order that an explanation shows: what matters is how it ends."""

SHOWN_CHARACTERS: Final = 60
"""Longest argument or result shown to people: values grow with every append."""


class Outcome(enum.Enum):
    """What an operation can end with instead of a result."""

    UNKNOWN = "unknown"
    REFUSED = "refused"


UNKNOWN: Final = Outcome.UNKNOWN
"""No client was told what became of the operation: it may take effect at any time from the call on, or never."""

REFUSED: Final = Outcome.REFUSED
"""The object said no, and changed nothing."""


@dataclass(slots=True)
class Operation:
    """One call of a client and its result.

    Args:
        client: the client that asked; shown to people. A model of locks takes it for the holder.
        key: which object was asked. Histories are judged key by key.
        name, arguments: what was asked, as the model of the object understands it.
        result: what the client was told, `REFUSED`, or `UNKNOWN`.
        called_at, returned_at: when, on one clock that never goes back; any unit. No return: infinity. The return of an
            UNKNOWN operation is the time after which it cannot take effect any more, if such a time is known.
        session: operations of one session take effect in the order of their calls, as those of one connection do even
            if they are issued at once; None: nothing of that kind was promised.
    """

    client: Hashable
    key: Hashable
    name: str
    arguments: tuple[Any, ...] = ()
    result: Any = UNKNOWN
    called_at: float = 0.0
    returned_at: float = math.inf
    session: Hashable = None

    def __str__(self) -> str:
        call = f"{self.name}({', '.join(map(shown, self.arguments))})"
        told = self.result.value if isinstance(self.result, Outcome) else shown(self.result)
        return f"{self.client!s:<12} {call} -> {told}"


class History:
    """The operations of one run, in the order of their calls.

    pending = history.call("client-1", "x", "add", 1)
    try:
        pending.result = await store.add("x", 1)      # stays UNKNOWN if this raises
    finally:
        history.returned(pending)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.operations: list[Operation] = []

    def call(self, client: Hashable, key: Hashable, name: str, *arguments: Any, session: Hashable = None) -> Operation:
        """Note, before it is issued, that `client` asks for something."""
        operation = Operation(client, key, name, arguments, called_at=self.clock(), session=session)
        self.operations.append(operation)
        return operation

    def returned(self, operation: Operation) -> None:
        """Note, once its result is set, that an operation has ended. One that ended UNKNOWN has not."""
        if operation.result is not UNKNOWN:
            operation.returned_at = self.clock()


class _Impossible:
    """The type of `IMPOSSIBLE`."""

    def __repr__(self) -> str:
        return "IMPOSSIBLE"


IMPOSSIBLE: Final = _Impossible()
"""What a model answers when an operation cannot have had its result."""


Pairs = list[tuple[Operation, Operation]]
"""Operations of which the first must take effect before the second."""


class Model(ABC):
    """What one object does, asked one thing after the other."""

    initial: Hashable = None
    """The state before anything was asked."""

    @abstractmethod
    def apply(self, state: Any, operation: Operation) -> Hashable:
        """Return the state after `operation`, or `IMPOSSIBLE` if in `state` it cannot have had its result.

        A result of UNKNOWN fits any state in which the operation can take effect. States are never changed in place.
        """

    def only_reads(self, operation: Operation) -> bool:
        """Return whether `operation`, with its result, changes nothing in any state that it fits. By default not."""
        return False

    def kind(self, operation: Operation) -> Hashable | None:
        """Return what unknown operations share that do the same to every state, for any client; None: with no other.

        Of operations that are alike the search tries the one that was called first, and not every choice among them.
        """
        return None

    def infer(self, operations: list[Operation]) -> tuple[list[Operation], Pairs]:
        """Return the operations, as what all results together tell about them, and which must come before which.

        It must exclude no order that `apply` allows; what it does exclude, the search need not try. By default nothing.
        A pair of an operation with itself says that this one fits nowhere.
        """
        return operations, []


@dataclass(frozen=True, slots=True)
class KeyVerdict:
    """What became of one key: `outcome` is "linearizable", "violation" or "undecided"; `explanation` says why."""

    key: Hashable
    outcome: str
    operations: int
    steps: int
    explanation: str = ""


@dataclass(slots=True)
class Report:
    """The verdicts on all keys of a history."""

    verdicts: list[KeyVerdict] = field(default_factory=list)

    @property
    def linearizable(self) -> bool:
        """Whether every key was shown to be."""
        return not self.failures

    @property
    def failures(self) -> list[KeyVerdict]:
        """The keys that are not, or that could not be decided."""
        return [verdict for verdict in self.verdicts if verdict.outcome != "linearizable"]

    @property
    def operations(self) -> int:
        """How many operations were judged."""
        return sum(verdict.operations for verdict in self.verdicts)

    @property
    def undecided(self) -> int:
        """How many keys the bound of the search left open."""
        return sum(verdict.outcome == "undecided" for verdict in self.verdicts)

    @property
    def explanation(self) -> str:
        """What is wrong, for people; empty if nothing is."""
        return "\n\n".join(verdict.explanation for verdict in self.failures)


def check_history(operations: Iterable[Operation], model: Model, *, max_steps: int = MAX_STEPS) -> Report:
    """Judge every key of a history by `model`, visiting at most `max_steps` states for each.

    A violation is explained by the shortest prefix of the history that has no order, the longest order that was found
    for it, and what could come next.
    """
    by_key: dict[Hashable, list[Operation]] = {}
    for operation in operations:
        by_key.setdefault(operation.key, []).append(operation)
    return Report([_check_key(key, own, model, max_steps) for key, own in by_key.items()])


def _check_key(key: Hashable, operations: list[Operation], model: Model, max_steps: int) -> KeyVerdict:
    search = _Search(operations, model, max_steps)
    found = search.run()
    if found:
        return KeyVerdict(key, "linearizable", len(operations), search.steps)
    if found is None:
        head = (
            f"key {key!r} was not decided within {max_steps} steps: too many of its {len(operations)} operations are "
            "concurrent, or unknown. The shortest prefix for which no order was found quickly"
        )
    else:
        head = f"key {key!r} is not linearizable. The shortest prefix that has no order"
    explanation = _explain(head, operations, model, max_steps if found is False else min(max_steps, QUICK_STEPS))
    return KeyVerdict(key, "undecided" if found is None else "violation", len(operations), search.steps, explanation)


# ---- the search


@dataclass(slots=True)
class _Taken:
    """One operation of an order, with the state after it and what came before."""

    before: _Taken | None
    operation: Operation
    state: Hashable
    count: int


class _Search:
    """Looks for an order of all operations that have returned, with any of the unknown ones in between.

    Which operations are taken is held as the number of the first one, in the order of calls, that is not, and a set of
    bits from there on; unknown ones, which may stay behind for ever, have a set of bits of their own. So a long history
    costs no more per step than a short one.
    """

    def __init__(self, operations: Iterable[Operation], model: Model, max_steps: int) -> None:
        self.model = model
        self.max_steps = max_steps
        self.steps = 0
        self.longest: _Taken | None = None
        inferred, pairs = model.infer(list(operations))
        ordered = sorted(inferred, key=lambda operation: operation.called_at)
        self.known = [operation for operation in ordered if operation.result is not UNKNOWN]
        self.unknown = [operation for operation in ordered if operation.result is UNKNOWN]
        self.calls = [operation.called_at for operation in self.known]
        self.returns = [operation.returned_at for operation in self.known]
        self.reads = [model.only_reads(operation) for operation in self.known]
        self.elders = _elders(self.unknown, model)
        places = {id(operation): index for index, operation in enumerate(self.known)}
        self.before: dict[int, list[int]] = {}  # what a known operation must wait for besides time
        self.hopeless = any(first is second for first, second in pairs)
        for first, second in pairs:
            if id(first) in places and id(second) in places:
                self.before.setdefault(places[id(second)], []).append(places[id(first)])

    def candidates(self, base: int, window: int, extra: int) -> list[int]:
        """Return what can come next, most urgent first: positions in `known`, and ~positions in `unknown`."""
        calls, returns, known, before = self.calls, self.returns, self.known, self.before
        found: list[int] = []
        blocked: set[Hashable] = set()
        soonest = math.inf  # return of those not taken
        for index in range(base, len(known)):
            if calls[index] > soonest:
                break
            if window >> (index - base) & 1:
                continue
            soonest = min(soonest, returns[index])
            session = known[index].session
            if session is not None:
                if session in blocked:
                    continue
                blocked.add(session)
            if index in before and not all(first < base or window >> (first - base) & 1 for first in before[index]):
                continue
            found.append(index)
        found.sort(key=returns.__getitem__)
        now = -math.inf  # it is no earlier than the latest call among those taken
        if base or window:
            now = calls[base + window.bit_length() - 1]
        if extra:
            now = max(now, self.unknown[extra.bit_length() - 1].called_at)
        for index, operation in enumerate(self.unknown):
            if operation.called_at > soonest:
                break
            elder = self.elders[index]
            if operation.returned_at >= now and not extra >> index & 1 and (elder is None or extra >> elder & 1):
                found.append(~index)
        return found

    def options(self, base: int, window: int, extra: int, state: Hashable) -> list[tuple[int, Hashable]]:
        """Return what can come next and has its result in `state`, with the state after it.

        One that only reads is the only one: if it comes later in some order, that order is as good with it here. Unless
        it was called so late that some unknown one could not follow any more.
        """
        found: list[tuple[int, Hashable]] = []
        choices = self.candidates(base, window, extra)
        last_s = min((self.unknown[~choice].returned_at for choice in choices if choice < 0), default=math.inf)
        for choice in choices:
            after = self.model.apply(state, self.known[choice] if choice >= 0 else self.unknown[~choice])
            if after is IMPOSSIBLE:
                continue
            if choice >= 0 and self.reads[choice] and self.calls[choice] <= last_s:
                return [(choice, after)]
            if choice >= 0 or after != state:  # an unknown one without effect is one that never happened
                found.append((choice, after))
        return found

    def run(self) -> bool | None:
        """Return whether there is such an order, None if the bound was reached before that was known."""
        found = self._look(QUICK_STEPS, len(self.unknown))
        if self.hopeless:
            return False
        for most_unknown in FEW_UNKNOWN:
            if found is None and most_unknown < len(self.unknown):
                found = self._look(QUICK_STEPS, most_unknown) or None
        return self._look(self.max_steps, len(self.unknown)) if found is None else found

    def _look(self, more_steps: int, most_unknown: int) -> bool | None:
        """Look for an order, within that many more steps and with at most that many unknown operations."""
        known, unknown = self.known, self.unknown
        max_steps = min(self.steps + more_steps, self.max_steps)
        base = window = extra = 0
        taken: _Taken | None = None
        seen: set[tuple[int, int, int, Hashable]] = set()
        stack: list[tuple[Iterator[tuple[int, Hashable]], int, int, int, _Taken | None]] = []
        options = iter(self.options(base, window, extra, self.model.initial))
        while base < len(known):
            for choice, after in options:
                next_base, next_window, next_extra = base, window, extra
                if choice < 0:
                    next_extra |= 1 << ~choice
                    if next_extra.bit_count() > most_unknown:
                        continue
                else:
                    next_window |= 1 << (choice - base)
                    filled = (~next_window & (next_window + 1)).bit_length() - 1
                    next_window >>= filled
                    next_base += filled
                place = (next_base, next_window, next_extra, after)
                if place in seen:
                    continue
                seen.add(place)
                if self.steps >= max_steps:
                    return None
                self.steps += 1
                stack.append((options, base, window, extra, taken))
                operation = known[choice] if choice >= 0 else unknown[~choice]
                taken = _Taken(taken, operation, after, (taken.count if taken else 0) + (choice >= 0))
                if self.longest is None or taken.count > self.longest.count:
                    self.longest = taken
                base, window, extra = next_base, next_window, next_extra
                options = iter(self.options(base, window, extra, after))
                break
            else:
                if not stack:
                    return False
                options, base, window, extra, taken = stack.pop()
        return True

    def rest(self) -> list[Operation]:
        """Return the known operations that could come next after the longest order."""
        window = extra = 0
        ends = {id(operation): index for index, operation in enumerate(self.known)}
        for operation in _chain(self.longest):
            index = ends.get(id(operation.operation))
            if index is not None:
                window |= 1 << index
        return [self.known[index] for index in self.candidates(0, window, extra) if index >= 0]


def _elders(unknown: list[Operation], model: Model) -> list[int | None]:
    """Return for each unknown operation the last one called before it that could always take its place, if any.

    In an order that has the younger one and not yet the elder they can be swapped: it stays an order, as both may take
    effect equally late.
    """
    last: dict[Hashable, int] = {}
    elders: list[int | None] = []
    for index, operation in enumerate(unknown):
        kind = model.kind(operation)
        elders.append(None if kind is None else last.get((kind, operation.returned_at)))
        if kind is not None:
            last[kind, operation.returned_at] = index
    return elders


# ---- explaining


def _chain(last: _Taken | None) -> list[_Taken]:
    found = []
    while last is not None:
        found.append(last)
        last = last.before
    return found[::-1]


def _prefix(operations: Sequence[Operation], until: float) -> list[Operation]:
    """Return what had been seen of a history at the time `until`: later returns were not known yet."""
    return [
        operation
        if operation.returned_at <= until
        else dataclasses.replace(operation, result=UNKNOWN, returned_at=math.inf)
        for operation in operations
        if operation.called_at <= until
    ]


def _explain(head: str, operations: list[Operation], model: Model, max_steps: int) -> str:
    """Find the shortest prefix without an order. A longer one has none either, so halving finds it."""
    ends = sorted(operation.returned_at for operation in operations if operation.result is not UNKNOWN)
    low, high = 0, len(ends) - 1  # the prefix until ends[high] fails
    while low < high:
        middle = (low + high) // 2
        if _Search(_prefix(operations, ends[middle]), model, max_steps).run() is not True:
            high = middle
        else:
            low = middle + 1
    prefix = _prefix(operations, ends[high])
    search = _Search(prefix, model, max_steps)
    search.run()
    last = next(operation for operation in prefix if operation.returned_at == ends[high])
    start = min(operation.called_at for operation in operations)
    order = _chain(search.longest)
    state = order[-1].state if order else model.initial
    lines = [f"{head} is of {len(prefix)} operations; it ends with", _line(last, start)]
    lines += [f"The longest order found takes {len(order)} of them. Its end, with the state after each:"]
    if len(order) > SHOWN_OPERATIONS:
        lines.append("    ...")
    lines += [f"{_line(taken.operation, start)}   then {shown(taken.state)}" for taken in order[-SHOWN_OPERATIONS:]]
    lines += [f"In the state {shown(state)} none of those that must come next can have had its result:"]
    lines += [_line(operation, start) for operation in search.rest()]
    return "\n".join(lines)


def _line(operation: Operation, start: float) -> str:
    end = f"{operation.returned_at - start:.6f}" if operation.returned_at < math.inf else "?"
    return f"    {operation.called_at - start:.6f} to {end:<10} {operation}"


def shown(value: object) -> str:
    """Return `value` for people; of a long one both ends."""
    text = repr(value)
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]}...{text[-half:]}"
