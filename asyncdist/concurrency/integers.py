"""Whole numbers as callers may give them: ints, and numpy's, which is what ranks and sizes out of arrays are."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index

import numpy as np

__all__ = ["as_int", "as_ints"]


def as_int(value: object, must: str) -> int:
    """Return `value` as an int. Raises TypeError, which begins with `must`, for what is none, and for a bool."""
    if type(value) is int:
        return value
    if not isinstance(value, bool | np.bool_):
        try:
            return index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise TypeError(f"{must}, not {type(value).__name__}")


def as_ints(values: object, must: str) -> list[int]:
    """Return a list of `values` as ints. Raises TypeError, which begins with `must`, for what is no list of ints."""
    if not isinstance(values, Iterable):
        raise TypeError(f"{must}, in a list, not {type(values).__name__}")
    return [as_int(value, must) for value in values]
