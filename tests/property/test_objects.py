"""Any object arrives as it was; any bytes are an object or RemoteProtocolError, in memory in proportion."""

from __future__ import annotations

import contextlib
import random
import tracemalloc
from typing import Any

import numpy as np
from fewer_cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncdist.arrays.objects import decode, encode
from asyncdist.errors import RemoteProtocolError

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(), st.binary(max_size=20)
)
HASHABLE = st.recursive(
    SCALARS, lambda inner: st.one_of(st.tuples(inner, inner), st.frozensets(inner, max_size=3)), max_leaves=5
)
ARRAYS = st.builds(
    lambda dtype, shape: np.arange(int(np.prod(shape))).astype(dtype).reshape(shape),
    st.sampled_from(["?", "i1", "u8", "f2", "f8", "c16"]),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
)
OBJECTS = st.recursive(
    st.one_of(HASHABLE, ARRAYS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(HASHABLE, inner, max_size=3),
        st.sets(HASHABLE, max_size=3),
    ),
    max_leaves=12,
)
OVERHEAD_BYTES = 1 << 20
"""Of msgpack's unpackers, which have a stack each, and of errors with their tracebacks."""
GROWTH = 400
"""Bytes of memory per byte received: an empty set in a set takes 4 and becomes some 216."""


def spell(value: Any) -> str:
    """Values and types, all the way down; NaNs and negative zeros as they are."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{value.tobytes()!r}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(spell, value))})"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({', '.join(sorted(map(spell, value)))})"
    if isinstance(value, dict):
        return f"dict({', '.join(f'{spell(key)}: {spell(item)}' for key, item in value.items())})"
    return f"{type(value).__name__} {value!r}"


@settings(max_examples=examples(100))
@given(OBJECTS)
def test_any_object_arrives_as_it_was(value: object) -> None:
    assert spell(decode(encode(value))) == spell(value)


def accepted(octets: bytearray) -> None:
    tracemalloc.start()
    try:
        with contextlib.suppress(RemoteProtocolError):
            decode(memoryview(octets))
        assert tracemalloc.get_traced_memory()[1] < OVERHEAD_BYTES + GROWTH * len(octets)
    finally:
        tracemalloc.stop()


@settings(max_examples=examples(67))
@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_refused(octets: bytes) -> None:
    accepted(bytearray(octets))
    accepted(bytearray(b"\1" + bytes(7) + len(octets).to_bytes(8, "little") + octets))


@settings(max_examples=examples(67))
@given(OBJECTS, st.integers(0, 2**32))
def test_damaged_objects_are_objects_or_refused(value: object, seed: int) -> None:
    rng = random.Random(seed)
    octets = bytearray(encode(value))
    for _ in range(rng.randint(1, 4)):
        octets[rng.randrange(len(octets))] = rng.randrange(256)
    accepted(octets[: rng.choice((len(octets), rng.randrange(len(octets) + 1)))])


def test_promises_of_elements_that_do_not_come_cost_nothing() -> None:
    """Lists that say how long they are, each inside the one before, with nothing in them."""
    padding = bytes(100_000)
    lists = (b"\xdd" + len(padding).to_bytes(4, "big")) * 500 + padding
    accepted(bytearray(b"\1" + bytes(7) + len(lists).to_bytes(8, "little") + lists))
