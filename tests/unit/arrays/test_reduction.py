"""Every operation on every dtype against plain Python and numpy, and every pair that must be refused."""

from __future__ import annotations

import itertools
import operator
import warnings
from functools import reduce as fold

import numpy as np
import pytest

from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.arrays.reduction import finish, kernel, prepare, validate

INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
FLOATS = ["float16", "float32", "float64", "longdouble"]
COMPLEX = ["complex64", "complex128"]
EXTENSION_FLOATS = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]
PLAIN = [op for op in ReduceOp if op is not ReduceOp.PREMUL_SUM]
BITWISE = {ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR}
ORDER = {ReduceOp.MIN, ReduceOp.MAX}

PYTHON = {
    ReduceOp.SUM: operator.add,
    ReduceOp.AVG: operator.add,
    ReduceOp.PRODUCT: operator.mul,
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
}


def wrapped(value, dtype):
    bits = dtype.itemsize * 8
    value &= (1 << bits) - 1
    return value - (1 << bits) if dtype.kind == "i" and value >> (bits - 1) else value


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("op", PLAIN)
def test_integers_are_exact_and_wrap_silently(op, name):
    dtype = np.dtype(name)
    info = np.iinfo(dtype)
    values = [info.min, info.min + 1, info.max // 3, 0, 1, 7, info.max - 1, info.max]
    left, right = map(list, zip(*itertools.product(values, repeat=2), strict=True))
    got = np.array(left, dtype)
    kernel(op, dtype)(got, np.array(right, dtype), got)
    assert got.tolist() == [wrapped(PYTHON[op](a, b), dtype) for a, b in zip(left, right, strict=True)]


@pytest.mark.parametrize("op", [op for op in PLAIN if op is not ReduceOp.AVG])
def test_bool_is_logical(op):
    left, right = map(list, zip(*itertools.product([False, True], repeat=2), strict=True))
    out = np.zeros(4, bool)
    kernel(op, np.dtype(bool))(np.array(left), np.array(right), out)
    logical = {ReduceOp.SUM: operator.or_, ReduceOp.PRODUCT: operator.and_}.get(op, PYTHON[op])
    assert out.tolist() == [logical(a, b) for a, b in zip(left, right, strict=True)]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("op", [op for op in PLAIN if op not in BITWISE])
def test_floats_are_numpys(op, name):
    dtype = np.dtype(name)
    numbers = [0.0, -0.0, 1.5, -2.25, 3.0, float(np.finfo(dtype if name != "longdouble" else "f8").max), np.inf, np.nan]
    left, right = (np.array(side, dtype) for side in zip(*itertools.product(numbers, repeat=2), strict=True))
    ufunc = {ReduceOp.PRODUCT: np.multiply, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}.get(op, np.add)
    with np.errstate(all="ignore"):
        expected = ufunc(left, right)
    out = np.empty_like(left)
    kernel(op, dtype)(left, right, out)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("name", COMPLEX)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT])
def test_complex(op, name):
    left, right = np.array([1 + 2j, -3j], name), np.array([2 - 1j, 4], name)
    out = np.empty_like(left)
    kernel(op, out.dtype)(left, right, out)
    expected = [PYTHON[op](a, b) for a, b in zip(left.tolist(), right.tolist(), strict=True)]
    assert out.tolist() == expected


def test_overflow_and_invalid_say_nothing():
    with warnings.catch_warnings(), np.errstate(all="warn"):
        warnings.simplefilter("error")
        big, inf = np.array([60000, 1], np.float16), np.array([np.inf, 0], np.float32)
        kernel(ReduceOp.SUM, big.dtype)(big, big, big)
        kernel(ReduceOp.SUM, inf.dtype)(inf, -inf, inf)
        prepare(ReduceOp.PREMUL_SUM(1e30), half := np.ones(2, np.float16))
        finish(ReduceOp.AVG, inf, 3)
    assert np.isinf(big[0])
    assert np.isnan(inf[0])
    assert np.isinf(half).all()


def test_operands_keep_their_sides():
    """NaN payloads and signed zeros aside, numpy's ufuncs are symmetric; what must hold is left, right, out."""
    left, right, out = np.array([5]), np.array([3]), np.array([0])
    kernel(ReduceOp.SUM, left.dtype)(left, right, out)
    assert (left[0], right[0], out[0]) == (5, 3, 8)


@pytest.mark.parametrize("name", ["bool", *INTEGERS, *FLOATS, *COMPLEX])
@pytest.mark.parametrize("op", [*PLAIN, ReduceOp.PREMUL_SUM(2)])
def test_validate_knows_every_pair(op, name):
    dtype = np.dtype(name)
    premultiplied = op not in PLAIN
    allowed = {
        "b": not premultiplied and op is not ReduceOp.AVG,
        "i": not premultiplied,
        "u": not premultiplied,
        "f": op not in BITWISE,
        "c": op not in BITWISE | ORDER,
    }[dtype.kind]
    if allowed:
        validate(op, dtype)
        empty = np.empty(0, dtype)
        prepare(op, empty)
        kernel(op, dtype)(empty, empty, empty)
        finish(op, empty, 3)
    else:
        with pytest.raises(TypeError, match="is not defined for"):
            validate(op, dtype)
        with pytest.raises(TypeError):
            kernel(op, dtype)


