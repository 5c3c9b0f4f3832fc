"""Arrays in memory that the ranks of one host share."""

from __future__ import annotations

import numpy as np

from asyncdist.api.resolve import Group, resolve
from asyncdist.arrays.host import Array
from asyncdist.group.methods.memory import DTypeLike, Shape

__all__ = ["empty", "zeros"]


def empty(shape: Shape, dtype: DTypeLike = np.float32, group: Group = None) -> Array:
    """An array in memory the host's ranks share: what is sent of it is not copied; see `ProcessGroup.empty`."""
    return resolve(group).empty(shape, dtype)


def zeros(shape: Shape, dtype: DTypeLike = np.float32, group: Group = None) -> Array:
    """The same, filled with zeros; see `ProcessGroup.zeros`."""
    return resolve(group).zeros(shape, dtype)
