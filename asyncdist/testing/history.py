"""A history: what concurrent clients asked of a shared object, when, and what they were told."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["REFUSED", "UNKNOWN", "History", "Operation"]


class Outcome(enum.Enum):
    """What an operation can end with instead of a result."""

    UNKNOWN = "unknown"
    REFUSED = "refused"


UNKNOWN: Final = Outcome.UNKNOWN
"""Nobody was told what became of it: it may take effect at any time from the call on, or never."""
REFUSED: Final = Outcome.REFUSED
"""The object said no, and changed nothing."""

SHOWN_CHARACTERS: Final = 60
"""Longest argument or result shown to people: values grow with every append."""


@dataclass(slots=True)
class Operation:
    """One call of a client and its result.

    Args:
        client: who asked; shown to people, and whoever holds a lock for a model of locks.
        key: which object was asked. Histories are judged key by key.
        name, arguments: what was asked, as the model of the object understands it.
        result: what the client was told, `REFUSED`, or `UNKNOWN`.
        called_at, returned_at: when, on one clock that never goes back; any unit. No return: infinity. The return of an
            UNKNOWN operation is the time after which it cannot take effect any more, for who knows one.
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


def shown(value: object) -> str:
    """Return `value` for people; of a long one both ends."""
    text = repr(value)
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]}...{text[-half:]}"
