"""What a backend is, what backends are called, and how one is registered."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from asyncdist.backend.call import Call
from asyncdist.executor.work import Work

if TYPE_CHECKING:
    from asyncdist.transport.base_mesh import BaseMesh

__all__ = ["Backend", "CollectiveWork", "GroupBackend", "parse_backend"]


class Backend(str):
    """A backend's name, compared without regard to case: `Backend("AIO") == "aio"`.

    `gloo` is accepted as an alias of `aio`, so that scripts written for torch.distributed run.
    """

    __slots__ = ()

    AIO: ClassVar[str] = "aio"
    GLOO: ClassVar[str] = "gloo"
    NCCL: ClassVar[str] = "nccl"
    MPI: ClassVar[str] = "mpi"
    UNDEFINED: ClassVar[str] = "undefined"

    _factories: ClassVar[dict[str, Callable[..., GroupBackend]]] = {}

    def __new__(cls, name: str) -> Backend:
        """Raises TypeError unless `name` is a str, ValueError for a name nobody registered."""
        if not isinstance(name, str):
            raise TypeError(f"a backend's name is a str, not {type(name).__name__}")
        lower = name.lower()
        known = {cls.AIO, cls.GLOO, *cls._factories}
        if lower not in known:
            raise ValueError(f"unknown or unavailable backend {name!r}: available are {', '.join(sorted(known))}")
        return super().__new__(cls, cls.AIO if lower == cls.GLOO else lower)

    @property
    def factory(self) -> Callable[..., GroupBackend] | None:
        """What makes this backend for a group; None for the built-in one."""
        return self._factories.get(self)

    @classmethod
    def register_backend(
        cls, name: str, factory: Callable[..., GroupBackend], devices: Sequence[str] = ("cpu",)
    ) -> None:
        """Make `name` available; `factory(mesh, group_id, ranks, rank)` is called once per group and returns it.

        Raises ValueError if the name is taken.
        """
        lower = name.lower()
        if lower in (cls.AIO, cls.GLOO, *cls._factories):
            raise ValueError(f"backend {name!r} is registered already")
        cls._factories[lower] = factory
        setattr(cls, lower.upper(), lower)


def parse_backend(backend: str | None) -> dict[str, Backend]:
    """Return the backend per device: `None` and `"aio"` mean cpu; `"cpu:aio,cuda:nccl"` names each.

    Raises ValueError for malformed text and for backends that are not there.
    """
    if backend is None or ":" not in backend:
        return {"cpu": Backend(Backend.AIO if backend is None else backend)}
    text = backend
    pairs = {}
    for pair in text.split(","):
        device, colon, name = pair.strip().partition(":")
        if not colon or not device or not name or device in pairs:
            raise ValueError(f"backend {text!r} is malformed: write device:name pairs, e.g. 'cpu:aio,cuda:nccl'")
        pairs[device] = Backend(name)
    if "cpu" not in pairs:
        raise ValueError(f"backend {text!r} names none for the cpu device")
    return pairs


class CollectiveWork(Work[Any]):
    """A collective under way. `number` is its sequence number among those of its `tag`, `value` its result to be."""

    __slots__ = ("deadline_s", "number", "tag", "value")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, operation: str, nbytes: int, tag: int, number: int, value: Any
    ) -> None:
        super().__init__(loop, operation, nbytes, number)
        self.tag = tag
        self.number = number
        self.value = value
        self.deadline_s: float | None = None


class GroupBackend(ABC):
    """One way to carry out the collectives of one group.

    `ranks` are the members' global ranks in group order, `rank` is our place among them.
    """

    name: ClassVar[str]

    def __init__(self, mesh: BaseMesh, group_id: int, ranks: tuple[int, ...], rank: int) -> None:
        self.group_id = group_id
        self.ranks = ranks
        self.rank = rank

    @abstractmethod
    def start(
        self,
        call: Call,
        work: CollectiveWork,
        on_end: Callable[[CollectiveWork, BaseException | None], None],
    ) -> None:
        """Begin `call`; `on_end(work, None)` once results are in place, perhaps before this returns, or with an error.

        It is not called for operations forgotten by `drop` or `abort`.
        """

    def algorithm_of(self, recipe_key: tuple[Any, ...]) -> str:
        """Name of the algorithm that calls with this `Call.recipe_key` use, for messages; empty if there is none."""
        return ""

    @abstractmethod
    def waiting_for(self, tag: int, sequence: int) -> tuple[int, ...]:
        """Global ranks an operation under way has not heard from."""

    @abstractmethod
    def drop(self, tag: int, sequence: int) -> None:
        """Forget one operation, without calling its `on_end`; its arrays are free when this returns.

        One that has not been started never will be: it was refused, here or elsewhere. Messages may have come already.
        """

    def close(self) -> None:
        """The group is closed: give back what outlives operations. Idempotent."""
        return

    def closing(self) -> None:
        """The group is being closed, and waits for what is under way: nothing may wait for its user any longer."""
        return

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Forget every operation under way and refuse later messages; arrays are free when this returns."""
