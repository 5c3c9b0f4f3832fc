"""run_world: a whole job in one process, one event loop and virtual time.

Every rank is a task with a context of its own, so code written for one process per rank runs as it is. The store's
engine, the plans, the protocol between peers and the groups are the real ones; the wire is a `MemoryNetwork`.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Final, TypeVar

from asyncdist.causes import CONSEQUENCES, first_cause
from asyncdist.deadline import Deadline
from asyncdist.errors import GroupAbortedError, PeerLostError
from asyncdist.group import ProcessGroup
from asyncdist.init_method import InitMethod, StoreSource
from asyncdist.initialize import open_world
from asyncdist.plan.selection.tuning import DEFAULT_TUNING
from asyncdist.store import HashStore
from asyncdist.testing.loop import VirtualTimeLoop
from asyncdist.transport.base_mesh import BaseMesh, MeshOwner
from asyncdist.transport.config import TransportConfig
from asyncdist.transport.in_memory.mesh import MemoryMesh
from asyncdist.transport.in_memory.network import MemoryNetwork
from asyncdist.transport.mesh import Resolve

__all__ = ["SimulatedWorld", "run_world"]

T = TypeVar("T")

GROUP_TIMEOUT_S: Final = 60.0
"""Time-out of collectives in a simulated world; it costs no real time."""


class SimulatedWorld:
    """The network and the store of one simulated job; `kill(rank)` makes a rank vanish."""

    def __init__(self, size: int, loop: asyncio.AbstractEventLoop, seed: int | None, latency_s: float) -> None:
        self.size = size
        self.network = MemoryNetwork(loop, seed, latency_s)
        self.store = HashStore()
        self.world_id = b""
        self.killed: set[int] = set()

    def kill(self, rank: int) -> None:
        """Let `rank` vanish as if its process were killed: its peers see the connection end without a goodbye."""
        self.killed.add(rank)
        self.network.cut(rank, self.world_id)

    async def join(
        self, rank: int, timeout_s: float | None = GROUP_TIMEOUT_S, *, allow_pickle: bool = False
    ) -> ProcessGroup:
        """Join as `rank`; the group is the default of the current context."""

        def make_mesh(
            rank: int,
            size: int,
            world_id: bytes,
            secret: bytes,
            resolve: Resolve,
            owner: MeshOwner,
            config: TransportConfig,
        ) -> BaseMesh:
            self.world_id = world_id
            return MemoryMesh(self.network, rank, size, owner, world_id)

        return await open_world(
            StoreSource(self.store, owned=False),
            InitMethod(rank, self.size),
            "default",
            timeout_s,
            Deadline.after(timeout_s, asyncio.get_running_loop().time()),
            allow_pickle=allow_pickle,
            environ={},
            make_mesh=make_mesh,
            tuning=DEFAULT_TUNING,
        )


def run_world(
    size: int,
    main: Callable[..., Awaitable[T]],
    *,
    seed: int | None = None,
    latency_s: float = 0.0,
    timeout_s: float | None = GROUP_TIMEOUT_S,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = VirtualTimeLoop,
    pass_world: bool = False,
) -> list[T]:
    """Run `main(group)` on `size` ranks and return their results in rank order.

    With `pass_world`, `main(group, world)` also gets the `SimulatedWorld`. A `seed` makes timing random and
    repeatable. Once all have ended the failure that brought down the others is raised, with a note that names its rank;
    of several the lowest rank's. `DeadlockError` when nothing can happen any more. Groups are closed when `main`
    returns, and aborted when it raises. ValueError without a rank; RuntimeError within a running event loop, as a test
    that calls this is no coroutine.

    Virtual time does not pass in threads: ranks that wait for one (`fake_cuda`, `asyncio.to_thread`) need a
    `loop_factory` of real time, such as `asyncio.new_event_loop`.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if asyncio._get_running_loop() is not None:
        raise RuntimeError("run_world() has a loop of its own: call it from a plain function, not from a coroutine")
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(_run(size, main, seed, latency_s, timeout_s, pass_world))


async def _run(
    size: int,
    main: Callable[..., Awaitable[T]],
    seed: int | None,
    latency_s: float,
    timeout_s: float | None,
    pass_world: bool,
) -> list[T]:
    loop = asyncio.get_running_loop()
    world = SimulatedWorld(size, loop, seed, latency_s)

    async def rank_main(rank: int) -> T:
        group = await world.join(rank, timeout_s)
        async with group:
            arguments: tuple[Any, ...] = (group, world) if pass_world else (group,)
            result = main(*arguments)
            if not inspect.isawaitable(result):
                raise TypeError(f"main must be an async function: it returned {result!r}, which cannot be awaited")
            return await result

    tasks = [
        loop.create_task(rank_main(rank), name=f"rank {rank}", context=contextvars.copy_context())
        for rank in range(size)
    ]
    try:
        await asyncio.wait(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await world.store.close()
    _raise_the_cause(tasks, world.killed)
    return [task.result() for task in tasks]


def _raise_the_cause(tasks: Sequence[asyncio.Task[Any]], killed: Collection[int]) -> None:
    """Raise the failure that explains the others, if there is any; it names its rank in a note."""
    failed = {rank: error for rank, task in enumerate(tasks) if not task.cancelled() and (error := task.exception())}
    if not failed:
        return
    rank = min(failed, key=lambda one: (one in killed, _remoteness(failed[one])))
    seen = {rank, *killed}
    while (named := _named_by(failed[rank])) in failed and named not in seen:  # that rank knows more
        rank = named
        seen.add(rank)
    error = failed[rank]
    error.add_note(f"raised on rank {rank}")
    raise error


def _remoteness(error: BaseException) -> int:
    """How far from the cause this may be: 0 is one, 1 names another rank, 2 only repeats what that one was told."""
    cause = first_cause(error)
    return 2 if isinstance(cause, GroupAbortedError) else int(isinstance(cause, CONSEQUENCES))


def _named_by(error: BaseException) -> int:
    """The rank whose end this tells of; -1 if it is no such news."""
    cause = first_cause(error)
    if not isinstance(cause, PeerLostError | GroupAbortedError) or cause.rank is None:
        return -1
    return cause.rank
