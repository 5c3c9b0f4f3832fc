"""DevicePath: one way to carry out a group's operations on GPU arrays, the same way on all its ranks.

The group's `DeviceBackend` and the other ranks agree on the path. The backend then hands over the operations in order.

In a `Call` on GPU arrays `inputs` and `outputs` are one-dimensional `DeviceArray`s on `Call.device`, and so are the
arrays of `pieces`. `ready` are events that were recorded on the caller's streams at the call: on each stream of its
own, a path waits for them first. A call with `members` is several calls in one, for the coalesced and the multi-device
forms: each member is a complete Call with arrays on its own `device`, and all are carried out together. The outer
call's `inputs` and `outputs` are empty.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, Protocol, Self

import numpy as np

from asyncdist.collectives.arguments.call import Call, barrier
from asyncdist.collectives.arguments.items import Terms, all_gather_array
from asyncdist.collectives.backend import CollectiveWork
from asyncdist.collectives.host.backend import HostBackend
from asyncdist.concurrency.integers import derive_group_id
from asyncdist.cuda import Nccl, Provider, Runtime
from asyncdist.gpu.cuda_events import Completions
from asyncdist.gpu.streams import EventPool
from asyncdist.gpu.threads import Helpers, settle
from asyncdist.transport.base_mesh import BaseMesh

OnEnd = Callable[[CollectiveWork, BaseException | None], None]

MAX_MESSAGE_BYTES: Final = 1 << 16
"""Longest message of a rank in an exchange, some identifiers and memory handles: no peer makes us allocate more."""


class Member(NamedTuple):
    """What a rank tells the others before they choose a path."""

    host: str
    """Equal on all ranks of one host."""
    device_ids: tuple[str, ...]
    """UUIDs of the GPUs that the arrays of its first call are on. Multi-device forms have several."""
    nccl: int
    """Version of NCCL; 0 without NCCL."""
    wish: str
    """The path that its backend or ASYNCDIST_CUDA_PATH asks for; empty for the best."""
    bound: bool = False
    """Whether the rank was bound to its GPU when the group was made."""


class DeviceOwner(Protocol):
    """What the group does for its operations on GPU arrays. `rank` is a global rank."""

    def give_up(self, tag: int, sequence: int, why: str) -> None:
        """Fail an operation under way, here and on all other ranks. The group goes on."""

    def ask(self, tag: int, sequence: int, rank: int) -> bool:
        """Ask `rank` what it runs there; a difference fails the operation. False if `rank` is gone."""

    def differs(self, tag: int, sequence: int, rank: int) -> None:
        """`rank` runs something else there, though the operation has ended well here."""

    def watch_parts(self, group_id: int, tag: int) -> None:
        """Messages of `group_id` are parts of the operations of `tag`: their tag is the operation's number.

        Messages that are left when an operation has ended show that another rank runs something else.
        """


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a path works with. `rank` is this rank's place among `ranks`, the global ranks in group order."""

    loop: asyncio.AbstractEventLoop
    mesh: BaseMesh
    group_id: int
    ranks: tuple[int, ...]
    rank: int
    runtime: Runtime
    nccl: Nccl | None
    completions: Completions
    events: EventPool
    """Events to be recorded. The caller gives the events of `Call.ready` back once the call has ended."""
    exchange: HostExchange
    """Small messages among the group, and host collectives (`host_backend`) apart from the group's own."""
    owner: DeviceOwner
    device: int = 0
    """The GPU of this rank's arrays. Only multi-device calls have arrays on others."""
    members: tuple[Member, ...] = ()

    @property
    def on(self) -> tuple[Runtime, int]:
        """The device for calls in threads: see `gpu.threads`."""
        return self.runtime, self.device


