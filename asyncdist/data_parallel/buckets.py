"""Buckets: how a list of arrays is divided into operations, the same way on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from asyncdist.arrays.host import Array
from asyncdist.concurrency.integers import as_int

__all__ = ["BUCKET_BYTES", "check_bucket_bytes", "divide"]

BUCKET_BYTES: Final = 4 << 20
"""Unless told otherwise: enough for an operation to run at full bandwidth, little enough for the first to start early
and for copying one into place to take less than a millisecond of the event loop."""


def divide(arrays: Sequence[Array], bucket_bytes: int) -> list[list[int]]:
    """Divide `arrays` into buckets of one dtype and at most `bucket_bytes`; a larger array has one to itself.

    Returns the numbers of each bucket's arrays. Arrays come in the order in which they are listed, and buckets in the
    order in which they would be full if arrays became ready in that order.
    """
    full: list[list[int]] = []
    filling: dict[np.dtype[Any], tuple[list[int], int]] = {}
    for index, array in enumerate(arrays):
        bucket, nbytes = filling.get(array.dtype, ([], 0))
        if bucket and nbytes + array.nbytes > bucket_bytes:
            full.append(bucket)
            bucket, nbytes = [], 0
        bucket.append(index)
        filling[array.dtype] = bucket, nbytes + array.nbytes
    full.extend(bucket for bucket, _ in filling.values())
    return sorted(full, key=lambda bucket: bucket[-1])


def check_bucket_bytes(value: int) -> int:
    """Return `value`. Raises TypeError for anything but an int, ValueError below 1."""
    value = as_int(value, "bucket_bytes must be an int")
    if value < 1:
        raise ValueError(f"bucket_bytes must be at least 1, but is {value}")
    return value
