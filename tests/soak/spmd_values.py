"""Values of random SPMD programs: every rank can compute what any other contributes, and what must come of it."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from asyncdist import ReduceOp
from asyncdist.arrays.reduce_op import ReduceOpLike

Array: TypeAlias = np.ndarray[Any, Any]

DTYPES = ("int64", "float32", "uint8", "float64", "int16", "float16", "complex64", "bool", "bfloat16")

OPS: dict[str, ReduceOpLike] = {
    "sum": ReduceOp.SUM,
    "product": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
    "bxor": ReduceOp.BXOR,
    "avg": ReduceOp.AVG,
    "premul": ReduceOp.PREMUL_SUM(2),
    "largest": ReduceOp.custom(np.maximum, name="largest"),
    "last": ReduceOp.custom(lambda left, right: left * 0 + right, commutative=False, name="last"),
}
"""By the names that programs have for them; `last` is not commutative."""

_FUNCTIONS: dict[str, Any] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "largest": np.maximum,
}


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of that name, numpy's or bfloat16."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def ops_of(dtype: str) -> list[str]:
    """The operations that a dtype has and whose results are exact: of small whole numbers, in any order."""
    if dtype == "complex64":
        return ["sum", "premul"]
    if dtype == "bfloat16":
        return ["sum", "min", "max"]
    names = ["sum", "sum", "min", "max"]
    kind = np.dtype(dtype).kind
    if kind in "iub":
        names += ["band", "bor", "bxor"]
    if kind in "iu":
        names += ["product", "avg", "largest", "last"]
    if kind == "f":
        names += ["premul", "largest", "last"] + ["avg"] * (dtype != "float16")
    return names


def values(dtype: np.dtype[Any], count: int, *where: int) -> Array:
    """Whole numbers from 0 to 16 that depend on where they are used: what comes from elsewhere shows."""
    start = sum((index + 1) * number * 7 for index, number in enumerate(where))
    indices = np.arange(count, dtype=np.int64)
    whole = (indices * 3 + start + indices // 4093) % 17
    return (whole % 2 if dtype.kind == "b" else whole).astype(dtype)


def reduced(op: str, parts: Sequence[Array]) -> Array:
    """What the reduction of `parts` gives, in their dtype."""
    dtype = parts[0].dtype
    if op == "last":
        return parts[-1].copy()
    if op == "premul":
        return functools.reduce(np.add, [part * dtype.type(2) for part in parts])
    if op == "avg":
        total = functools.reduce(np.add, parts)
        mean = total / dtype.type(len(parts)) if dtype.kind == "f" else total // len(parts)
        return np.asarray(mean, dtype)
    result: Array = functools.reduce(_FUNCTIONS[op], parts)
    return result


def an_object(dice: random.Random) -> Any:
    """Something to be sent as an object."""
    number = dice.randrange(1000)
    kinds: list[Any] = [
        {"rank": number, "list": [1, 2.5, None, (True, b"abc" * number)], "set": {1, number}},
        values(np.dtype("float32"), dice.choice((0, 5, 3000, 200_000)), number),
        "text" * dice.choice((0, 1, 30_000)) + str(number),
        [values(np.dtype("int16"), dice.choice((1, 700, 40_000)), number, index) for index in range(3)],
        1 << (70 + number),
        None,
    ]
    return dice.choice(kinds)


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal, arrays in dtype and shape as well."""
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and bool((one == other).all())
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)
