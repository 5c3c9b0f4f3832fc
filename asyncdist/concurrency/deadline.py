"""Time-outs: what callers may pass, and the one instant it becomes.

A time-out is turned into a `Deadline` once, at the call, and handed down. It is never restarted by a layer below,
because a peer that trickles bytes could stretch it for ever.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from datetime import timedelta
from numbers import Real
from typing import Final, TypeAlias

DEFAULT_TIMEOUT_S: Final = 1800.0
"""Thirty minutes, torch.distributed's default for CPU groups."""


class Inherit(enum.Enum):
    """Type of `INHERIT`, the default that means "what the group or the store says"."""

    INHERIT = "inherit"

    def __repr__(self) -> str:
        return "INHERIT"


INHERIT: Final = Inherit.INHERIT

Timeout: TypeAlias = float | timedelta | Inherit | None
"""Seconds, a timedelta, None for no limit, or `INHERIT`."""


def timeout_seconds(timeout: Timeout, inherited_s: float | None) -> float | None:
    """Return `timeout` in seconds, or None for no limit.

    Raises TypeError for anything but a number, a timedelta, None or `INHERIT`, and ValueError for a negative or NaN
    number.
    """
    if timeout is INHERIT:
        return inherited_s
    if timeout is None:
        return None
    given: object = timeout
    if isinstance(given, timedelta):
        seconds = given.total_seconds()
    elif isinstance(given, bool) or not isinstance(given, Real):  # numpy's numbers are Real
        raise TypeError(f"timeout must be seconds, a timedelta or None, not {type(timeout).__name__}")
    else:
        seconds = float(given)
    if math.isnan(seconds) or seconds < 0:
        raise ValueError(f"timeout must not be negative or NaN, got {seconds}")
    return None if math.isinf(seconds) else seconds


@dataclass(frozen=True, slots=True)
class Deadline:
    """An instant on a monotonic clock (the event loop's `time()`), or never."""

    at_s: float | None
    given_s: float | None
    """The time-out it was made of, for messages: what is left of it later is no number that anybody knows."""

    @classmethod
    def after(cls, timeout_s: float | None, now_s: float) -> Deadline:
        """The instant `timeout_s` seconds after `now_s`; never, for None."""
        return cls(None if timeout_s is None else now_s + timeout_s, timeout_s)

    def remaining_s(self, now_s: float) -> float | None:
        """Seconds left, at least 0; None if it never comes."""
        return None if self.at_s is None else max(0.0, self.at_s - now_s)

    def expired(self, now_s: float) -> bool:
        """Whether the instant has come."""
        return self.at_s is not None and now_s >= self.at_s
