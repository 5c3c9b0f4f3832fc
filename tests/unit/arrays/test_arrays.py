"""Arrays: what may be sent, and how a shape and a dtype travel."""

from __future__ import annotations

import array as stdlib_array
import sys

import forked
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdist.arrays.host import Flat, decode_meta, encode_meta, host_array, human_bytes


def test_a_numpy_array_is_itself() -> None:
    x = np.arange(3.0)
    assert host_array(x) is x


@pytest.mark.parametrize(
    "value", [bytearray(b"abcd"), memoryview(bytearray(b"abcd")), stdlib_array.array("d", [1.0, 2.0])]
)
def test_buffers_share_their_memory(value: object) -> None:
    found = host_array(value)
    found[...] = 0
    assert bytes(memoryview(value)) == bytes(memoryview(value).nbytes)  # type: ignore[arg-type]


def test_array_interface_and_dlpack_share_their_memory() -> None:
    class Interface:
        def __init__(self) -> None:
            self.x = np.arange(4)
            self.__array_interface__ = self.x.__array_interface__

    class Dlpack:
        def __init__(self) -> None:
            self.x = np.arange(4)
            self.__dlpack__ = self.x.__dlpack__
            self.__dlpack_device__ = self.x.__dlpack_device__

    for owner in (Interface(), Dlpack()):
        assert np.shares_memory(host_array(owner), owner.x)


def test_a_numpy_scalar_can_be_sent_but_not_written() -> None:
    assert host_array(np.float32(3)) == 3
    with pytest.raises(ValueError, match="loss is read-only"):  # a copy would swallow the result
        Flat(host_array(np.float32(3)), writable=True, name="loss")


@pytest.mark.parametrize(
    ("device", "error", "text"),
    [
        ((2, 0), None, "lives on a GPU"),
        ((1, 0), RuntimeError("Unsupported dtype in DLTensor."), "Unsupported dtype in DLTensor; install ml_dtypes"),
        ((1, 0), BufferError("not strided"), "numpy array: not strided$"),
    ],
)
def test_dlpack_that_numpy_cannot_take_is_a_type_error(
    device: tuple[int, int], error: Exception | None, text: str
) -> None:
    class Dlpack:
        def __dlpack_device__(self) -> tuple[int, int]:
            return device

        def __dlpack__(self, **_: object) -> object:
            assert error is not None
            raise error

    with pytest.raises(TypeError, match=text):
        host_array(Dlpack())


@pytest.mark.parametrize(
    "value",
    [
        [1, 2],
        3.0,
        "text",
        np.array([object()]),
        np.array(["a"]),
        np.zeros(2, dtype=[("a", "i4")]),
        np.zeros(2, dtype=">f4"),
        np.zeros(2, dtype="M8[s]"),
        np.zeros(2, dtype="V4"),
        np.zeros(2, dtype="m8[s]"),
        np.ma.masked_array([1.0, 2.0], [True, False]),
        memoryview(b"ab").cast("c"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match="weights"):
        host_array(value, "weights")


@pytest.mark.parametrize("value", [3, 3.0, 1j, [1.0], (1, 2)])
def test_numbers_and_lists_are_told_what_to_do(value: object) -> None:
    with pytest.raises(TypeError, match=r"numpy\.array makes one of it, and collectives of objects"):
        host_array(value)


def test_masked_arrays_are_refused_with_the_way_out() -> None:
    with pytest.raises(TypeError, match=r"mask would be lost.*\.filled"):
        host_array(np.ma.masked_array([1.0], [True]))


def test_other_subclasses_are_plain_memory() -> None:
    x = np.zeros(2).view(np.recarray)
    assert type(host_array(x)) is np.ndarray
    assert np.shares_memory(host_array(x), x)


def test_gpu_arrays_are_refused_with_the_reason() -> None:
    class OnDevice:
        __cuda_array_interface__ = None

    with pytest.raises(TypeError, match="GPU"):
        host_array(OnDevice())


def test_contiguous_arrays_are_viewed() -> None:
    x = np.zeros((2, 3), np.float32)
    flat = Flat(x, writable=True)
    flat.octets[:4] = np.float32(7).tobytes()
    assert x[0, 0] == 7
    assert flat.octets.nbytes == 24


@pytest.mark.parametrize("make", [lambda x: x[::2], lambda x: x.reshape(4, 4).T, lambda x: x[::-1]])
def test_strided_arrays_are_written_back(make: object) -> None:
    view = make(np.arange(16.0))  # type: ignore[operator]
    flat = Flat(view, writable=True)
    assert flat.elements.tolist() == view.flatten().tolist()
    flat.elements[:] = np.arange(view.size)
    flat.write_back()
    assert view.flatten().tolist() == list(range(view.size))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1)])
