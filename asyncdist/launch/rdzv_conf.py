"""torchrun's --rdzv-conf: the times of an elastic job."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from asyncdist.launch.config import DEFAULT_LAST_CALL_S, DEFAULT_LOST_AFTER_S

__all__ = ["RdzvTimes", "parse_rdzv_conf"]

_INTERVAL_S: Final = 5.0
_ATTEMPTS: Final = DEFAULT_LOST_AFTER_S / _INTERVAL_S
"""What torchrun calls its keep-alives; only their product counts here."""

_KEYS: Final = ("join_timeout", "last_call_timeout", "keep_alive_interval", "keep_alive_max_attempt")


@dataclass(frozen=True, slots=True)
class RdzvTimes:
    """Seconds; `join_s` is None where --join-timeout says it. `unused` are keys that mean nothing here."""

    join_s: float | None = None
    last_call_s: float = DEFAULT_LAST_CALL_S
    lost_after_s: float = DEFAULT_LOST_AFTER_S
    unused: tuple[str, ...] = ()


def parse_rdzv_conf(text: str) -> RdzvTimes:
    """Parse `key=value,key=value`. Raises ValueError for what has no such form, and for values that are no times."""
    found: dict[str, str] = {}
    for item in filter(None, (each.strip() for each in text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not key or not equals:
            raise ValueError(f"--rdzv-conf needs KEY=VALUE,KEY=VALUE, not {item!r}")
        found[key] = value
    interval_s = _positive(found, "keep_alive_interval") or _INTERVAL_S
    attempts = _positive(found, "keep_alive_max_attempt") or _ATTEMPTS
    last_call_s = _positive(found, "last_call_timeout")
    return RdzvTimes(
        join_s=_positive(found, "join_timeout"),
        last_call_s=DEFAULT_LAST_CALL_S if last_call_s is None else last_call_s,
        lost_after_s=interval_s * attempts,
        unused=tuple(key for key in found if key not in _KEYS),
    )


def _positive(found: dict[str, str], key: str) -> float | None:
    if key not in found:
        return None
    try:
        value = float(found[key])
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"--rdzv-conf {key} must be a number above 0, not {found[key]!r}")
    return value
