"""ReduceOp: how several ranks' elements become one.

Names and numbers are torch.distributed's. `ReduceOp.PREMUL_SUM(factor)` makes the only one of them that carries a
value; `ReduceOp.custom(function)` makes an operation of a function. `asyncdist.reduce_op.SUM`, as torch's tutorials
write it, is `ReduceOp.SUM`; so are PRODUCT, MIN and MAX.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Complex
from typing import Any, Final, TypeAlias


@dataclass(frozen=True, slots=True)
class PremulSum:
    """Each rank's elements are multiplied by `factor` before they are summed."""

    factor: float | complex
    kind: type = field(init=False, repr=False)
    """The factor's type: 1, True and 1 + 0j are equal, but not all of them fit everywhere."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", type(self.factor))

    def __repr__(self) -> str:
        return f"ReduceOp.PREMUL_SUM({self.factor!r})"


@dataclass(frozen=True, slots=True)
class CustomOp:
    """An operation made by `ReduceOp.custom`."""

    function: Callable[[Any, Any], Any]
    commutative: bool
    name: str

    def __repr__(self) -> str:
        order = "" if self.commutative else ", commutative=False"
        return f"ReduceOp.custom({self.name}{order})"


class ReduceOp(enum.Enum):
    """Reduction operations; PREMUL_SUM is called with its factor, the others are used as they are.

    | op | dtypes |
    | --- | --- |
    | SUM, PRODUCT | every number and bool (OR, AND) |
    | AVG | every number; integers truncate toward zero, as NCCL's do |
    | MIN, MAX | every real number and bool; NaN wins, as in numpy |
    | BAND, BOR, BXOR | integers and bool |
    | PREMUL_SUM | floating point and complex |
    """

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8

    __hash__ = object.__hash__  # members are compared by identity; Enum's own hashes the name, in Python

    def __call__(self, factor: float | complex) -> PremulSum:
        """Return the operation with its factor, a number or an array of one; only PREMUL_SUM has one.

        Raises TypeError for anything else. What fits a dtype is known when there is an array: reals fit all.
        """
        if self is not ReduceOp.PREMUL_SUM:
            raise TypeError(f"{self} takes no factor; only ReduceOp.PREMUL_SUM does")
        number: object = factor
        if hasattr(factor, "item"):  # numpy's and torch's
            with contextlib.suppress(ValueError, RuntimeError):  # of several elements
                number = factor.item()
        if isinstance(number, bool) or not isinstance(number, Complex):
            raise TypeError(f"the factor of ReduceOp.PREMUL_SUM must be a number, got {factor!r}")
        return PremulSum(number)  # type: ignore[arg-type]  # which knows no numbers.Complex

    @staticmethod
    def custom(function: Callable[[Any, Any], Any], *, commutative: bool = True, name: str | None = None) -> CustomOp:
        """Return an operation that calls `function(left, right)`, e.g. `ReduceOp.custom(np.hypot)`.

        `function` gets two numpy arrays of one dimension, equal length and the operands' dtype, which it must not
        change (they are read-only), and returns an array of that length and of a dtype that casts to theirs within its
        kind. It must be associative, and work element by element: vectors are cut into pieces anywhere. It is called on
        the event loop with up to 1 MiB at a time. If it raises, the operation fails with DistError, its cause being
        the exception, and the group is aborted on every rank.

        Unless it is commutative, operands are reduced in rank order: `left` comes from lower ranks than `right`. That
        excludes the algorithms that are fastest for large arrays. Any dtype that can be sent will do.

        `name` (the function's by default) is what ranks compare; all must also say the same of `commutative`. Make the
        operation once and keep it: what is prepared for a call is kept by operation.

        Raises TypeError if `function` cannot be called or hashed, or `name` is no str, and ValueError for a name that
        UTF-8 cannot hold (a lone surrogate).
        """
        if not callable(function):
            raise TypeError(f"function must be callable, not {type(function).__name__}")
        hash(function)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a str, not {type(name).__name__}")
        name = name or str(getattr(function, "__name__", type(function).__name__))
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"name must be text that UTF-8 can hold, got {name!r}") from None
        return CustomOp(function, bool(commutative), name)

    def __repr__(self) -> str:
        return f"ReduceOp.{self.name}"

    __str__ = __repr__


ReduceOpLike: TypeAlias = ReduceOp | PremulSum | CustomOp

SUM: Final = ReduceOp.SUM
PRODUCT: Final = ReduceOp.PRODUCT
MIN: Final = ReduceOp.MIN
MAX: Final = ReduceOp.MAX
