"""Which cases take long, and why: a case that takes more than two seconds has a marker `slow("reason")`.

At its end a run says what the cases with the marker took together, and lists loudly whichever took long without one.
The list fails no run: on a machine that does other things too, any case may be late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

__all__ = ["LOUD_S", "PROPERTY", "Durations", "remember"]

LOUD_S: Final = 4.0
"""Twice what needs a marker on a quiet machine: four workers share two cores."""

PROPERTY: Final = "slow"
"""The name under which reports carry the reason."""


def remember(items: Iterable[Any]) -> None:
    """Have the reports of cases with the marker say why."""
    for item in items:
        if marker := item.get_closest_marker("slow"):
            (reason,) = marker.args
            item.user_properties.append((PROPERTY, reason))


class Durations:
    """What each case took, from its setup to its teardown."""

    def __init__(self, reports: Iterable[Any]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.reasons: dict[str, str] = {}
        for report in reports:
            self.seconds[report.nodeid] += report.duration
            self.reasons.update((report.nodeid, why) for name, why in report.user_properties if name == PROPERTY)

    def lines(self) -> Sequence[str]:
        """Say what the slow cases took together, and which of them give no reason."""
        slow_s = sum(self.seconds[case] for case in self.reasons)
        silent = [case for case, seconds in self.seconds.items() if seconds > LOUD_S and case not in self.reasons]
        silent.sort(key=self.seconds.__getitem__, reverse=True)
        total = f"{slow_s:.0f} of {sum(self.seconds.values()):.0f} s in cases marked slow: {len(self.reasons)}"
        return [total, *(f"SLOW WITHOUT A REASON: {self.seconds[case]:.1f} s {case}" for case in silent)]
