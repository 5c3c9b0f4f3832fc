"""Ways to send gradients in fewer bytes: `comm_hook=` of `DistributedDataParallel` and `GradientBuckets`."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncdist.arrays.host import Array, dtype_named
from asyncdist.data_parallel.gradients import GradientBucket


async def fp16(bucket: GradientBucket) -> None:
    """Average in float16: half the bytes of float32. Gradients are divided before they are summed."""
    await _narrow(bucket, np.dtype(np.float16))


async def bf16(bucket: GradientBucket) -> None:
    """Average in bfloat16 (needs ml_dtypes): half the bytes of float32, and its range."""
    dtype = dtype_named("bfloat16")
    if dtype is None:
        raise ValueError("the hook bf16 needs ml_dtypes: pip install ml_dtypes")
    await _narrow(bucket, dtype)


async def _narrow(bucket: GradientBucket, dtype: np.dtype[Any]) -> None:
    narrow = (bucket.buffer / bucket.group.size).astype(dtype)
    await bucket.group.all_reduce(narrow, tag=bucket.tag, timeout=bucket.timeout)
    bucket.buffer[...] = narrow


class TopK:
    """Average only the largest `ratio` of each bucket's gradients; what is left out is added to the next step's.

    Each rank sends its own choice to all, with 4 bytes more for each gradient: worth it for small ratios and groups.
    Residuals, one array for each bucket, live as long as this object: make one for each model.
    """

    def __init__(self, ratio: float = 0.01) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio must be above 0 and at most 1, but is {ratio}")
        self.ratio = ratio
        self._residuals: dict[int, Array] = {}

    async def __call__(self, bucket: GradientBucket) -> None:
        """Send a bucket."""
        buffer = bucket.buffer
        left = self._residuals.setdefault(bucket.index, np.zeros_like(buffer))
        left += buffer
        count = max(1, round(self.ratio * buffer.size))
        chosen = np.argpartition(np.abs(left), -count)[-count:].astype(np.min_scalar_type(buffer.size))
        values = left[chosen]
        left[chosen] = 0
        size = bucket.group.size
        mine = [array.view(np.uint8) for array in (chosen, values)]
        everybody = [np.empty((size, array.size), np.uint8, like=buffer) for array in mine]
        await bucket.group.all_gather_into_tensor_coalesced(everybody, mine, tag=bucket.tag, timeout=bucket.timeout)
        buffer[...] = 0
        for places, theirs in zip(*everybody, strict=True):
            buffer[places.view(chosen.dtype)] += theirs.view(buffer.dtype)
        buffer /= size