def test_scalars_and_empty_arrays(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, order="F")
    flat = Flat(x, writable=True)
    assert flat.octets.nbytes == x.nbytes
    flat.elements[...] = 3
    flat.write_back()
    assert (x == 3).all()


def test_fortran_order_travels_in_c_order() -> None:
    x = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    flat = Flat(x, writable=True)
    assert flat.elements.tolist() == [0, 1, 2, 3, 4, 5]
    flat.elements *= 2
    flat.write_back()
    assert x.tolist() == [[0, 2, 4], [6, 8, 10]]


def test_windows_that_overlap_are_refused_where_they_are_written() -> None:
    windows = np.lib.stride_tricks.sliding_window_view(np.arange(5.0), 3, writeable=True)
    with pytest.raises(ValueError, match="overlaps itself"):
        Flat(windows, writable=True)
    assert Flat(windows, writable=False).elements.tolist() == [0, 1, 2, 1, 2, 3, 2, 3, 4]
    rows = np.arange(24.0).reshape(2, 3, 4)
    for view in (rows[:, ::-1, ::3], rows.transpose(2, 0, 1), rows[:, None, ::2], rows[:1].T, rows[:0].T):
        Flat(view, writable=True)


def test_arrays_that_cannot_be_written_are_refused() -> None:
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        Flat(read_only, writable=True)
    overlapping = np.lib.stride_tricks.as_strided(np.zeros(1), (4,), (0,))
    with pytest.raises(ValueError, match="overlaps itself"):
        Flat(overlapping, writable=True)
    assert Flat(overlapping, writable=False).elements.size == 4


@given(
    st.sampled_from(["bool", "int8", "uint64", "float16", "float64", "complex128", "bfloat16", "float8_e5m2", "int4"]),
    st.lists(st.integers(0, 2**40), max_size=6).map(tuple),
)
def test_descriptions_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    assert decode_meta(encode_meta(np.dtype(dtype), shape)) == (np.dtype(dtype), shape)


def test_types_of_ml_dtypes_are_imported_when_the_first_arrives() -> None:
    script = """
import sys
from asyncdist.arrays.host import decode_meta
assert decode_meta(bytes([7]) + b"float32")[0].name == "float32"
assert "ml_dtypes" not in sys.modules
assert decode_meta(bytes([13]) + b"float8_e4m3fn")[0].name == "float8_e4m3fn"
"""
    forked.run([sys.executable, "-c", script], 60).check_returncode()


def test_without_ml_dtypes_its_types_are_unknown() -> None:
    script = """
import sys
sys.modules["ml_dtypes"] = None  # importing it fails
from asyncdist.arrays.host import decode_meta
try:
    decode_meta(bytes([13]) + b"float8_e4m3fn")
except ValueError as error:
    assert "need ml_dtypes installed" in str(error)
else:
    raise AssertionError("accepted")
"""
    forked.run([sys.executable, "-c", script], 60).check_returncode()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4])
def test_types_of_ml_dtypes_are_viewed(dtype: type) -> None:
    x = np.zeros(3, dtype)
    assert host_array(x) is x
    assert Flat(x, writable=True).octets.nbytes == x.nbytes


@given(st.binary(max_size=80))
def test_hostile_descriptions_are_refused_or_understood(meta: bytes) -> None:
    try:
        dtype, shape = decode_meta(meta)
    except ValueError:
        return
    assert encode_meta(dtype, shape) == meta


@pytest.mark.parametrize("name", [b"object", b"O", b"M8[s]", b"V8", b"float32,int8", b"<f4", b"str"])
def test_descriptions_of_other_dtypes_are_refused(name: bytes) -> None:
    with pytest.raises(ValueError, match="dtype"):
        decode_meta(bytes([len(name)]) + name)


def test_sizes_read_well() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 8 << 20, 3 << 30)] == ["0 B", "1023 B", "1 KiB", "8 MiB", "3 GiB"]
