"""Tuning: what the choice of algorithms depends on besides the problem, the same on all ranks of a group.

Rank 0's values are published at rendezvous and checked by every rank that reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final

from asyncdist.plan.cost.constants import ASYNCIO, SHARED_MEMORY, Constants, Link, SharedMemory

MAX_MESSAGE_S: Final = 10.0
"""Longest message believed: to Mars takes longer, to the other end of the world a tenth of a second."""

MAX_PER_BYTE_S: Final = 1e-3
"""Slowest link believed: a kilobyte a second."""

MAX_CORES: Final = 1 << 16
"""Most cores of a host believed."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Costs, hosts and overrides. Hashable; its hash is worked out once, since every planned collective asks for it."""

    constants: Constants = ASYNCIO
    ranks_per_host: int = 1
    """Ranks 0 .. k-1, k .. 2k-1, ... share a host each."""
    overrides: tuple[tuple[str, str], ...] = ()
    """Algorithm by collective, as ASYNCDIST_ALGO gives them; sorted."""
    hosts: tuple[int, ...] = ()
    """As of `Problem`. Not published with the rest: ranks learn it when all are there."""
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.constants, self.ranks_per_host, self.overrides, self.hosts)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def crowded(self) -> bool:
        """Whether ranks of a host share cores."""
        return 0 < self.constants.cores < max(Counter(self.hosts).values(), default=self.ranks_per_host)

    def override(self, collective: str) -> str | None:
        """Return the algorithm named for `collective`, if any."""
        return next((algorithm for name, algorithm in self.overrides if name == collective), None)

    def of_group(self, ranks: Sequence[int]) -> Tuning:
        """Return the tuning of a group of these global ranks, in its order."""
        return self.placed([self.hosts[rank] if self.hosts else rank // self.ranks_per_host for rank in ranks])

    def placed(self, hosts: Sequence[Hashable]) -> Tuning:
        """Return the tuning of a group whose rank r is on the host `hosts[r]`, whatever names hosts."""
        numbers: dict[Hashable, int] = {}
        order = tuple([numbers.setdefault(host, len(numbers)) for host in hosts])
        run = order.count(0)
        regular = order == tuple([rank // run for rank in range(len(order))]) and len(order) % run == 0
        ranks_per_host, order = (run, ()) if regular else (1, order)
        if (ranks_per_host, order) == (self.ranks_per_host, self.hosts):
            return self
        return replace(self, ranks_per_host=ranks_per_host, hosts=order)

    def to_terms(self) -> dict[str, Any]:
        """Return what `from_terms` understands, as plain values."""
        return {
            "constants": constants_to_terms(self.constants),
            "ranks_per_host": self.ranks_per_host,
            "overrides": dict(self.overrides),
        }

    @classmethod
    def from_terms(cls, terms: object) -> Tuning:
        """Rebuild a tuning. Raises ValueError for anything that is not one, or is not to be believed."""
        if not isinstance(terms, Mapping) or set(terms) != {"constants", "ranks_per_host", "overrides"}:
            raise ValueError(f"not a tuning: {_shown(terms)}")
        ranks_per_host, overrides = terms["ranks_per_host"], terms["overrides"]
        if type(ranks_per_host) is not int or ranks_per_host < 1:
            raise ValueError(f"a tuning's ranks_per_host is a positive integer, not {_shown(ranks_per_host)}")
        if not isinstance(overrides, Mapping) or not all(
            isinstance(word, str) for pair in overrides.items() for word in pair
        ):
            raise ValueError(f"a tuning's overrides are algorithms by collective, not {_shown(overrides)}")
        constants = constants_from_terms(terms["constants"])
        return cls(constants, ranks_per_host, tuple(sorted(overrides.items())))


def constants_to_terms(constants: Constants) -> dict[str, Any]:
    """Return what `constants_from_terms` understands, as plain values."""
    return asdict(constants)


def constants_from_terms(terms: object) -> Constants:
    """Rebuild constants. Raises ValueError for anything that is not finite, positive and credible."""
    names = {one.name for one in fields(Constants)}
    if not isinstance(terms, Mapping) or not set(terms) <= names:
        raise ValueError(f"not constants of the cost model: {_shown(terms)}")
    values = dict(terms)
    between, shared = values.pop("between", None), values.pop("shared", None)
    cores = values.pop("cores", 0)
    if type(cores) is not int or not 0 <= cores <= MAX_CORES:
        raise ValueError(f"cores must be an integer from 0 to {MAX_CORES}, not {_shown(cores)}")
    checked = _checked(values, {"alpha_s", "beta_s", "gamma_s", "overhead_s"})
    return Constants(
        **checked, cores=cores, between=_link_from_terms(between), shared=_shared_memory_from_terms(shared)
    )


def _link_from_terms(terms: object) -> Link | None:
    if terms is None:
        return None
    names = {one.name for one in fields(Link)}
    if not isinstance(terms, Mapping) or not set(terms) <= names:
        raise ValueError(f"not a link of the cost model: {_shown(terms)}")
    return Link(**_checked(dict(terms), names))


def _shared_memory_from_terms(terms: object) -> SharedMemory:
    if terms is None:  # as in files of older releases
        return SHARED_MEMORY
    names = {one.name for one in fields(SharedMemory)}
    if not isinstance(terms, Mapping) or not set(terms) <= names:
        raise ValueError(f"not costs of shared memory: {_shown(terms)}")
    return SharedMemory(**_checked(dict(terms), names))


def _checked(values: dict[str, Any], needed: set[str]) -> dict[str, float]:
    """Costs as floats; the model divides by none, but a message or a byte that costs nothing makes no sense."""
    missing = sorted(needed - set(values))
    if missing:
        raise ValueError(f"constants of the cost model lack {', '.join(missing)}")
    checked = {}
    for name, value in values.items():
        limit = MAX_MESSAGE_S if name in _PER_MESSAGE else MAX_PER_BYTE_S
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (0 < value <= limit or (value == 0 and name in _FREE)):
            raise ValueError(f"{name} must be positive and at most {limit:g} s, not {_shown(value)}")
        checked[name] = float(value)
    return checked


_FREE: Final = ("copy_s", "overhead_s", "turn_s", "begin_s")
"""What may cost nothing."""

_PER_MESSAGE: Final = ("alpha_s", "overhead_s", "turn_s", "wake_s", "step_s", "operand_s", "begin_s")


def _shown(value: object) -> str:
    return repr(value)[:200]


DEFAULT_TUNING: Final = Tuning()
"""Built-in constants, a core for every rank, one rank per host, no overrides."""
