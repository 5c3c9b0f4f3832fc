"""What a backend is, what backends are called, and how one is registered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias

from asyncdist.collectives.arguments.call import Call
from asyncdist.cuda import provider
from asyncdist.work import CollectiveWork, WorkKey

if TYPE_CHECKING:
    from asyncdist.transport.base_mesh import BaseMesh

__all__ = ["Backend", "BackendNames", "CollectiveWork", "GroupBackend", "OnEnd", "WorkKey", "parse_backend"]


MPI_MISSING: Final = 'mpi4py is not installed: pip install "asyncdist[mpi]", and an MPI such as Open MPI or MPICH'


class Backend(str):
    """A backend's name, compared without regard to case: `Backend("AIO") == "aio"`.

    `gloo` is accepted as an alias of `aio`, so that scripts written for torch.distributed run. `nccl` is known where
    cupy, a GPU and NCCL are, `mpi` where mpi4py is.
    """

    __slots__ = ()

    AIO: ClassVar[str] = "aio"
    GLOO: ClassVar[str] = "gloo"
    NCCL: ClassVar[str] = "nccl"
    MPI: ClassVar[str] = "mpi"
    UNDEFINED: ClassVar[str] = "undefined"

    _factories: ClassVar[dict[str, Callable[..., GroupBackend]]] = {}

    def __new__(cls, name: str) -> Backend:
        """Raises TypeError unless `name` is a str, ValueError for a name nobody registered, or what is not there."""
        if not isinstance(name, str):
            raise TypeError(f"a backend's name is a str, not {type(name).__name__}")
        lower = name.lower()
        known = {cls.AIO, cls.GLOO, *cls._factories}
        if lower == cls.NCCL and lower not in known:
            why = _nccl_missing()
            if why:
                raise ValueError(f"backend 'nccl' is not available: {why}")
        elif lower == cls.MPI:
            if find_spec("mpi4py") is None:
                raise ValueError(f"backend 'mpi' is not available: {MPI_MISSING}")
        elif lower not in known:
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
        if lower in (cls.AIO, cls.GLOO, cls.NCCL, cls.MPI, *cls._factories):
            raise ValueError(f"backend {name!r} is registered already")
        cls._factories[lower] = factory
        setattr(cls, lower.upper(), lower)


def _nccl_missing() -> str:
    """Why there is no NCCL here; empty if there is."""
    found = provider.find()
    if found is None:
        return provider.reason()
    return "" if found.nccl is not None else found.nccl_reason


class BackendNames(NamedTuple):
    """Names of the backends of a group by the kind of array: `cpu` of that for the host's, `cuda` for a GPU's.

    `cpu` is None where host arrays are refused (objects, barriers and the group's own messages still go there).
    """

    cpu: Backend | None
    cuda: Backend | None
    """None: `nccl` where it is available, else `aio`, found out when the first such array comes."""

    @property
    def main(self) -> Backend:
        """What `get_backend` names: the host's, if there is one."""
        return self.cpu or self.on_gpus

    @property
    def on_gpus(self) -> Backend:
        """What carries GPU arrays, or would. Imports cupy if there is a GPU and nobody has said what to use."""
        if self.cuda is not None:
            return self.cuda
        found = provider.find()
        return Backend(Backend.AIO if found is None or found.nccl is None else Backend.NCCL)

    def describe(self) -> str:
        """`cpu:aio,cuda:nccl`, or `cpu:aio` where there is no GPU."""
        parts = [] if self.cpu is None else [f"cpu:{self.cpu}"]
        if self.cpu is None or provider.visible():
            parts.append(f"cuda:{self.on_gpus}")
        return ",".join(parts)


def parse_backend(backend: str | None) -> BackendNames:
    """Return the backend of each kind of array.

    None is `aio` for host arrays, `nccl` for GPU arrays where it is available; `"aio"` (and `"gloo"`) is for both,
    `"nccl"` for GPU arrays alone, `"mpi"` for both, `"cpu:aio,cuda:nccl"` names each. Raises TypeError for what is no
    str, ValueError for malformed text and for backends that are not there.
    """
    if backend is None:
        return BackendNames(Backend(Backend.AIO), None)
    if not isinstance(backend, str) or ":" not in backend:
        named = Backend(backend)
        if named == Backend.NCCL:
            return BackendNames(None, named)
        return BackendNames(named, named if named in (Backend.AIO, Backend.MPI) else None)
    pairs: dict[str, Backend] = {}
    for pair in backend.split(","):
        device, colon, name = pair.strip().partition(":")
        if not colon or device not in ("cpu", "cuda") or not name or device in pairs:
            raise ValueError(f"backend {backend!r} is malformed: write device:name pairs, e.g. 'cpu:aio,cuda:nccl'")
        pairs[device] = Backend(name)
    if pairs.get("cpu") == Backend.NCCL:
        raise ValueError(f"backend {backend!r}: nccl has no form for host arrays")
    if pairs.get("cuda") not in (None, Backend.NCCL, Backend.AIO):
        raise ValueError(f"backend {backend!r}: GPU arrays are carried by nccl or aio")
    return BackendNames(pairs.get("cpu"), pairs.get("cuda"))


OnEnd: TypeAlias = Callable[[CollectiveWork, BaseException | None], None]
"""What is told of the end of a collective: its Work, and the error if it has failed."""


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
    def start(self, call: Call, work: CollectiveWork, on_end: OnEnd) -> None:
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

    def elsewhere(self, tag: int, sequence: int) -> None:  # noqa: B027 - most have no order of their own
        """The operation at this place of the group's order is on GPU arrays: another backend carries it out."""

    def close(self) -> None:
        """The group is closed: give back what outlives operations. Idempotent."""
        return

    def closing(self) -> None:
        """The group is being closed and waits for operations under way: none may wait for its consumer any longer."""
        return

    def settle(self) -> None:
        """All that was begun here has ended: say now where another rank is known to run something else."""
        return

    async def wait_closed(self) -> None:
        """Wait, bounded, for what `close` or `abort` has left to threads; called once, after one of them."""
        return

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Forget every operation under way and refuse later messages; arrays are free when this returns."""
