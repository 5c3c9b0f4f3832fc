"""Which reductions NCCL has, and what they are called there."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from asyncdist.arrays.reduce_op import PremulSum, ReduceOp, ReduceOpLike
from asyncdist.cuda.interface import FLOAT8_CAPABILITY, FLOAT8_VERSION, NcclOp, NcclType, reduction, refusal

NEW = 23004
NUMBERS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG)


@pytest.mark.parametrize(
    "name", ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]
)
@pytest.mark.parametrize("op", NUMBERS)
def test_numbers_are_themselves(name: str, op: ReduceOp) -> None:
    dtype = np.dtype(name)
    assert not refusal(dtype, op, NEW)
    kind, operation, factor = reduction(dtype, op)
    assert (kind.name.lower(), factor) == (name, 1)
    assert operation.name == {"PRODUCT": "PROD"}.get(op.name, op.name)


def test_bool_is_a_byte() -> None:
    expected = {ReduceOp.SUM: NcclOp.MAX, ReduceOp.PRODUCT: NcclOp.MIN, ReduceOp.MIN: NcclOp.MIN}
    for op, operation in expected.items():
        assert reduction(np.dtype(np.bool_), op) == (NcclType.UINT8, operation, 1)
    assert "bool" in refusal(np.dtype(np.bool_), ReduceOp.AVG, NEW)


def test_complex_is_two_reals() -> None:
    assert reduction(np.dtype(np.complex64), ReduceOp.SUM) == (NcclType.FLOAT32, NcclOp.SUM, 2)
    assert reduction(np.dtype(np.complex128), ReduceOp.AVG) == (NcclType.FLOAT64, NcclOp.AVG, 2)


def test_float8_needs_a_new_library() -> None:
    dtype = np.dtype(ml_dtypes.float8_e4m3fn)
    assert not refusal(dtype, ReduceOp.SUM, FLOAT8_VERSION)
    assert "2.24" in refusal(dtype, ReduceOp.SUM, FLOAT8_VERSION - 1)
    assert not refusal(np.dtype(ml_dtypes.bfloat16), ReduceOp.SUM, FLOAT8_VERSION - 1)


def test_float8_needs_a_new_gpu() -> None:
    for dtype in map(np.dtype, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)):
        for op in (*NUMBERS, PremulSum(2.0)):
            assert not refusal(dtype, op, NEW, FLOAT8_CAPABILITY)
            assert "compute capability is below 9.0" in refusal(dtype, op, NEW, FLOAT8_CAPABILITY - 1)
    assert not refusal(np.dtype(ml_dtypes.bfloat16), ReduceOp.SUM, NEW, FLOAT8_CAPABILITY - 1)


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("int16", ReduceOp.SUM),
        ("uint16", ReduceOp.MAX),
        ("complex64", ReduceOp.PRODUCT),
        ("int32", ReduceOp.BAND),
        ("float32", ReduceOp.BXOR),
        ("float32", ReduceOp.custom(np.hypot)),
        ("int32", PremulSum(2.0)),
        ("bool", PremulSum(2.0)),
        ("complex64", PremulSum(1j)),
    ],
)
def test_refusals_say_what_is_refused(name: str, op: ReduceOpLike) -> None:
    assert refusal(np.dtype(name), op, NEW)  # type: ignore[arg-type]


def test_real_factors_are_fine() -> None:
    assert not refusal(np.dtype(np.complex64), PremulSum(0.5), NEW)
    assert not refusal(np.dtype(np.float16), PremulSum(0.5), NEW)
