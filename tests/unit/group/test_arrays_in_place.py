"""Operations on whatever exposes its memory: written in place, or refused before a byte moves."""

from __future__ import annotations

import array as stdlib_array
import asyncio
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from group_kit import Group, outcome

import asyncdist as dist
from asyncdist.testing import run_world

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3b11fnuz),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_dtype_is_reduced_moved_and_sent(dtype: Any) -> None:
    async def main(group: Group) -> None:
        own, whole = np.ones(3, dtype), np.zeros((2, 3), dtype)
        await group.all_reduce(own)
        assert own.tolist() == [True if dtype == "bool" else 2] * 3
        await group.all_gather_into_tensor(whole, own)
        assert whole.tolist() == [own.tolist()] * 2
        sending = group.isend(own, 1 - group.rank)
        received = await group.recv_array(1 - group.rank)
        assert received.dtype == own.dtype
        assert received.tolist() == own.tolist()
        await sending

    run_world(2, main)


@pytest.mark.parametrize("operation", ["recv", "all_reduce", "all_gather"])
def test_what_cannot_be_written_any_more_at_the_end_fails_by_name(operation: str) -> None:
    """A strided array is written at the end, and may have been made read-only by then, against the rules."""

    async def main(group: Group) -> None:
        x = np.zeros((5, 2))[:, 0]
        if group.rank == 1:
            await asyncio.sleep(1)
            work = {
                "recv": lambda: group.isend(np.ones(5), 0),
                "all_reduce": lambda: group.all_reduce(x),
                "all_gather": lambda: group.all_gather([np.zeros(5), np.zeros(5)], x),
            }[operation]()
            await outcome(work)
            return
        pending = {
            "recv": lambda: group.recv(x, 1),
            "all_reduce": lambda: group.all_reduce(x),
            "all_gather": lambda: group.all_gather([np.zeros(5), x], np.ones(5)),
        }[operation]()
        x.flags.writeable = False
        with pytest.raises((ValueError, dist.DistError), match=rf"group default, rank 0, {operation} .* read-only"):
            await pending

    run_world(2, main)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e8m0fnu, ml_dtypes.int4, ml_dtypes.float4_e2m1fn])
def test_storage_formats_are_moved_but_not_reduced(dtype: Any) -> None:
    async def main(group: Group) -> None:
        x = np.full(3, group.rank + 1).astype(dtype)
        await group.broadcast(x, 1)
        assert x.tolist() == [2, 2, 2]
        with pytest.raises(TypeError, match="cannot be reduced"):
            group.all_reduce(x)
        sending = group.isend(x, 1 - group.rank)
        assert (await group.recv_array(1 - group.rank)).dtype == dtype
        await sending

    run_world(2, main)


@pytest.mark.parametrize(
    "make",
    [
        lambda: stdlib_array.array("d", [1, 2, 3]),
        lambda: memoryview(stdlib_array.array("i", [1, 2, 3])),
        lambda: bytearray([1, 2, 3]),
        lambda: memoryview(bytearray([1, 2, 3]))[:],
        lambda: np.array([1, 9, 2, 9, 3])[::2],
        lambda: memoryview(np.array([1, 9, 2, 9, 3])[::2]),
    ],
)
def test_buffers_are_written_where_they_are(make: Any) -> None:
    async def main(group: Group) -> None:
        buffer = make()
        assert await group.all_reduce(buffer) is buffer
        assert np.asarray(buffer).tolist() == [2, 4, 6]
        received = make()
        sending = group.isend(buffer, 1 - group.rank)
        await group.recv(received, 1 - group.rank)
        assert np.asarray(received).tolist() == [2, 4, 6]
        await sending

    run_world(2, main)


def test_layouts_of_both_sides_may_differ() -> None:
    async def main(group: Group) -> None:
        order = "F" if group.rank else "C"
        x = np.array([[0.0, 1, 2], [3, 4, 5]], order=order)
        await group.all_reduce(x)
        assert x.tolist() == [[0, 2, 4], [6, 8, 10]]
        stacked = np.empty((2, 2, 3), order=order)
        await group.all_gather_into_tensor(stacked, x[::-1] if group.rank else x)
        assert stacked.tolist() == [[[0, 2, 4], [6, 8, 10]], [[6, 8, 10], [0, 2, 4]]]

    run_world(2, main)


READ_ONLY = np.ones(2)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (np.ma.masked_array([1.0], [True]), TypeError, "mask would be lost"),
        (np.zeros(2, ">f8"), TypeError, "foreign byte order"),
        (np.array(["a"]), TypeError, "cannot be sent"),
        (np.array([None]), TypeError, "cannot be sent"),
        (np.zeros(2, "M8[s]"), TypeError, "cannot be sent"),
        (np.zeros(2, "i4,f4"), TypeError, "cannot be sent"),
        (b"bytes", ValueError, "read-only"),
        (READ_ONLY, ValueError, "read-only"),
        (np.float32(1), ValueError, "read-only"),
        (np.broadcast_to(np.ones(1), 3), ValueError, "read-only"),
        (np.lib.stride_tricks.as_strided(np.ones(3), (2, 2), (8, 8)), ValueError, "overlaps itself"),
        ([1.0, 2.0], TypeError, "numpy array"),
    ],
)
def test_what_cannot_be_written_is_refused_and_the_others_hear_of_it(
    value: Any, error: type[Exception], text: str
) -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises(error, match=text):
                group.all_reduce(value)
        else:
            refused = await outcome(group.all_reduce(np.ones(2)))
            assert isinstance(refused, dist.CollectiveMismatchError)
            assert "rank 0 refused" in str(refused)
        x = np.ones(())
        await group.all_reduce(x)
        assert x == 2
        await group.all_reduce(np.ones((0, 3)))

    run_world(2, main)
