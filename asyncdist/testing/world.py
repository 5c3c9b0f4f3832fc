"""run_world: a whole job in one process, one event loop and virtual time.

Every rank is a task with a context of its own, so code for one process per rank runs unchanged. The store's engine, the
plans, the protocol between peers and the groups are the real ones. The wire is a `MemoryNetwork`.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Final, TypeVar

from asyncdist.concurrency.deadline import Deadline
from asyncdist.errors import GroupAbortedError, PeerLostError
from asyncdist.group.abort_reasons import CONSEQUENCES, first_cause
from asyncdist.group.process_group import ProcessGroup
from asyncdist.init import open_world
from asyncdist.plan.selection.tuning import DEFAULT_TUNING
from asyncdist.store import HashStore
from asyncdist.testing.loop import VirtualTimeLoop
from asyncdist.transport.base_mesh import BaseMesh, MeshOwner
from asyncdist.transport.config import TransportConfig
from asyncdist.transport.in_memory import MemoryMesh, MemoryNetwork
from asyncdist.transport.mesh import Resolve
from asyncdist.world.init_method import InitMethod, StoreSource

T = TypeVar("T")

MAX_IDLE_TURNS: Final = 1_000_000
"""Most turns of the event loop without a message between ranks: some seconds of real time."""

GROUP_TIMEOUT_S: Final = 60.0
"""Time-out of collectives in a simulated world; it costs no real time."""


_RANK: Final[contextvars.ContextVar[int]] = contextvars.ContextVar("simulated rank", default=-1)
"""The rank whose code runs."""


class SimulatedWorld:
    """The network and the store of one simulated job; `kill(rank)` makes a rank vanish."""

    def __init__(self, size: int, loop: asyncio.AbstractEventLoop, seed: int | None, latency_s: float) -> None:
        self.size = size
        self.network = MemoryNetwork(loop, seed, latency_s)
        self.store = HashStore()
        self.world_id = b""
        self.killed: set[int] = set()
        self.tasks: list[asyncio.Task[Any]] = []
        self._stores: dict[int, HashStore] = {}

    def kill(self, rank: int) -> None:
        """End `rank` as if its process were killed: its peers see the connection end without a goodbye.

        The rank's task is cancelled where it waits, and reaches neither peers nor the store any more. The same is true
        of the tasks that the rank has started; they are cancelled when `run_world` ends. If the rank calls this for
        itself, the call raises `CancelledError`.
        """
        if rank not in self.killed:
            self.killed.add(rank)
            self.network.cut(rank, self.world_id)
            self._stores[rank].cut()
            for task in self.tasks[rank : rank + 1]:
                task.cancel(f"rank {rank} was killed")
        if _RANK.get() == rank:
            raise asyncio.CancelledError(f"rank {rank} was killed")

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

        store = self._stores[rank] = self.store.clone()
        return await open_world(
            StoreSource(store, owned=True),
            InitMethod(rank, self.size),
            "default",
            timeout_s,
            Deadline.after(timeout_s, asyncio.get_running_loop().time()),
            allow_pickle=allow_pickle,
            environ={"ASYNCDIST_INSPECT": "off"},
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
    max_idle_turns: int | None = MAX_IDLE_TURNS,
) -> list[T]:
    """Run `main(group)` on `size` ranks and return their results in rank order.

    With `pass_world`, `main(group, world)` also gets the `SimulatedWorld`. A `seed` makes timing random and repeatable.
    Once all ranks have ended, the failure that caused the others is raised, with a note that names its rank; of several
    causes, that of the lowest rank. A killed rank is no cause, and its result is None. `DeadlockError` is raised when
    nothing can happen any more, and when the event loop has turned `max_idle_turns` times (None: no limit) without a
    message between ranks, as where a rank sleeps in a loop for ever. Groups are closed when `main` returns, and aborted
    when `main` raises. ValueError without a rank. RuntimeError within a running event loop: the test that calls this
    must be no coroutine.

    Virtual time does not pass in threads: ranks that wait for one (`fake_cuda`, `asyncio.to_thread`) need a
    `loop_factory` of real time, such as `asyncio.new_event_loop`.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if asyncio._get_running_loop() is not None:
        raise RuntimeError("run_world() has a loop of its own: call it from a plain function, not from a coroutine")
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        loop = runner.get_loop()
        world = SimulatedWorld(size, loop, seed, latency_s)
        if max_idle_turns is not None and isinstance(loop, VirtualTimeLoop):
            loop.limit_idle_turns(max_idle_turns, lambda: world.network.delivered_bytes)
        return runner.run(_run(world, main, timeout_s, pass_world))


async def _run(
    world: SimulatedWorld, main: Callable[..., Awaitable[T]], timeout_s: float | None, pass_world: bool
) -> list[T]:
    loop = asyncio.get_running_loop()

    async def rank_main(rank: int) -> T:
        _RANK.set(rank)
        group = await world.join(rank, timeout_s)
        async with group:
            arguments: tuple[Any, ...] = (group, world) if pass_world else (group,)
            result = main(*arguments)
            if not inspect.isawaitable(result):
                raise TypeError(f"main must be an async function: it returned {result!r}, which cannot be awaited")
            return await result

    tasks = world.tasks = [
        loop.create_task(rank_main(rank), name=f"rank {rank}", context=contextvars.copy_context())
        for rank in range(world.size)
    ]
    try:
        await asyncio.wait(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await world.store.close()
    _raise_the_cause(tasks, world.killed)
    results: list[Any] = [None if rank in world.killed else task.result() for rank, task in enumerate(tasks)]
    return results


def _raise_the_cause(tasks: Sequence[asyncio.Task[Any]], killed: Collection[int]) -> None:
    """Raise the failure that explains the others, if there is one, with a note that names its rank."""
    ended = {rank: task for rank, task in enumerate(tasks) if rank not in killed and not task.cancelled()}
    failed = {rank: error for rank, task in ended.items() if (error := task.exception())}
    if not failed:
        return
    rank = min(failed, key=lambda one: _remoteness(failed[one]))
    seen = {rank}
    while (named := _named_by(failed[rank])) in failed and named not in seen:  # that rank knows more
        rank = named
        seen.add(rank)
    error = failed[rank]
    error.add_note(f"raised on rank {rank}")
    raise error


def _remoteness(error: BaseException) -> int:
    """How far an error is from the cause: 0 the cause itself, 1 names another rank, 2 repeats another rank's report."""
    cause = first_cause(error)
    return 2 if isinstance(cause, GroupAbortedError) else int(isinstance(cause, CONSEQUENCES))


def _named_by(error: BaseException) -> int:
    """The rank whose end this error reports; -1 if there is none."""
    cause = first_cause(error)
    if not isinstance(cause, PeerLostError | GroupAbortedError) or cause.rank is None:
        return -1
    return cause.rank
