"""ReduceOp x dtype: which pairs exist, and the numpy function that reduces two arrays.

| dtypes | SUM | PRODUCT | MIN, MAX | BAND, BOR, BXOR | AVG | PREMUL_SUM |
| --- | --- | --- | --- | --- | --- | --- |
| bool | OR | AND | AND, OR | yes | - | - |
| integers, 8 to 64 bits, signed and unsigned | wraps | wraps | yes | yes | truncates toward zero | - |
| floating point; bfloat16 and float8 of ml_dtypes | yes | yes | NaN wins | - | yes | real factor |
| complex | yes | yes | - | - | yes | any factor |

`ReduceOp.custom` takes any dtype that can be sent. AVG and PREMUL_SUM are SUM with work after or before: `finish` and
`prepare`. Overflow is silent, as on every other backend: integers wrap, floating point becomes infinite.
"""

from __future__ import annotations

import contextvars
import numbers
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Final, TypeAlias

import numpy as np

from asyncdist.arrays.host import Array
from asyncdist.arrays.reduce_op import CustomOp, PremulSum, ReduceOp, ReduceOpLike
from asyncdist.errors import DistError

Kernel: TypeAlias = Callable[[Array, Array, Array], object]
"""kernel(left, right, out): out = left op right, elementwise; `out` may be either operand."""

EXTENSION_FLOATS: Final = ("bfloat16", "float8_")
"""Names, or how they begin, of ml_dtypes' types that are numbers; its 4- and 6-bit types are storage formats."""

NOT_A_NUMBER_TYPE: Final = "float8_e8m0fnu"
"""Powers of two without zero or sign: a scale, which sums of scales are not."""

NARROW_FLOAT_BYTES: Final = 2
"""Floats up to this size cannot hold every world size or factor, so they are divided and scaled in float32."""

_BITWISE: Final = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})

_KIND_NAMES: Final = {"b": "bool", "i": "integer", "u": "integer", "f": "floating-point", "c": "complex"}

_REFUSED: Final = {
    "b": frozenset({ReduceOp.AVG, ReduceOp.PREMUL_SUM}),
    "i": frozenset({ReduceOp.PREMUL_SUM}),
    "u": frozenset({ReduceOp.PREMUL_SUM}),
    "f": _BITWISE,
    "c": _BITWISE | {ReduceOp.MIN, ReduceOp.MAX},
}


@lru_cache(maxsize=256)  # every operation times every dtype; refusals are not kept
def validate(op: ReduceOpLike, dtype: np.dtype[Any]) -> None:
    """Raise TypeError unless arrays of `dtype` can be reduced with `op`."""
    if isinstance(op, CustomOp):
        return
    if not isinstance(op, ReduceOp | PremulSum):
        raise TypeError(f"expected a ReduceOp, got {op!r}")
    if op is ReduceOp.PREMUL_SUM:
        raise TypeError("ReduceOp.PREMUL_SUM needs its factor: ReduceOp.PREMUL_SUM(factor)")
    kind = _kind(dtype)
    if (ReduceOp.PREMUL_SUM if isinstance(op, PremulSum) else op) in _REFUSED[kind]:
        raise TypeError(f"{op} is not defined for {_KIND_NAMES[kind]} arrays (dtype {dtype})")
    if isinstance(op, PremulSum):
        _validate_factor(op.factor, dtype, kind)


def kernel(op: ReduceOpLike, dtype: np.dtype[Any]) -> Kernel:
    """Return a function that reduces two arrays of `dtype`, for use in one thread. Raises TypeError as `validate`."""
    validate(op, dtype)
    if isinstance(op, CustomOp):
        return _custom_kernel(op)
    return _kernel(ReduceOp.SUM if isinstance(op, PremulSum) else op, _kind(dtype))


