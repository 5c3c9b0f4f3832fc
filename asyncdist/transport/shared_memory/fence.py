"""Memory fences, and which store must be visible before which load.

Two processes that share memory talk through counters, each written by one of them only, in aligned 8-byte words. Four
orders matter:

| writer | reader | what must hold |
| --- | --- | --- |
| payload, then its counter | the counter, then the payload | a reader that sees the counter sees the payload |
| counter, then looks whether the reader is asleep | says it is asleep, then looks at the counter once more | one of the
two sees the other: else the reader sleeps beside a message that no ring announces |

x86 keeps stores in order, loads in order, and a store behind an earlier load (TSO), so the first holds by itself; only
a store followed by a load of another word may change places, which the second forbids. ARM promises none of it. So the
first needs `order`, which costs nothing there, the second `fence`.

CPython has no fence of its own, but a lock has: taking and giving back an uncontended lock is an atomic
read-modify-write with acquire order and a store with release order. On x86 the first is a locked instruction, a full
fence. On ARM nothing before the release moves behind it and nothing after the acquire moves before it, so what is
between *two* such pairs is fenced from both sides: a release and a later acquire keep their order (they are RCsc on
ARMv8). Hence one pair on x86 and two elsewhere.

What a missed fence would do is caught as well: counters carry sequence numbers that must fit, and a sleeper looks
again after `RECHECK_S` without having been rung.
"""

from __future__ import annotations

import os
import threading
from typing import Final

RECHECK_S: Final = 0.25
"""A sleeper looks at shared memory this often by itself: a wake-up that got lost costs this much instead of a hang."""

PAIR: Final = threading.Lock()
"""Taken and given back, one pair: where nanoseconds count, `with PAIR` spares the call of `fence`."""

_acquire, _release = PAIR.acquire, PAIR.release


def _one_pair() -> None:
    """Full fence where an atomic read-modify-write is one."""
    _acquire()
    _release()


def _two_pairs() -> None:
    """Full fence where locks only acquire and release."""
    _acquire()
    _release()
    _acquire()
    _release()


def _nothing() -> None:
    """Order that the machine keeps by itself."""


ORDERED: Final = os.uname().machine in ("x86_64", "i686")
"""Whether `order` has nothing to do: where nanoseconds count it is not even called then."""

order = _nothing if ORDERED else _two_pairs
"""Everything this thread read before it comes before everything it reads or writes after it, and everything it wrote
before it comes before everything it writes after it."""

fence = _one_pair if ORDERED else _two_pairs
"""Everything this thread read or wrote before it comes before everything it reads or writes after it.

Only for the thread of one event loop at a time: held for two bytecodes, the lock would be contended otherwise, which
is correct and slow.
"""
