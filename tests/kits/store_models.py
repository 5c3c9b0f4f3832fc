"""What a store's keys, queues and locks do, asked one thing after the other: models for `check_history`.

A crash that loses the data can be part of a history: an operation "restart" of any key brings its first state back.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Hashable
from typing import Any, Final

from linearizability import IMPOSSIBLE, REFUSED, UNKNOWN, Model, Operation, Pairs

__all__ = ["LockModel", "LogModel", "QueueModel", "RegisterModel"]

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1
_NOTHING_DONE: Final = (("delete", False), ("add", REFUSED))


class RegisterModel(Model):
    """A key: its state is its value (bytes), None while it is missing.

        set(value) -> None                  get() -> bytes, or None: it was missing
        add(amount) -> int, or REFUSED      append(value) -> None
        compare_set(expected, desired) -> bytes                 delete() -> bool        check() -> bool

    For a group of keys that are only written and read together, the value may be a tuple of bytes.
    """

    initial: Hashable = None

    def apply(self, state: Any, operation: Operation) -> Hashable:
        name, arguments, result = operation.name, operation.arguments, operation.result
        if name == "get":
            return state if result is UNKNOWN or result == state else IMPOSSIBLE
        if name == "set":
            return fitting(result, None, arguments[0])
        if name == "add":
            total = sum_of(state, arguments[0])
            return fitting(result, REFUSED, state) if total is None else fitting(result, total, b"%d" % total)
        if name == "append":
            return fitting(result, None, (state or b"") + arguments[0])
        if name == "compare_set":
            expected, desired = arguments
            if state == expected or (state is None and not expected):
                return fitting(result, desired, desired)
            return fitting(result, expected if state is None else state, state)
        if name == "delete":
            return fitting(result, state is not None, None)
        if name == "check":
            return fitting(result, state is not None, state)
        if name == "restart":
            return self.initial
        raise ValueError(f"a register knows nothing of {name}")

    def only_reads(self, operation: Operation) -> bool:
        if operation.name == "compare_set":
            return bool(operation.result != operation.arguments[1])
        return operation.name in ("get", "check") or (operation.name, operation.result) in _NOTHING_DONE

    def kind(self, operation: Operation) -> Hashable | None:
        return operation.name, operation.arguments

    def infer(self, operations: list[Operation]) -> tuple[list[Operation], Pairs]:
        """Tell of keys that are only set and read which unknown writes took effect; see `Model.infer`.

        A write whose value was read took effect before that; one whose value was never read may as well have had none.
        """
        if any(each.name not in ("set", "get", "restart") for each in operations):
            return operations, []
        read_by: dict[Any, float] = {}
        for each in operations:
            if each.name == "get" and each.result is not UNKNOWN:
                read_by[each.result] = min(each.returned_at, read_by.get(each.result, math.inf))
        setters = Counter(each.arguments[0] for each in operations if each.name == "set")
        inferred = []
        for each in operations:
            if each.name == "set" and each.result is UNKNOWN:
                if each.arguments[0] not in read_by:
                    continue
                if setters[each.arguments[0]] == 1:
                    each = resolved(each, read_by[each.arguments[0]])
            inferred.append(each)
        return inferred, []


class LogModel(RegisterModel):
    """A key that is only appended to and read: by every append one token that ends with a comma, no two alike."""

    def infer(self, operations: list[Operation]) -> tuple[list[Operation], Pairs]:
        """Tell the order of the appends from the longest value that was read; see `Model.infer`."""
        if any(each.name == "restart" for each in operations):
            return operations, []
        reads = [each for each in operations if each.name == "get" and isinstance(each.result, bytes)]
        longest = max(reads, key=lambda each: len(each.result), default=None)
        places = {} if longest is None else {token: place for place, token in enumerate(longest.result.split(b","))}
        inferred: list[Operation] = []
        placed: list[tuple[int, Operation]] = []
        for each in operations:
            place = places.get(each.arguments[0][:-1]) if each.name == "append" else None
            if place is not None and longest is not None:
                each = resolved(each, longest.returned_at)
                placed.append((place, each))
            inferred.append(each)
        placed.sort(key=lambda pair: pair[0])
        return inferred, [(one, other) for (_, one), (_, other) in itertools.pairwise(placed)]


class QueueModel(Model):
    """A queue: its state is the tuple of its items, oldest first, and what pops that ended UNKNOWN have taken.

        push(item) -> None          pop() -> the oldest item, or None: it was empty         len() -> int

    No item may be pushed twice. A pop that ends UNKNOWN takes an item, or nothing. The pop may also give the item back,
    as the clients of a store do when their caller gave up waiting. Then let a "return" of the same client follow,
    UNKNOWN too, which brings the item back to the head, and let that client do nothing else.
    """

    initial: Hashable = ((), ())

    def apply(self, state: Any, operation: Operation) -> Hashable:
        name, result = operation.name, operation.result
        items, taken = state
        if name == "push":
            return fitting(result, None, ((*items, operation.arguments[0]), taken))
        if name == "pop":
            if result is UNKNOWN and items:
                return items[1:], (*taken, (operation.client, items[0]))
            return fitting(result, items[0], (items[1:], taken)) if items else fitting(result, None, state)
        if name == "len":
            return fitting(result, len(items), state)
        if name == "return":
            mine = [(client, item) for client, item in taken if client == operation.client]
            others = tuple((client, item) for client, item in taken if client != operation.client)
            return ((mine[0][1], *items), others) if mine else IMPOSSIBLE
        if name == "restart":
            return self.initial
        raise ValueError(f"a queue knows nothing of {name}")

    def only_reads(self, operation: Operation) -> bool:
        return operation.name == "len" or (operation.name == "pop" and operation.result is None)

    def infer(self, operations: list[Operation]) -> tuple[list[Operation], Pairs]:
        """Tell the order of pushes from that of pops, which may be known only much later; see `Model.infer`."""
        pops: dict[Any, Operation] = {}
        inferred: list[Operation] = []
        pushes: list[Operation] = []
        pairs: Pairs = []
        pushed = {each.arguments[0]: each.called_at for each in operations if each.name == "push"}
        for each in operations:
            item = each.result
            if each.name != "pop" or item is UNKNOWN or item is None:
                continue
            if item in pops or pushed.get(item, math.inf) > each.returned_at:
                pairs.append((each, each))
            pops[item] = each
        drained = emptied_at_the_end(operations)
        for each in operations:
            if each.name == "push":
                popped = pops.get(each.arguments[0])
                if each.result is UNKNOWN and popped is not None:  # then it did take effect, before that
                    each = resolved(each, popped.returned_at)
                elif each.result is UNKNOWN and drained:  # had it taken effect, some client would have the item
                    continue
                pushes.append(each)
            inferred.append(each)
        returns = [each for each in operations if each.name == "return"]
        pushes.sort(key=lambda push: push.called_at)
        for index, first in enumerate(pushes):
            for second in pushes[index + 1 :]:
                if second.called_at > first.returned_at:
                    break
                pairs += in_order_of_pops(first, second, pops, returns)
        return inferred, pairs


def emptied_at_the_end(operations: list[Operation]) -> bool:
    """Return whether the last thing known of a queue is that it was empty, and every item ever taken is known."""
    if any(each.name == "restart" or (each.name == "pop" and each.result is UNKNOWN) for each in operations):
        return False
    known = [each for each in operations if each.result is not UNKNOWN]
    last = max(known, key=lambda each: each.called_at, default=None)
    others_end = max((each.returned_at for each in known if each is not last), default=-math.inf)
    return last is not None and last.name == "pop" and last.result is None and others_end < last.called_at


def in_order_of_pops(
    first: Operation, second: Operation, pops: dict[Any, Operation], returns: list[Operation]
) -> Pairs:
    """Return two pushes in the order in which their items were popped, if that tells anything."""
    one, other = pops.get(first.arguments[0]), pops.get(second.arguments[0])
    if one is None or other is None:
        return []
    if other.returned_at < one.called_at:
        first, second, one, other = second, first, other, one
    elif one.returned_at >= other.called_at:
        return []
    # What goes out and comes back meanwhile is overtaken.
    start = min(first.called_at, second.called_at)
    if any(each.called_at <= one.returned_at and each.returned_at >= start for each in returns):
        return []
    return [(first, second)]


class LockModel(Model):
    """A lock with fencing tokens: its state is the holder (None: free) and the largest token given so far.

        acquire() -> int, larger than all before                release() -> None

    `Operation.client` is the holder. If operations may end UNKNOWN, each acquire should have its own client. Tokens
    grow across a "restart" too.
    """

    initial: Hashable = (None, 0)

    def apply(self, state: Any, operation: Operation) -> Hashable:
        holder, largest = state
        if operation.name == "acquire":
            if holder is not None:
                return IMPOSSIBLE
            if operation.result is UNKNOWN:
                return operation.client, largest
            return (operation.client, operation.result) if operation.result > largest else IMPOSSIBLE
        if operation.name == "release":
            return (None, largest) if holder == operation.client else IMPOSSIBLE
        if operation.name == "restart":
            return None, largest
        raise ValueError(f"a lock knows nothing of {operation.name}")


def resolved(write: Operation, seen_at: float) -> Operation:
    """Return a write whose effect was seen, as one that is known to have taken effect by then."""
    if write.result is not UNKNOWN:
        return write
    return dataclasses.replace(write, result=None, returned_at=min(write.returned_at, seen_at), session=None)


def fitting(result: Any, expected: Any, after: Hashable) -> Hashable:
    """Return the state `after` if the result is the `expected` one, or was never told."""
    return after if result is UNKNOWN or result == expected else IMPOSSIBLE


def sum_of(state: bytes | None, amount: int) -> int | None:
    """Return the value of a counter after `amount` is added, None if the store has to refuse."""
    try:
        total = int(state or b"0") + amount if state != b"" else None
    except ValueError:
        return None
    return total if total is not None and INT64_MIN <= total <= INT64_MAX else None
