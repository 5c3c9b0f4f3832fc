"""Objects as bytes: what travels as it is, what is refused, and where it was."""

from __future__ import annotations

import collections
import enum
import math
import struct
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest

from asyncdist.arrays import objects
from asyncdist.arrays.host import encode_meta
from asyncdist.arrays.objects import ALIGNMENT, APART_BYTES, MAX_DEPTH, MAX_DEPTH_OF_DEEP, MAX_LISTS, decode, encode
from asyncdist.errors import RemoteProtocolError


class Color(enum.IntEnum):
    """A subclass of int, whose type would be lost."""

    RED = 1


class Tensor:
    """What numpy can read, and may not be changed into an array unasked."""

    def __array__(self) -> np.ndarray[Any, Any]:
        return np.zeros(1)


class Plain:
    """Something only pickle can send."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain)

    __hash__ = None  # type: ignore[assignment]


class Unpicklable:
    """Something that nothing can send."""

    def __reduce__(self) -> Any:
        raise OSError("no way")


class Treacherous:
    """Pickled well, and raising whatever it likes where it is unpickled."""

    def __reduce__(self) -> Any:
        return divmod, (1, 0)


def same(left: Any, right: Any) -> bool:
    """Equal in value and type, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, float) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right)


def extension(code: int, data: bytes) -> bytes:
    """In msgpack, with a code that its own class refuses."""
    return struct.pack(">BBb", 0xC7, len(data), code) + data


def skeleton(packed: bytes, behind: bytes = b"", form: int = 1) -> memoryview:
    """An object of this msgpack."""
    return memoryview(struct.pack("<B7xQ", form, len(packed)) + packed + behind)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 3**500, -(3**500)),
        *(1.5, -0.0, math.inf, math.nan, 1 + 2j, "", "text \u00e9 \U0001f600", "\ud800", b"", b"\0\xff"),
        *(
            [],
            [1, [2]],
            (),
            (1, (2, [3])),
            {},
            {"a": 1, 2: "b", (3, 4): {}, None: 1, frozenset({1}): 2, 1.5: 0, b"k": 0},
        ),
        *(set(), {1, "a", (1, 2)}, frozenset({frozenset(), 1}), [{1}, frozenset({2})]),
        *(np.float32(1.5), np.int8(-3), np.bool_(True), np.complex128(1j), ml_dtypes.bfloat16(2), np.float64(1)),
        *(msgpack.ExtType(code, b"\x93\1\2\3") for code in range(10)),
        *({msgpack.ExtType(127, b""): 1}, msgpack.Timestamp(1, 2)),
        np.zeros(0),
        np.array(5, "i2"),
        np.arange(24.0).reshape(2, 3, 4)[:, ::-1, 1:],
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.zeros((3, 0, 2**40), "f4"),
        np.ones((2, 2), ml_dtypes.bfloat16),
        {"layers": [(np.arange(3), np.arange(5, dtype="u1")), {"k": np.ones(2) > 0}], "step": 7},
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_what_is_sent_arrives_as_it_was(value: object) -> None:
    assert same(decode(encode(value)), value)
    assert same(decode(encode([value, (value,)])), [value, (value,)])


def test_bytes_of_other_kinds_arrive_as_bytes() -> None:
    assert same(decode(encode([bytearray(b"ab"), memoryview(b"cd")])), [b"ab", b"cd"])


def test_arrays_are_writable_aligned_and_apart_from_what_was_encoded() -> None:
    original = [np.arange(5), np.arange(7, dtype="i1"), np.arange(3.0)]
    octets = encode(original)
    original[0][:] = 9
    decoded = decode(octets)
    assert decoded[0].tolist() == [0, 1, 2, 3, 4]
    base = np.frombuffer(octets, np.uint8).ctypes.data
    for array in decoded:
        assert (array.ctypes.data - base) % ALIGNMENT == 0
        array += 1
    assert not any(np.may_share_memory(a, b) for a in decoded for b in decoded if a is not b)


