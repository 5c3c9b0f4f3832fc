"""Arguments that cross to another thread: arrays on a GPU are told which stream their caller works on.

The current stream is a thread's own, so it must be asked for where the call is made.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncdist.arrays.device import LEGACY_STREAM, device_array
from asyncdist.cuda import provider

__all__ = ["carried"]


def carried(value: Any) -> Any:
    """`value`, or what stands for it in another thread; lists are looked into."""
    if value is None or isinstance(value, int | str | np.ndarray):
        return value
    if type(value) in (list, tuple):
        return [carried(one) for one in value] if value and not _is_plain(value[0]) else value
    array = device_array(value)
    if array is None:
        return value
    found = None if array.ordered else provider.find()
    if found is not None:
        array.stream, array.ordered = found.runtime.current_stream(array.device).handle or LEGACY_STREAM, True
    return array


def _is_plain(value: Any) -> bool:
    """Whether a list that begins with this holds no arrays of a GPU, and must stay the caller's list."""
    while type(value) in (list, tuple) and value:
        value = value[0]
    return (
        value is None or isinstance(value, int | float | str | bytes | dict | np.ndarray) or device_array(value) is None
    )