def prepare(op: ReduceOpLike, array: Array) -> None:
    """Multiply this rank's contribution by PREMUL_SUM's factor, in place; nothing to do for other operations."""
    if isinstance(op, PremulSum):
        with np.errstate(all="ignore"):
            np.multiply(array, _wide(op.factor, array.dtype), out=array, casting="unsafe")


def finish(op: ReduceOpLike, array: Array, world: int) -> None:
    """Divide the sum of `world` ranks by their number for AVG, in place; nothing to do for other operations."""
    if op is not ReduceOp.AVG:
        return
    if array.dtype.kind not in "iu":
        with np.errstate(all="ignore"):
            np.divide(array, _wide(world, array.dtype), out=array, casting="unsafe")
    elif world <= np.iinfo(array.dtype).max:
        # fmod has the sign of the dividend: what is left is a multiple, whose quotient is exact in any rounding.
        array -= np.fmod(array, array.dtype.type(world))
        array //= array.dtype.type(world)
    else:  # int8 or int16 and more ranks than they can count
        wide = array.astype(np.int64)
        finish(op, wide, world)
        array[...] = wide


def _kind(dtype: np.dtype[Any]) -> str:
    """b, i, u, f or c; TypeError for what is not a number in this machine's byte order."""
    extension = dtype.type.__module__ == "ml_dtypes"
    if extension and dtype.name.startswith(EXTENSION_FLOATS) and dtype.name != NOT_A_NUMBER_TYPE:
        return "f"
    if extension or dtype.kind not in _KIND_NAMES:
        raise TypeError(f"arrays of dtype {dtype} cannot be reduced: use bool, integers, floating point or complex")
    if not dtype.isnative:
        raise TypeError(f"arrays of dtype {dtype} are in foreign byte order; convert them with astype({dtype.name!r})")
    return dtype.kind


def _validate_factor(factor: object, dtype: np.dtype[Any], kind: str) -> None:
    if isinstance(factor, bool) or not isinstance(factor, numbers.Complex):
        raise TypeError(f"the factor of ReduceOp.PREMUL_SUM must be a number, got {factor!r}")
    if kind != "c" and not isinstance(factor, numbers.Real):
        raise TypeError(f"the factor {factor!r} of ReduceOp.PREMUL_SUM is complex, arrays of dtype {dtype} are not")


def _kernel(op: ReduceOp, kind: str) -> Kernel:
    ufunc: Callable[..., object] = _UFUNCS[op]
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        ufunc = _out_by_name(ufunc)  # numpy's minimum and maximum take `out` by name only
    if kind in "biu":
        return ufunc  # raises no floating-point flags, so nothing need be silenced; bool: add is OR, multiply is AND
    # numpy's error state is a context variable: a context in which it is set silences the kernel for a tenth of what
    # entering np.errstate costs. A context can be entered once at a time, so every kernel has its own.
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return partial(context.run, ufunc)


def _custom_kernel(op: CustomOp) -> Kernel:
    """Call the user's function on views it cannot write: one of the operands is also where the result goes."""
    function = op.function

    def custom(left: Array, right: Array, out: Array) -> None:
        left, right = left.view(), right.view()
        left.flags.writeable = right.flags.writeable = False
        try:
            result = np.asarray(function(left, right))
            if result.shape != out.shape:
                raise ValueError(f"it returned shape {result.shape} for operands of shape {out.shape}")
            np.copyto(out, result, casting="same_kind")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C comes there
            raise DistError(f"{op!r} raised {type(error).__name__}: {error}") from error

    return custom


def _out_by_name(ufunc: Callable[..., object]) -> Kernel:
    def named(left: Array, right: Array, out: Array) -> object:
        return ufunc(left, right, out=out)

    return named


_UFUNCS: Final[dict[ReduceOp, np.ufunc]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


def _wide(number: Any, dtype: np.dtype[Any]) -> Any:
    """A number to divide or multiply an array of `dtype` by without rounding the number first."""
    if dtype.kind != "c" and dtype.itemsize <= NARROW_FLOAT_BYTES:
        return np.float32(number)
    return number
