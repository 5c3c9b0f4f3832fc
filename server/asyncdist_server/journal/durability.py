"""What an acknowledged change has survived: the modes by name, as `--durability` and the status give them."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

MAX_DELAY_MS: Final = 60_000
"""Longest delay of the relaxed mode: whoever can lose more than a minute wants no journal."""
MAX_JOURNALED_VALUE_BYTES: Final = 512 * 1024 * 1024
"""Longest value with a journal: SQLite holds no more than 1e9 bytes in a row."""
_RELAXED: Final = re.compile(r"relaxed:([0-9]{1,9})\Z")


class Durability(NamedTuple):
    """One mode. `delay_s` is None unless answers go out before the disk has the change."""

    name: str = "memory"
    delay_s: float | None = None

    @property
    def journaled(self) -> bool:
        """Whether there is a journal at all."""
        return self.name != "memory"


MEMORY: Final = Durability()
"""Everything is gone when the daemon ends."""
DURABLE: Final = Durability("durable")
"""Whatever a client was told is on the disk."""


def parse_durability(text: str) -> Durability:
    """Return the mode called `memory`, `durable` or `relaxed:<ms>`. Raises `ValueError`."""
    for mode in (MEMORY, DURABLE):
        if text == mode.name:
            return mode
    match = _RELAXED.match(text)
    if match is None or not 0 < int(match[1]) <= MAX_DELAY_MS:
        raise ValueError(
            f"the durability is memory, durable, or relaxed:<ms> with 1 to {MAX_DELAY_MS} milliseconds, not {text!r}"
        )
    return Durability(f"relaxed:{int(match[1])}", int(match[1]) / 1000)
