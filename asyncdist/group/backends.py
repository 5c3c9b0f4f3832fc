"""The backends of one group: one for host arrays, one for GPU arrays."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Final, Protocol

from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.arguments.items import ItemCall
from asyncdist.collectives.backend import Backend, BackendNames, CollectiveWork, GroupBackend, OnEnd
from asyncdist.collectives.host.backend import HostBackend
from asyncdist.concurrency.spin import spin_us_from_environ
from asyncdist.cuda import provider
from asyncdist.world.world import World

if TYPE_CHECKING:
    from asyncdist.gpu.backend import DeviceBackend
    from asyncdist.gpu.mismatch_probe import HostWatch
    from asyncdist.gpu.pairs import DevicePairs

PATH_VARIABLE: Final = "ASYNCDIST_CUDA_PATH"
"""Asks for a path (see `gpu.backend`) whatever is the best one; the same on all ranks."""


class _Group(Protocol):
    """What the group does for its backends; see `gpu.backend.DeviceOwner`."""

    def give_up(self, tag: int, sequence: int, why: str) -> None: ...

    def ask(self, tag: int, sequence: int, rank: int) -> bool: ...

    def differs(self, tag: int, sequence: int, rank: int) -> None: ...

    def dropped(self, tag: int, sequence: int) -> None: ...

    def watch_parts(self, group_id: int, tag: int) -> None: ...


class GroupBackends:
    """Holds the backend of host arrays and, from the first GPU array on, the backend of GPU arrays.

    The group starts calls at `host` or `devices`. Dropping, aborting and closing concerns both.
    """

    def __init__(self, world: World, group_id: int, ranks: tuple[int, ...], names: BackendNames, owner: _Group) -> None:
        self.names = names
        self._world = world
        self._group_id = group_id
        self._ranks = ranks
        self._owner = owner
        self.host = self._make_host()
        self.devices: DeviceBackend | None = None
        self._host_watch: HostWatch | None = None

    def _make_host(self) -> GroupBackend:
        world, names, ranks = self._world, self.names, self._ranks
        place = world.mesh, self._group_id, ranks, ranks.index(world.rank)
        factory = None if names.cpu is None else names.cpu.factory
        if factory is not None:
            return factory(*place)
        tuning = world.tuning.of_group(ranks)
        if names.cpu == Backend.MPI:
            from asyncdist.mpi.backend import MpiBackend  # for programs that ask for it only

            return MpiBackend(*place, loop=world.loop, pool=world.pool, tuning=tuning)
        if names.cpu is None:
            return _ControlBackend(self, *place, loop=world.loop, pool=world.pool, tuning=tuning)
        lanes = world.options.get("lanes") is True
        different = self._owner.differs
        return HostBackend(*place, loop=world.loop, pool=world.pool, tuning=tuning, lanes=lanes, on_different=different)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """See `inspect.recorder.Recorded`."""
        return self._world.loop

    def algorithm_of(self, recipe_key: tuple[Any, ...]) -> str:
        """See `inspect.recorder.Recorded`."""
        return self.host.algorithm_of(recipe_key)

    def transport_to(self, rank: int) -> str:
        """See `inspect.recorder.Recorded`."""
        return self._world.mesh.describe(rank).partition(": ")[2]

    def stopped(self, rank: int) -> bool:
        """See `inspect.recorder.Recorded`."""
        memory = self._world.mesh.memory
        return memory is not None and memory.stopped(rank)

    def network(self, question: bytes) -> dict[str, Any]:
        """See `inspect.recorder.Recorded`."""
        from asyncdist.world.network import network_of  # for programs that are asked only

        return network_of(self._world, question)

    def describe(self) -> str:
        """`aio`, or `cpu:aio,cuda:nccl path nccl` once GPU arrays have come, for the group's repr."""
        if self.devices is None:
            return str(self.names.cpu) if self.names.cpu is not None else self.names.describe()
        return self.names.describe() + self.devices.describe()

    def on_gpus(self) -> DeviceBackend:
        """The backend of GPU arrays. Raises TypeError where there is none."""
        if self.devices is None:
            from asyncdist.gpu.backend import PATHS, DeviceBackend, DeviceSettings  # for programs with GPUs only
            from asyncdist.gpu.mismatch_probe import HostWatch

            found = provider.find()
            if found is None:
                raise TypeError(f"arrays on a GPU cannot be used here: {provider.reason()}")
            world = self._world
            path = os.environ.get(PATH_VARIABLE, "").strip().lower()
            if path not in ("", *PATHS):
                raise ValueError(f"{PATH_VARIABLE}={path!r}: use {', '.join(PATHS)}")
            settings = DeviceSettings(
                loop=world.loop,
                pool=world.pool,
                tuning=world.tuning.of_group(self._ranks),
                host=world.host,
                backend=self.names.cuda,
                path=path,
                spin_us=spin_us_from_environ(os.environ),
            )
            self.devices = DeviceBackend(
                world.mesh,
                self._group_id,
                self._ranks,
                self._ranks.index(world.rank),
                provider=found,
                settings=settings,
                owner=self._owner,
            )
            if len(self._ranks) > 1:
                self._host_watch = HostWatch(world.loop, self.host, self._owner.ask)
        return self.devices

    def bind(self, device: int | None) -> None:
        """See ProcessGroup.bind_device."""
        if device is not None:
            self.on_gpus().bind(device)

    def gpu_pairs(self) -> DevicePairs:
        """What moves messages of GPU arrays, made anew. Raises TypeError where there is no GPU."""
        from asyncdist.gpu.pairs import DevicePairs

        devices = self.on_gpus()
        return DevicePairs(devices.surroundings(), self._world.host, devices.wish)

    def waiting_for(self, tag: int, sequence: int) -> tuple[int, ...]:
        """See GroupBackend."""
        found = self.host.waiting_for(tag, sequence)
        return found if found or self.devices is None else self.devices.waiting_for(tag, sequence)

    def drop(self, tag: int, sequence: int) -> None:
        """See GroupBackend."""
        self.host.drop(tag, sequence)
        self._owner.dropped(tag, sequence)
        if self.devices is not None:
            self.devices.drop(tag, sequence)

    def close(self) -> None:
        """See GroupBackend."""
        self.host.close()
        if self._host_watch is not None:
            self._host_watch.stop()
        if self.devices is not None:
            self.devices.close()

    def abort(self, error: BaseException) -> None:
        """See GroupBackend."""
        self.host.abort(error)
        if self._host_watch is not None:
            self._host_watch.stop()
        if self.devices is not None:
            self.devices.abort(error)

    async def wait_closed(self) -> None:
        """See GroupBackend."""
        await self.host.wait_closed()
        if self.devices is not None:
            await self.devices.wait_closed()


class _ControlBackend(HostBackend):
    """The host side of a group for GPU arrays only: objects and barriers, but no arrays.

    A barrier there means that what was issued before is complete, as with NCCL in torch.
    """

    def __init__(self, backends: GroupBackends, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._backends = backends

    def start(self, call: Call, work: CollectiveWork, on_end: OnEnd) -> None:
        """Begin `call`; a barrier once everything on the GPU that was issued before it has ended."""
        if call.collective == "barrier":
            devices = self._backends.devices
            if devices is None:
                super().start(call, work, on_end)
            else:
                devices.when_idle(lambda: self._start_late(call, work, on_end))
        elif isinstance(call, ItemCall):
            super().start(call, work, on_end)
        else:
            raise TypeError(
                f"{work.operation} got a host array, but this group is for GPU arrays only (backend "
                f"{self._backends.names.describe()}): use a GPU array, or 'cpu:aio,cuda:nccl' as backend"
            )

    def _start_late(self, call: Call, work: CollectiveWork, on_end: OnEnd) -> None:
        if not work.done():
            super().start(call, work, on_end)
