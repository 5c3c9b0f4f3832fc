"""Manifests: what they say of arrays, what differs between two, and bytes that are none."""

from __future__ import annotations

import contextlib

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdist.arrays.host import describe
from asyncdist.errors import RemoteProtocolError
from asyncdist.weights import manifest as module
from asyncdist.weights.manifest import Manifest, layout_of
from asyncdist.weights.staging import Ref
from asyncdist.weights.state import EMPTY, State

ARRAYS = {"a": np.zeros((3, 5), np.float32), "empty": np.zeros((0, 2), np.int8), "b": np.zeros(7, np.complex128)}


def described(arrays):
    return {name: describe(array.dtype, array.shape) for name, array in arrays.items()}


def test_what_is_packed_is_unpacked():
    made = Manifest.for_layout(layout_of(ARRAYS))
    made.born[:] = 1 << 40
    found = Manifest.unpack(made.pack())
    assert found.entries == made.entries
    assert (found.born == made.born).all()
    assert found.pack() == made.pack()
    assert not found.why_unlike(described(ARRAYS))


def test_one_of_the_same_arrays_is_unpacked_without_a_look_at_each():
    first, later = (Manifest.for_layout(layout_of(ARRAYS)) for _ in range(2))
    later.born[:] = 1 << 40
    found = first.again(later.pack(), first.pack())
    assert found.entries is first.entries
    assert found.pack() == later.pack()
    other = Manifest.for_layout(layout_of({**ARRAYS, "a": np.zeros((5, 3), np.float32)}))
    assert first.again(other.pack(), first.pack()) is None
    assert first.again(b"", first.pack()) is None


def test_arrays_are_aligned_and_apart():
    made = Manifest.for_layout(layout_of(ARRAYS))
    flat = np.arange(made.nbytes, dtype=np.uint8)
    views = made.views(flat)
    assert [entry.offset % 64 for entry in made.entries] == [0, 0, 0]
    assert {name: (view.shape, view.dtype) for name, view in views.items()} == {
        name: (array.shape, array.dtype) for name, array in ARRAYS.items()
    }
    assert all(np.shares_memory(view, flat) for view in views.values() if view.size)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"a": np.zeros((3, 5), np.float64)}, "'a' is float32[3, 5], where float64[3, 5] is served"),
        ({"a": np.zeros((5, 3), np.float32)}, "'a' is float32[3, 5], where float32[5, 3] is served"),
        ({"c": np.zeros(1)}, "'c' is not there, where float64[1] is served"),
    ],
)
def test_other_arrays_are_named(change, why):
    assert Manifest.for_layout(layout_of(ARRAYS)).why_unlike(described({**ARRAYS, **change})) == why


def test_blocks_of_other_commits_differ(monkeypatch):
    monkeypatch.setattr(module, "RUN_BYTES", 2 * module.MIN_BLOCK_BYTES)
    size = module.MIN_BLOCK_BYTES
    one = Manifest.for_layout(layout_of({"x": np.zeros(10 * size - 5, np.uint8)}))
    other = Manifest.for_layout(one.entries)
    other.born[[0, 4, 5, 6, 9]] = 2
    wanted = other.differs_from(one)
    assert np.flatnonzero(wanted).tolist() == [0, 4, 5, 6, 9]
    assert other.runs(wanted) == [
        (range(1), slice(0, size)),
        (range(4, 6), slice(4 * size, 6 * size)),
        (range(6, 7), slice(6 * size, 7 * size)),
        (range(9, 10), slice(9 * size, 10 * size - 5)),
    ]
    assert other.differs_from(None).all()
    assert other.differs_from(Manifest.for_layout(layout_of({"x": np.zeros(9 * size, np.uint8)}))).all()


@pytest.mark.parametrize(
    ("nbytes", "block_bytes"),
    [
        (1, 64 << 10),
        ((64 << 10) * 2048, 64 << 10),
        ((64 << 10) * 2048 + 1, 128 << 10),
        (1 << 30, 512 << 10),
        (64 << 30, 1 << 20),
        ((64 << 30) + 1, 2 << 20),
    ],
)
def test_blocks_are_few_enough(nbytes, block_bytes):
    entry = module.Entry("x", np.dtype(np.uint8), (nbytes,), 0)
    made = Manifest.for_layout((entry,))
    assert made.block_bytes == block_bytes
    assert len(made.born) <= module.MAX_BLOCKS


def row(**changes):
    fields = {"name": "x", "dtype": "uint8", "shape": [64], "offset": 0, **changes}
    return list(fields.values())


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        msgpack.packb([2, [], b""]),
        msgpack.packb([1, [row()], b"123"]),
        msgpack.packb([1, [row(), row()], bytes(8)]),
        msgpack.packb([1, [row(dtype="O")], bytes(8)]),
        msgpack.packb([1, [row(name=7)], bytes(8)]),
        msgpack.packb([1, [row(shape=[-1])], bytes(8)]),
        msgpack.packb([1, [row(shape=[True])], bytes(8)]),
        msgpack.packb([1, [row(shape=7)], bytes(8)]),
        msgpack.packb([1, [row(offset=-1)], bytes(8)]),
        msgpack.packb([1, [row(shape=[1 << 50, 1 << 50])], bytes(8)]),
        msgpack.packb([1, [row()[:3]], bytes(8)]),
        msgpack.packb([1, 7, bytes(8)]),
    ],
)
def test_what_is_no_manifest_is_refused(packed):
    with pytest.raises(RemoteProtocolError, match="manifest"):
        Manifest.unpack(packed)


@given(
    st.binary(max_size=200)
    | st.recursive(st.integers(-9, 1 << 60) | st.binary(), st.lists, max_leaves=9).map(msgpack.packb)
)
def test_any_bytes_are_a_manifest_or_refused(packed):
    for kind in (Manifest, State):
        with contextlib.suppress(RemoteProtocolError):
            kind.unpack(packed)


def test_a_state_is_packed_and_unpacked():
    state = EMPTY.taken_over().next(committed=Ref(1, -7, bytes(16), 3, "here"), staged=Ref(2, 8, bytes(16), 3, "here"))
    assert State.unpack(state.pack()) == state
    assert state.taken_over().staged is None
    assert state.taken_over() != state.taken_over()
    assert (state.epoch, state.taken_over().epoch, state.step) == (1, 2, 2)
