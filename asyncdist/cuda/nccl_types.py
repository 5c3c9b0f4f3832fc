"""NCCL's data types and operations, and which numpy dtypes and ReduceOps become which.

| dtype | reduced as | SUM | PRODUCT | MIN, MAX | AVG | PREMUL_SUM |
| --- | --- | --- | --- | --- | --- | --- |
| bool | uint8 | or (max) | and (min) | and, or | - | - |
| int8, int32, int64, uint8, uint32, uint64 | itself | wraps | wraps | yes | truncates | - |
| float16, bfloat16, float32, float64 | itself | yes | yes | a number wins over NaN | yes | yes |
| float8_e4m3fn, float8_e5m2 (NCCL 2.24, compute capability 9.0) | itself | yes | yes | as above | yes | yes |
| complex64, complex128 | pairs of reals | yes | - | - | yes | real factor |

NCCL has no 16-bit integers. Data that is only moved travels as bytes, whatever it is.
"""

from __future__ import annotations

import enum
from functools import lru_cache
from typing import Any, Final

import numpy as np

from asyncdist.arrays.reduce_op import PremulSum, ReduceOp

__all__ = ["FLOAT8_CAPABILITY", "FLOAT8_VERSION", "NcclOp", "NcclType", "reduction", "refusal"]

FLOAT8_VERSION: Final = 22400
"""The first NCCL with float8."""

FLOAT8_CAPABILITY: Final = 9
"""Major compute capability of the first GPUs on which it reduces float8; on others it moves such arrays only."""


class NcclType(enum.IntEnum):
    """ncclDataType_t."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT8_E4M3 = 10
    FLOAT8_E5M2 = 11


class NcclOp(enum.IntEnum):
    """ncclRedOp_t."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


_TYPES: Final = {
    "int8": NcclType.INT8,
    "uint8": NcclType.UINT8,
    "int32": NcclType.INT32,
    "uint32": NcclType.UINT32,
    "int64": NcclType.INT64,
    "uint64": NcclType.UINT64,
    "float16": NcclType.FLOAT16,
    "float32": NcclType.FLOAT32,
    "float64": NcclType.FLOAT64,
    "bfloat16": NcclType.BFLOAT16,
    "float8_e4m3fn": NcclType.FLOAT8_E4M3,
    "float8_e5m2": NcclType.FLOAT8_E5M2,
}
_REALS: Final = {"complex64": NcclType.FLOAT32, "complex128": NcclType.FLOAT64}
_OPS: Final = {
    ReduceOp.SUM: NcclOp.SUM,
    ReduceOp.PRODUCT: NcclOp.PROD,
    ReduceOp.MIN: NcclOp.MIN,
    ReduceOp.MAX: NcclOp.MAX,
    ReduceOp.AVG: NcclOp.AVG,
}
_BOOL_OPS: Final = {
    ReduceOp.SUM: NcclOp.MAX,
    ReduceOp.PRODUCT: NcclOp.MIN,
    ReduceOp.MIN: NcclOp.MIN,
    ReduceOp.MAX: NcclOp.MAX,
}


@lru_cache(maxsize=256)  # every operation times every dtype
def refusal(dtype: np.dtype[Any], op: ReduceOp | PremulSum, version: int, capability: int = FLOAT8_CAPABILITY) -> str:
    """As `Nccl.refusal`, for NCCL `version` and a GPU of that major compute capability."""
    if isinstance(op, PremulSum):
        if dtype.kind in "biu":
            return f"{op} is not defined for arrays of dtype {dtype}"
        if isinstance(op.factor, complex):
            return f"NCCL cannot multiply by the complex factor of {op}"
        op = ReduceOp.SUM
    if op not in _OPS:
        return f"NCCL has no {op!r}"
    if dtype == np.bool_:
        return "" if op in _BOOL_OPS else f"{op} is not defined for bool arrays"
    if dtype.name in _REALS:
        return "" if op in (ReduceOp.SUM, ReduceOp.AVG) else f"NCCL cannot reduce complex arrays with {op}"
    kind = _TYPES.get(dtype.name)
    if kind is None:
        return f"NCCL cannot reduce arrays of dtype {dtype}"
    if kind >= NcclType.FLOAT8_E4M3 and version < FLOAT8_VERSION:
        return f"NCCL {version} cannot reduce arrays of dtype {dtype} (2.24 can)"
    if kind >= NcclType.FLOAT8_E4M3 and capability < FLOAT8_CAPABILITY:
        return (
            f"NCCL cannot reduce arrays of dtype {dtype} on this GPU, whose compute capability is below "
            f"{FLOAT8_CAPABILITY}.0"
        )
    return ""


@lru_cache(maxsize=256)
def reduction(dtype: np.dtype[Any], op: ReduceOp) -> tuple[NcclType, NcclOp, int]:
    """NCCL's type, its operation, and how many of its elements make one of `dtype`, where `refusal` is empty."""
    if dtype == np.bool_:
        return NcclType.UINT8, _BOOL_OPS[op], 1
    if dtype.name in _REALS:
        return _REALS[dtype.name], _OPS[op], 2
    return _TYPES[dtype.name], _OPS[op], 1