class DevicePath(ABC):
    """See the module. All ranks choose the same path, then each `open`s it. Methods are called on the loop's thread."""

    name: ClassVar[str]

    hears_who_leaves: ClassVar[bool] = True
    """Whether an operation fails by itself once a rank that it waits for has left."""

    takes_messages: ClassVar[bool] = True
    """Whether messages of other ranks move operations on."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._helpers = Helpers(around.loop, around.on)

    @classmethod
    async def open(cls, around: Surroundings) -> Self:
        """Make the path of a group, on all its ranks at about the same time.

        Raises DistError when the path cannot be made, which aborts the group. Cancelling leaves nothing behind.
        """
        return cls(around)

    def warm_up(self) -> None:
        """Make what the first operation will need. All ranks are bound to their GPUs."""
        return

    @classmethod
    def refusal(cls, provider: Provider, call: Call) -> str:
        """Why this path cannot carry out `call`, for a TypeError; empty if the path can.

        Asked at the call, also before the path is open. The answer must be the same on ranks with equal GPUs.
        """
        return ""

    @abstractmethod
    def start(self, call: Call, work: CollectiveWork, on_end: OnEnd) -> None:
        """Begin `call`. `on_end(work, None)` on the loop once results are complete on the GPU, or with an error.

        Must not block the loop for a millisecond. `on_end` may be called before this returns. It is not called for
        operations that `drop` and `abort` forget. Arrays and events are kept until then. Where results are on a stream
        before the host knows of their end, `work.on_device.queued(events)` gets the events recorded after them.
        """

    @abstractmethod
    def drop(self, tag: int, sequence: int) -> None:
        """Forget an operation that was refused here or elsewhere, perhaps before its start here. Others go on."""

    @abstractmethod
    def waiting_for(self, tag: int, sequence: int) -> tuple[int, ...]:
        """Global ranks that an operation under way has not heard from, as far as is known."""

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Forget everything under way, and end what runs on the GPU, in threads if that may block."""

    def close(self) -> None:  # noqa: B027 - a path may have nothing to give back
        """Give back what outlives operations. The group is closed, nothing is under way. Idempotent, also after
        abort."""

    async def wait_closed(self) -> None:
        """Wait, bounded, for the threads of `abort` and `close`; called after one of them."""
        return

    def failure(self) -> str:
        """What has gone wrong without an operation noticing, if anything. Asked a few times a second."""
        return ""

    def describe(self) -> str:
        """The path's name and what is worth knowing about it, for the group's repr."""
        return self.name


class HostExchange:
    """Small messages among the ranks of a group, beside its operations: GPU paths use them to agree.

    The messages are collectives of a hidden group over the same authenticated connections. Its id is derived from that
    of the visible group. Ranks must agree on the `number` of each exchange of a tag.
    """

    def __init__(self, mesh: BaseMesh, group_id: int, ranks: tuple[int, ...], rank: int, **options: Any) -> None:
        """`options` are those of HostBackend: loop, pool and tuning."""
        self._mesh = mesh
        self._group_id = group_id
        self._ranks = ranks
        self._rank = rank
        self._options = options
        self._backends: dict[str, HostBackend] = {}
        self._terms = Terms(rank, ranks, False, MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES * len(ranks))

    def among(self, group_id: int, ranks: tuple[int, ...], rank: int) -> HostExchange:
        """An exchange of another group, with the same connections and options."""
        return HostExchange(self._mesh, group_id, ranks, rank, **self._options)

    def host_backend(self, name: str) -> HostBackend:
        """Host collectives of their own: a backend for each `name`, the same on all ranks."""
        backend = self._backends.get(name)
        if backend is None:
            group_id = derive_group_id(self._group_id, "device", name)
            backend = HostBackend(self._mesh, group_id, self._ranks, self._rank, **self._options)
            self._backends[name] = backend
        return backend

    async def all_gather(self, name: str, tag: int, number: int, message: bytes) -> list[bytes]:
        """Every rank's `message` (at most MAX_MESSAGE_BYTES), in rank order. Cancelling forgets the exchange here.

        Raises PeerLostError when a rank is gone, CollectiveMismatchError where ranks exchange something else, or more.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(message)} bytes, at most {MAX_MESSAGE_BYTES} are exchanged")
        call = all_gather_array(np.frombuffer(message, np.uint8), self._terms)
        arrays = await self._run(name, call, tag, number)
        return [array.tobytes() for array in arrays]

    async def barrier(self, name: str, tag: int, number: int) -> None:
        """Return once every rank has called this. Raises as `all_gather`."""
        await self._run(name, barrier(), tag, number)

    async def _run(self, name: str, call: Call, tag: int, number: int) -> Any:
        """Carry out one host collective and return its result. Cancelling forgets the collective here."""
        backend = self.host_backend(name)
        ended: asyncio.Future[None] = backend.loop.create_future()
        work = CollectiveWork(backend.loop, f"{call.collective} of a GPU path", call.nbytes, tag, number, call.result)
        try:
            backend.start(call, work, lambda _work, error: settle(ended, None, error))
            await ended
        except asyncio.CancelledError:
            backend.drop(tag, number)
            raise
        return work.value

    def waiting_for(self, name: str, tag: int, number: int) -> tuple[int, ...]:
        """Global ranks that an exchange under way has not heard from."""
        backend = self._backends.get(name)
        return () if backend is None else backend.waiting_for(tag, number)

    def abort(self, error: BaseException) -> None:
        """Forget everything under way. The caller cancels the tasks that wait here."""
        for backend in self._backends.values():
            backend.abort(error)

    def close(self) -> None:
        for backend in self._backends.values():
            backend.close()