@pytest.mark.parametrize("dtype", ["O", "U3", "S3", "V8", "M8[s]", "m8[s]", [("x", "f4")]])
@pytest.mark.parametrize("op", PLAIN)
def test_what_is_no_number_is_refused(op, dtype):
    with pytest.raises(TypeError, match="cannot be reduced"):
        validate(op, np.dtype(dtype))


@pytest.mark.parametrize("name", ["int16", "float32", "complex64"])
def test_foreign_byte_order_is_refused(name):
    with pytest.raises(TypeError, match="foreign byte order"):
        validate(ReduceOp.SUM, np.dtype(name).newbyteorder())


def test_premul_sum_needs_a_fitting_factor():
    with pytest.raises(TypeError, match="needs its factor"):
        validate(ReduceOp.PREMUL_SUM, np.dtype("f4"))
    with pytest.raises(TypeError, match="is complex"):
        validate(ReduceOp.PREMUL_SUM(1j), np.dtype("f4"))
    validate(ReduceOp.PREMUL_SUM(1), np.dtype("f4"))
    with pytest.raises(TypeError, match="is complex"):
        validate(ReduceOp.PREMUL_SUM(1 + 0j), np.dtype("f4"))  # equal to one that fits
    for factor in (True, "2", None):
        with pytest.raises(TypeError, match="must be a number"):
            validate(ReduceOp.PREMUL_SUM(factor), np.dtype("f4"))
    with pytest.raises(TypeError, match="expected a ReduceOp"):
        validate("sum", np.dtype("f4"))
    validate(ReduceOp.PREMUL_SUM(np.float32(2)), np.dtype("f4"))
    validate(ReduceOp.PREMUL_SUM(1j), np.dtype("c8"))


@pytest.mark.parametrize("name", [*FLOATS, *COMPLEX])
def test_prepare_multiplies_in_place(name):
    array = np.array([1, 2, -3], name)
    prepare(ReduceOp.PREMUL_SUM(0.5), array)
    assert array.tolist() == [0.5, 1, -1.5]
    assert array.dtype == name
    prepare(ReduceOp.SUM, array)
    assert array.tolist() == [0.5, 1, -1.5]


def truncated(value, divisor):
    return abs(value) // divisor * (1 if value >= 0 else -1)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("world", [1, 2, 3, 7, 127, 128, 129, 255, 256, 257, 40000])
def test_average_of_integers_truncates_exactly(name, world):
    info = np.iinfo(name)
    sums = sorted({info.min, info.min + 1, -world, -world - 1, -1, 0, 1, world - 1, world, info.max - 1, info.max})
    array = np.array([value for value in sums if info.min <= value <= info.max], name)
    expected = [truncated(value, world) for value in array.tolist()]
    finish(ReduceOp.AVG, array, world)
    assert array.tolist() == expected


@pytest.mark.parametrize("name", [*FLOATS, *COMPLEX])
@pytest.mark.parametrize("world", [1, 3, 4096, 4097])
def test_average_of_floats_divides(name, world):
    array = np.array([0, 1, 2049 if name != "float16" else 2048, -world if world <= 2048 else -4096], name)
    expected = (array.astype("c16" if array.dtype.kind == "c" else "longdouble") / world).astype(name)
    finish(ReduceOp.AVG, array, world)
    np.testing.assert_array_equal(array, expected)
    finish(ReduceOp.SUM, array, world)
    np.testing.assert_array_equal(array, expected)


def test_average_is_sum_then_division():
    arrays = [np.array([3, -5], np.int32), np.array([4, -6], np.int32)]
    total = fold(lambda a, b: kernel(ReduceOp.AVG, a.dtype)(a, b, np.empty_like(a)), arrays)
    finish(ReduceOp.AVG, total, 2)
    assert total.tolist() == [3, -5]


@pytest.mark.parametrize("name", EXTENSION_FLOATS)
def test_extension_floats(name):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs ml_dtypes, which is optional")
    dtype = np.dtype(getattr(ml_dtypes, name))
    for op in [*PLAIN, ReduceOp.PREMUL_SUM(2.0)]:
        if op in BITWISE:
            with pytest.raises(TypeError, match="is not defined for floating-point"):
                validate(op, dtype)
            continue
        left, right = np.array([1, 2, -4], dtype), np.array([0.5, 4, -2], dtype)
        prepare(op, left)
        kernel(op, dtype)(left, right, left)
        finish(op, left, 2)
        expected = {
            ReduceOp.SUM: [1.5, 6, -6],
            ReduceOp.AVG: [0.75, 3, -3],
            ReduceOp.PRODUCT: [0.5, 8, 8],
            ReduceOp.MIN: [0.5, 2, -4],
            ReduceOp.MAX: [1, 4, -2],
        }.get(op, [2.5, 8, -10])
        assert left.astype(np.float32).tolist() == expected
    with pytest.raises(TypeError, match="cannot be reduced"):
        validate(ReduceOp.SUM, np.dtype(ml_dtypes.int4))
    with pytest.raises(TypeError, match="cannot be reduced"):
        validate(ReduceOp.SUM, np.dtype(ml_dtypes.float8_e8m0fnu))


def test_average_of_narrow_floats_divides_by_the_true_number_of_ranks():
    """257 is no bfloat16; 4097 no float16."""
    half = np.array([4097 * 4], np.float16)
    finish(ReduceOp.AVG, half, 4097)
    assert half[0] == np.float16(np.float32(np.float16(4097 * 4)) / np.float32(4097))
