"""ReduceOp: how several ranks' elements become one.

Names and numbers are torch.distributed's. `ReduceOp.PREMUL_SUM(factor)` makes the only operation that carries a value.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["PremulSum", "ReduceOp", "ReduceOpLike"]


@dataclass(frozen=True, slots=True)
class PremulSum:
    """Each rank's elements are multiplied by `factor` before they are summed."""

    factor: float | complex

    def __repr__(self) -> str:
        return f"ReduceOp.PREMUL_SUM({self.factor!r})"


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
        """Return the operation with its factor; only PREMUL_SUM has one."""
        if self is not ReduceOp.PREMUL_SUM:
            raise TypeError(f"{self} takes no factor; only ReduceOp.PREMUL_SUM does")
        return PremulSum(factor)

    def __repr__(self) -> str:
        return f"ReduceOp.{self.name}"

    __str__ = __repr__


ReduceOpLike: TypeAlias = ReduceOp | PremulSum
