"""What all checks share: which functions of a module are checks, and that a call is refused."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["checks_of", "expect_refused"]


def checks_of(module: str) -> tuple[Any, ...]:
    """Every public function that `module` itself defines, in the order of its lines; to be called at its end."""
    functions = filter(inspect.isfunction, vars(sys.modules[module]).values())
    return tuple(f for f in functions if f.__module__ == module and not f.__name__.startswith("_"))


def expect_refused(kind: type[Exception], *calls: Callable[[], object]) -> None:
    """Raise AssertionError unless each of `calls` raises `kind` at the call."""
    for call in calls:
        try:
            call()
        except kind:
            continue
        raise AssertionError(f"expected a {kind.__name__} at the call")