def test_large_arrays_may_travel_apart() -> None:
    small, limit = np.arange(3), np.zeros(APART_BYTES, np.uint8)
    large = np.arange(APART_BYTES + 1, dtype=np.uint8)
    value = {"small": small, "limit": limit, "large": [large, (large[:0], large.reshape(1, -1))]}
    sent: list[Any] = []
    octets = encode(value, apart=sent)
    assert [array.shape for array in sent] == [large.shape, (1, *large.shape)]
    assert sent[0] is large
    made: list[Any] = []
    came = decode(octets, apart=made)
    for array, elements in zip(made, sent, strict=True):
        array[...] = elements
    assert same(came, value)
    with pytest.raises(RemoteProtocolError, match="extension"):
        decode(octets)


def test_an_array_apart_that_no_memory_could_hold_is_refused() -> None:
    meta = encode_meta(np.dtype(np.uint8), (1 << 62,))
    vast = bytes((0xC7, len(meta), objects._APART & 0xFF)) + meta
    with pytest.raises(RemoteProtocolError):
        decode(memoryview(struct.pack("<B7xQ", 1, len(vast)) + vast), apart=[])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "the object cannot be encoded: it is of type builtins.object"),
        ({"model": [1, (2, {"k": Plain()})]}, r"the object\['model'\]\[1\]\[1\]\['k'\] cannot .*Plain"),
        ([{Plain}], "an element of .*type builtins.type"),
        ({Color.RED: 1}, "a key of the object cannot be encoded: .*Color"),
        ([Color.RED], r"the object\[0\]"),
        ([{Plain}], r"numpy arrays can be sent\. Pickled, any type can be sent if"),
        (collections.OrderedDict(), r"OrderedDict; it would arrive as a plain dict: send dict\(...\) of it\. Pickled"),
        (Tensor(), r"Tensor; send it as a numpy array, .*, or a tensor's \.numpy\(\)\. Pickled"),
        (collections.namedtuple("Point", "x")(1), "Point"),
        (np.array(["text"]), "an array of dtype <U4"),
        (np.array([object()]), "dtype object"),
        (np.arange(3).astype(">i4"), "dtype >i4"),
        (np.datetime64(0, "s"), "datetime64"),
        (np.ma.zeros(2), "MaskedArray"),
        (np.rec.array([1.5]), "recarray"),
        ([0, memoryview(b"abc")[::2]], r"the object\[1\] .*: it is a memoryview that is not contiguous: send bytes"),
        ({"x" * 100: Plain()}, r"\.\.\.\]"),
        ([msgpack.ExtType(1, b""), msgpack.Timestamp(1, 2), Plain()], r"the object\[2\] cannot .*Plain"),
    ],
    ids=lambda value: "",
)
def test_what_would_lose_its_type_is_refused_by_name_and_place(value: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        encode(value)


def nested(depth: int) -> tuple[Any, ...]:
    """Tuples in tuples."""
    value: tuple[Any, ...] = ()
    for _ in range(depth - 1):
        value = (value,)
    return value


def test_nesting_has_its_limits() -> None:
    assert decode(encode(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} deep"):
        encode(nested(MAX_DEPTH + 1))
    flat: list[Any] = []
    flat.append(flat)
    tuples: tuple[list[Any]] = ([],)
    tuples[0].append(tuples)
    for cycle in (flat, tuples):
        with pytest.raises(ValueError, match=r"itself|themselves"):
            encode(cycle)


def lists(depth: int, inmost: Any) -> Any:
    """Lists in lists."""
    for _ in range(depth):
        inmost = [inmost]
    return inmost


def test_lists_in_deep_tuples_have_their_limits() -> None:
    """msgpack calls itself for each, and the stack ends."""
    fits, deeper = ((lists(depth, nested(1)),) for depth in (MAX_LISTS, MAX_LISTS + 1))
    for _ in range(MAX_DEPTH_OF_DEEP):
        fits, deeper = (fits,), (deeper,)
    assert decode(encode(fits)) == fits
    with pytest.raises(ValueError, match=f"more than {MAX_LISTS} deep"):
        encode(deeper)
    assert decode(encode(deeper[0])) == deeper[0]
    deepest: Any = ()
    for _ in range(MAX_DEPTH - 1):
        deepest = (lists(500, deepest),)
    with pytest.raises(ValueError, match="nested"):
        encode(deepest)


def test_deeper_bytes_than_encode_makes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as deeper:
        deeper.setattr(objects, "MAX_DEPTH", MAX_DEPTH + 1)
        octets = encode(nested(MAX_DEPTH + 1))
    with pytest.raises(RemoteProtocolError, match=f"more than {MAX_DEPTH} deep"):
        decode(octets)
    with pytest.raises(RemoteProtocolError):
        decode(skeleton(b"\x91" * 100_000 + b"\xc0"))


@pytest.mark.parametrize(
    ("octets", "message"),
    [
        (memoryview(b""), "no object"),
        (skeleton(b"\xc0", form=3), "no such format"),
        (memoryview(b"\x01\x01" + bytes(6) + struct.pack("<Q", 1) + b"\xc0"), "no such format"),
        (skeleton(b"\xc0")[:-1], "no such format"),
        (skeleton(b""), "no object"),
        (skeleton(b"\xc0\xc0"), "no object"),
        (skeleton(b"\xc1"), "no object"),
        (skeleton(b"\xc0", b"x"), "behind the end"),
        (skeleton(b"\xdd\xff\xff\xff\xff"), "no object"),
        (skeleton(b"\xdf\xff\xff\xff\xff\xc0"), "no object"),
        (skeleton(extension(-100, b"")), "extension -100 is unknown"),
        (skeleton(extension(objects._TUPLE, b"\xc0")), "tuple or set that is no list"),
        (skeleton(extension(objects._SET, msgpack.packb([[]]))), "unhashable"),
        (skeleton(b"\x81" + msgpack.packb([]) + b"\xc0"), "unhashable"),
        (skeleton(extension(objects._COMPLEX_NUMBER, b"short")), "no object"),
        (skeleton(extension(objects._SCALAR, b"")), "empty scalar"),
        (skeleton(extension(objects._SCALAR, encode_meta(np.dtype("i4"), ()) + b"abc")), "another size"),
        (skeleton(extension(objects._ARRAY, b"\x06object")), "cannot be received"),
        (skeleton(extension(objects._ARRAY, encode_meta(np.dtype("i4"), (2**60,)))), "behind the end"),
        (skeleton(extension(objects._ARRAY, encode_meta(np.dtype("i4"), (2**64 - 1, 0)))), "no object"),
        (
            skeleton(extension(objects._ARRAY, encode_meta(np.dtype("u1"), (1,))), b"\1" * 64),
            "between two arrays",
        ),
    ],
)
def test_what_is_no_object_is_refused(octets: memoryview, message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        decode(octets)


def test_pickle_is_for_what_nothing_else_can_hold_and_only_where_allowed() -> None:
    assert bytes(encode([1], allow_pickle=True)) == bytes(encode([1]))
    octets = encode([Plain()], allow_pickle=True)
    with pytest.raises(RemoteProtocolError, match="pickled, and not every rank said allow_pickle=True"):
        decode(octets)
    assert decode(octets, allow_pickle=True) == [Plain()]
    with pytest.raises(TypeError, match="neither be encoded nor pickled: no way"):
        encode(Unpicklable(), allow_pickle=True)
    with pytest.raises(RemoteProtocolError, match="cannot be unpickled"):
        decode(skeleton(b"nonsense", form=2), allow_pickle=True)
    with pytest.raises(RemoteProtocolError, match="cannot be unpickled"):
        decode(encode(Treacherous(), allow_pickle=True), allow_pickle=True)
    with pytest.raises(RemoteProtocolError, match="behind the end"):
        decode(skeleton(bytes(octets[16:]), b"x", form=2), allow_pickle=True)
