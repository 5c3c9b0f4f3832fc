"""DeviceBackend: a group's collectives on GPU arrays, by a path that all its ranks can take.

| path | where |
| --- | --- |
| `nccl` | every rank has NCCL, and no two use the same GPU |
| `ipc` | all ranks are on one host, and some share a GPU, which NCCL refuses |
| `staged` | anything else, and groups whose backend says `cuda:aio` or `mpi`: through the host's memory |

The first operation decides: the ranks tell each other, over their own connections, which GPU they use and what is
installed, and each draws the same conclusion. Operations wait meanwhile, in order. While an operation is under way, the
backend asks a few times a second whether the library has failed, and asks other ranks whether they run the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import msgpack

from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import Backend, CollectiveWork, GroupBackend
from asyncdist.collectives.executor.buffers import ScratchPool
from asyncdist.concurrency import trace as events
from asyncdist.concurrency.tasks import start_task
from asyncdist.cuda import Provider
from asyncdist.errors import DistBackendError, DistError, PeerLostError, RemoteProtocolError
from asyncdist.gpu.cuda_events import Completions, EventSpinner
from asyncdist.gpu.ipc.path import CudaIpcPath
from asyncdist.gpu.mismatch_probe import MismatchProbe
from asyncdist.gpu.nccl.path import NcclPath
from asyncdist.gpu.path import DeviceOwner, DevicePath, HostExchange, Member, OnEnd, Surroundings
from asyncdist.gpu.staged.path import StagedPath
from asyncdist.gpu.streams import EventPool, Tail, devices_of_call, ready_for
from asyncdist.gpu.threads import stay_on
from asyncdist.plan.selection.tuning import Tuning
from asyncdist.transport.base_mesh import BaseMesh

PATHS: Final[dict[str, type[DevicePath]]] = {path.name: path for path in (NcclPath, CudaIpcPath, StagedPath)}

_WHY: Final = {
    CudaIpcPath.name: "ranks share a GPU",
    StagedPath.name: "some rank has no NCCL, or ranks of several hosts share GPUs",
}
"""Why the ranks took a path that none of them asked for."""

WATCH_S: Final = 0.1
"""How often a library is asked for errors while operations are under way. NCCL reports none by itself."""

CARRIED_KEPT: Final = 1024
"""Kinds of calls that are remembered as accepted, by collective, dtype and reduction: a program has a few."""

NEGOTIATION: Final = "path"
"""Name of the exchange in which the path is chosen."""

Key = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """What is fixed when a group is made."""

    loop: asyncio.AbstractEventLoop
    pool: ScratchPool
    tuning: Tuning
    host: str
    backend: Backend | None
    """`nccl`, or `aio` or `mpi` for the way through the host. None: the best that is installed here."""
    path: str
    """The path asked for by ASYNCDIST_CUDA_PATH; empty for the best."""
    spin_us: float
    """How long a task that awaits an operation looks at the GPU before it sleeps, in microseconds. 0: not at all."""


class DeviceBackend(GroupBackend):
    """See the module."""

    name: ClassVar[str] = "cuda"

    def __init__(
        self,
        mesh: BaseMesh,
        group_id: int,
        ranks: tuple[int, ...],
        rank: int,
        *,
        provider: Provider,
        settings: DeviceSettings,
        owner: DeviceOwner,
    ) -> None:
        super().__init__(mesh, group_id, ranks, rank)
        runtime, loop = provider.runtime, settings.loop
        self.provider = provider
        self._runtime = runtime
        self._count = runtime.device_count()
        self.device: int | None = None
        """The GPU of this rank, once an array has said which."""
        self._settings = settings
        self._loop = loop
        self._events = EventPool(runtime)
        self._around = Surroundings(
            loop=loop,
            mesh=mesh,
            group_id=group_id,
            ranks=ranks,
            rank=rank,
            runtime=runtime,
            nccl=provider.nccl,
            completions=Completions(loop, runtime.set_device),
            events=self._events,
            exchange=HostExchange(mesh, group_id, ranks, rank, loop=loop, pool=settings.pool, tuning=settings.tuning),
            owner=owner,
        )
        self._spinner: EventSpinner | None = None
        self._path: DevicePath | None = None
        self._opening: asyncio.Task[None] | None = None
        self._under_way: dict[Key, tuple[float, OnEnd, CollectiveWork, Call]] = {}
        """By tag and number, oldest first; when each began. Until there is a path, all of them wait for the path."""
        self._idle: list[Callable[[], object]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._moved_s = 0.0  # when an operation ended last
        self._probe = MismatchProbe(ranks, rank, self.waiting_for, owner.ask)
        self._carried: set[tuple[object, ...]] = set()
        """Kinds of calls that the path does not refuse, once the path is known."""
        self._bound = False
        self._failure: DistError | None = None
        """Why there is no path, until an operation reports the reason."""

    def describe(self) -> str:
        """` path nccl`, for the group's repr; empty until it is known."""
        return "" if self._path is None else f" path {self._path.describe()}"

    # Operations.

    def mark_ready(self, call: Call) -> None:
        """Have `call` wait for what is queued now. From any thread; the caller's streams must be current there."""
        if not call.ready:
            call.ready = ready_for(self._runtime, self._events, call)

    def check(self, call: Call) -> None:
        """Raise TypeError or ValueError for a call on GPU arrays that cannot be carried out."""
        if call.device == self.device and (call.collective, call.dtype, call.op) in self._carried and not call.members:
            return
        devices = devices_of_call(call)
        for number in devices:
            if not 0 <= number < self._count:
                raise ValueError(f"an array is on cuda:{number}, but there are {self._count} GPUs here")
        device = devices[0]
        if len(devices) == 1 and self.device not in (None, device):
            raise ValueError(
                f"an array is on cuda:{device}, but this rank has used cuda:{self.device} in the group so far: a rank "
                "uses one GPU in a group, except in the *_multigpu operations"
            )
        path = self._path or PATHS[self._likely_path()]
        if len(devices) > 1:
            why = several_gpus_refusal(call.collective, path.name, self.wish, self._settings.path, self.provider)
            if why:
                raise TypeError(why)
        for one in call.members or (call,):
            why = path.refusal(self.provider, one)
            if why:
                raise TypeError(why)
            if self._path is not None and len(self._carried) < CARRIED_KEPT:
                self._carried.add((one.collective, one.dtype, one.op))

    def bind(self, device: int) -> None:
        """Use this GPU, and open what the first operation needs."""
        self._use(device)
        self._bound = True
        self._opening = start_task(self._loop, self._open((device,)), name="open a path for GPU arrays")

    def _use(self, device: int) -> None:
        self.device = device
        stay_on(self.provider.runtime, device)

    def start(self, call: Call, work: CollectiveWork, on_end: OnEnd) -> None:
        """Begin `call`, at once if the path is known."""
        if self.device is None and len(devices := devices_of_call(call)) == 1:
            self._use(devices[0])
        if not call.ready:
            call.ready = ready_for(self._runtime, self._events, call)
        work.on_device = Tail(self._runtime, work.operation, work.number)
        work._spinner = self._spinner
        self._under_way[work.key] = (self._loop.time(), on_end, work, call)
        if self._timer is None:
            self._watch()
        if self._path is not None:
            self._path.start(call, work, self._ended)
            return
        if self._failure is not None:
            self._ended(work, self._failure)
            return
        if self._opening is None:
            self._opening = start_task(self._loop, self._open(devices_of_call(call)), name="open a path for GPU arrays")

    def when_idle(self, callback: Callable[[], object]) -> None:
        """Call `callback` once everything that has been issued so far has ended; now, if nothing is under way."""
        if self._under_way:
            self._idle.append(callback)
        else:
            callback()

    def _ended(self, work: CollectiveWork, error: BaseException | None) -> None:
        entry = self._under_way.pop(work.key, None)
        if entry is not None:
            self._events.give(entry[3].ready)
            self._moved_s = self._loop.time()
            entry[1](work, error)
            if self._idle:
                self._became_idle()

    def _forget(self, key: Key) -> None:
        """Remove an operation from those under way: no stream of its path waits for the caller's streams any more."""
        entry = self._under_way.pop(key, None)
        if entry is not None:
            self._events.give(entry[3].ready)

    def _became_idle(self) -> None:
        if not self._under_way and self._idle:
            idle, self._idle = self._idle, []
            for callback in idle:
                callback()

    # Opening.

    async def _open(self, devices: tuple[int, ...]) -> None:
        try:
            path = await self._negotiate(devices)
        except Exception as error:
            failure = error if isinstance(error, DistError) else DistBackendError(f"no path for GPU arrays: {error}")
            failure.__cause__ = failure.__cause__ or error.__cause__
            self._failure = failure
            for _, _, work, _ in list(self._under_way.values()):
                self._ended(work, failure)
            return
        self._path = path
        if self._settings.spin_us:
            messages = self._around.mesh.spinner if path.takes_messages else None
            self._spinner = EventSpinner(self._around.completions, self._settings.spin_us, messages)
        events.info("group %x: GPU arrays take path %s", self.group_id, path.name)
        for _, _, work, call in list(self._under_way.values()):
            if work.key not in self._under_way:
                continue
            try:
                path.start(call, work, self._ended)
            except Exception as error:
                self._ended(work, error)

    async def _negotiate(self, devices: tuple[int, ...]) -> DevicePath:
        provider, settings = self.provider, self._settings
        ids = tuple(provider.runtime.device_id(device) for device in devices)
        version = provider.nccl.version() if provider.nccl is not None else 0
        own = Member(settings.host, ids, version, self.wish, self._bound)
        told = await self._around.exchange.all_gather(NEGOTIATION, 0, 0, msgpack.packb(own))
        members = tuple(member_of(rank, message) for rank, message in zip(self.ranks, told, strict=True))
        around = self.surroundings(devices[0], members)
        path = await PATHS[choose_path(members, self.ranks)].open(around)
        if all(member.bound for member in members):
            path.warm_up()
        return path

    @property
    def wish(self) -> str:
        """The path that this rank asks for; empty for the best."""
        settings = self._settings
        return settings.path or ("staged" if settings.backend in (Backend.AIO, Backend.MPI) else "")

    def surroundings(self, device: int = 0, members: tuple[Member, ...] = ()) -> Surroundings:
        """What paths and messages work with."""
        return replace(self._around, device=device, members=members)

    def _likely_path(self) -> str:
        """The path that arguments are checked for until the path is known. Equal on ranks that are set up alike."""
        return self.wish or ("staged" if self.provider.nccl is None else "nccl")

    # What may go wrong.

    def _watch(self) -> None:
        if self._timer is None and self._under_way:
            self._timer = self._loop.call_later(WATCH_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._under_way:
            return
        failure = "" if self._path is None else self._path.failure()
        if failure:
            _, _, work, _ = next(iter(self._under_way.values()))
            self._ended(work, DistBackendError(failure))
        self._probe.look(self._loop.time(), [(key, entry[0]) for key, entry in self._under_way.items()])
        if self._path is not None and not self._path.hears_who_leaves:
            self._look_who_left()
        self._watch()

    def _look_who_left(self) -> None:
        """End the oldest operation if it waits only for a rank that has left."""
        oldest = next(iter(self._under_way.values()), None)
        if oldest is None:
            return
        started_s, _, work, call = oldest
        rank = self._probe.waits_in_vain(self._loop.time(), max(started_s, self._moved_s))
        if rank is not None and all(event.done() for event in call.ready):  # else it is the caller's kernels
            text = f"rank {rank} has left the world (it closed its group and said goodbye)"
            self._ended(work, PeerLostError(text, rank, left=True))

    # The rest of a backend.

    def waiting_for(self, tag: int, sequence: int) -> tuple[int, ...]:
        """Global ranks an operation under way has not heard from."""
        if self._path is None:
            return self._around.exchange.waiting_for(NEGOTIATION, 0, 0)
        return self._path.waiting_for(tag, sequence)

    def drop(self, tag: int, sequence: int) -> None:
        """Forget one operation, or one never to come."""
        if self._path is not None:
            self._path.drop(tag, sequence)
        self._forget((tag, sequence))
        self._became_idle()

    def abort(self, error: BaseException) -> None:
        """Forget every operation; what runs on the GPU is ended from a thread, and arrays are kept until it has."""
        self._idle.clear()
        if self._opening is not None:
            self._opening.cancel()
        self._around.exchange.abort(error)
        if self._path is not None:
            self._path.abort(error)
        for key in tuple(self._under_way):
            self._forget(key)
        self._stop()

    def close(self) -> None:
        """Give back what outlives operations."""
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
        if self._path is not None:
            self._path.close()
        self._around.exchange.close()
        self._stop()

    async def wait_closed(self) -> None:
        """Wait, bounded, for the threads that end what ran on the GPU."""
        if self._opening is not None:
            await asyncio.wait([self._opening])
        if self._path is not None:
            await self._path.wait_closed()
        self._around.completions.close()
        self._events.close()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def several_gpus_refusal(collective: str, path: str, wish: str, variable: str, provider: Provider) -> str:
    """Why `path` cannot carry out a multi-device form, for a TypeError; empty if it can.

    `wish` is the path that this rank asks for, `variable` that of ASYNCDIST_CUDA_PATH; each empty for the best.
    """
    if path == NcclPath.name:
        return ""
    if variable:
        why = "ASYNCDIST_CUDA_PATH asks for it"
    elif provider.nccl is None:  # where the default backend is cuda:aio
        why = f"NCCL is missing here: {provider.nccl_reason or 'not installed'}"
    else:
        why = "its backend says cuda:aio" if wish else _WHY[path]
    return f"{collective}_multigpu with arrays on several GPUs needs path nccl, but this group takes {path}: {why}"


def choose_path(members: tuple[Member, ...], ranks: tuple[int, ...]) -> str:
    """The name of the path that these ranks take. Raises DistBackendError where they ask for different ones."""
    wishes = {member.wish: rank for member, rank in zip(members, ranks, strict=True)}
    if len(wishes) > 1:
        asked = ", ".join(f"rank {rank} {wish or 'the best'}" for wish, rank in wishes.items())
        raise DistBackendError(f"ranks ask for different paths for GPU arrays: {asked}")
    wish = members[0].wish
    if wish:
        if wish == "nccl" and not all(member.nccl for member in members):
            without = [rank for member, rank in zip(members, ranks, strict=True) if not member.nccl]
            raise DistBackendError(f"path nccl was asked for, but rank {', '.join(map(str, without))} has no NCCL")
        return wish
    used = [(member.host, device) for member in members for device in member.device_ids]
    if len(set(used)) == len(used):
        return "nccl" if all(member.nccl for member in members) else "staged"
    one_host = len({member.host for member in members}) == 1
    return "ipc" if one_host and all(len(member.device_ids) == 1 for member in members) else "staged"


def member_of(rank: int, message: bytes) -> Member:
    """What `rank` says of itself. Raises RemoteProtocolError for what cannot be understood."""
    try:
        host, ids, version, wish, bound = msgpack.unpackb(message)
        if not (isinstance(host, str) and isinstance(version, int) and wish in ("", *PATHS)):
            raise ValueError("unexpected types")
        return Member(host, tuple(map(str, ids)), version, wish, bound is True)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"rank {rank} says of its GPU what cannot be understood: {error}") from error
