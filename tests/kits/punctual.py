"""Promises about time, on machines whose cores other processes want as well.

A test may measure how long something took, and be given another try where that was too long: what comes too late for
a reason of its own does so every time, what had to wait for a core does not.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

TRIES = 5


class Late(AssertionError):
    """What happened was right, but later than promised."""


def assert_within(limit_s: float, took_s: float) -> None:
    """Fail in a way that `punctual` tests get another try for."""
    if not took_s < limit_s:
        raise Late(f"it took {took_s:.3f} s, and not less than {limit_s:g} s")


def punctual(test: Callable[..., Any]) -> Callable[..., Any]:
    """Run a test again, at most `TRIES` times in all, as long as nothing is wrong but the time."""
    if inspect.iscoroutinefunction(test):

        @functools.wraps(test)
        async def tried(*arguments: Any, **options: Any) -> Any:
            for _ in range(TRIES - 1):
                try:
                    return await test(*arguments, **options)
                except Late:
                    continue
            return await test(*arguments, **options)

    else:

        @functools.wraps(test)
        def tried(*arguments: Any, **options: Any) -> Any:
            for _ in range(TRIES - 1):
                try:
                    return test(*arguments, **options)
                except Late:
                    continue
            return test(*arguments, **options)

    return tried
