"""Paths for arrays on a GPU, on a fake one: all ranks in one loop, each with a path of its own, opened directly."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

import asyncdist as dist
from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import CollectiveWork
from asyncdist.gpu.cuda_events import Completions
from asyncdist.gpu.path import DevicePath, HostExchange, Member, Surroundings
from asyncdist.gpu.streams import EventPool, ready_for
from asyncdist.testing import run_world
from asyncdist.testing.fake_cuda import FakeRuntime
from asyncdist.testing.fake_queues import Queue

PATIENCE_S = 60.0
"""Far more than anything here takes; a test that waits this long has failed."""

PATIENT_TURNS = 20
"""Of the loop, in which ranks hear of each other all that they can."""

CHANGE_TURNS = 30
"""In which one stream is slow, on average: others notice, and a test of many operations has many such streams."""


class _Owner:
    """A group that does nothing for its operations."""

    def give_up(self, tag: int, sequence: int, why: str) -> None: ...

    def ask(self, tag: int, sequence: int, rank: int) -> bool:
        return True

    def differs(self, tag: int, sequence: int, rank: int) -> None: ...

    def watch_parts(self, group_id: int, tag: int) -> None: ...


class PathRank:
    """One rank: what a `DeviceBackend` does around its path, without choosing one."""

    def __init__(self, group: dist.ProcessGroup, world: Any, runtime: FakeRuntime, path: type[DevicePath]) -> None:
        self.group = group
        self.world = world
        self.runtime = runtime
        self.rank, self.size = group.rank, group.size
        self.loop = asyncio.get_running_loop()
        self.events = EventPool(runtime)
        self.completions = Completions(self.loop, runtime.set_device)
        tuning, pool = group.world.tuning, group.world.pool
        exchange = HostExchange(
            group.world.mesh, group.group_id, group.ranks, group.rank, loop=self.loop, pool=pool, tuning=tuning
        )
        self.around = Surroundings(
            loop=self.loop,
            mesh=group.world.mesh,
            group_id=group.group_id,
            ranks=group.ranks,
            rank=group.rank,
            runtime=runtime,
            nccl=None,
            device=0,
            members=tuple(Member("host", (runtime.device_id(0),), 0, "") for _ in group.ranks),
            completions=self.completions,
            events=self.events,
            exchange=exchange,
            owner=_Owner(),
        )
        self._kind = path
        self.path: Any = None
        self._numbers: dict[int, int] = {}

    async def open(self) -> PathRank:
        self.path = await self._kind.open(self.around)
        return self

    def array(self, values: Any) -> Any:
        """An array whose values are there once the caller's stream has come so far."""
        made = self.runtime.array(np.full_like(values, 77))
        made.set(values)
        return made

    def skip(self, tag: int = 0) -> int:
        """Take a place in the order, as an operation that is refused here."""
        number = self._numbers.get(tag, 0)
        self._numbers[tag] = number + 1
        return number

    def start(self, call: Call, tag: int = 0) -> asyncio.Future[None]:
        """Issue `call`; a future of its end."""
        ended: asyncio.Future[None] = self.loop.create_future()
        call.ready = ready_for(self.runtime, self.events, call)
        work = CollectiveWork(self.loop, call.collective, call.nbytes, tag, self.skip(tag), call.result)

        def on_end(_work: CollectiveWork, error: BaseException | None) -> None:
            if ended.cancelled():  # the test has failed
                return
            assert not ended.done(), "an operation ends once"
            self.events.give(call.ready)
            if error is None:
                ended.set_result(None)
            else:
                ended.set_exception(error)
                ended.exception()  # not every test asks

        self.path.start(call, work, on_end)
        return ended

    async def run(self, call: Call, tag: int = 0) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.start(call, tag)

    async def close(self) -> None:
        """As a group does that is closed."""
        self.path.close()
        await self._leave()

    async def abort(self, error: BaseException) -> None:
        """As a group does that is aborted."""
        self.around.exchange.abort(error)
        self.path.abort(error)
        self.path.close()
        await self._leave()

    async def _leave(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.path.wait_closed()
        self.completions.close()
        self.events.close()


def run_ranks(
    size: int,
    path: type[DevicePath],
    main: Callable[[PathRank], Awaitable[Any]],
    runtime: FakeRuntime,
    *,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> list[Any]:
    """Run `main` on `size` ranks that all use device 0 of `runtime`, and close their paths."""

    async def rank_main(group: dist.ProcessGroup, world: Any) -> Any:
        rank = await PathRank(group, world, runtime, path).open()
        result = await main(rank)
        await rank.close()
        return result

    results = run_world(size, rank_main, loop_factory=loop_factory, pass_world=True)
    assert not runtime.failure, runtime.failure
    return results


class Driver:
    """Runs what is queued on a fake GPU in mode "manual": a few steps of any streams at each turn of the loop.

    One stream is slow: it is served only when nothing else has moved for PATIENT_TURNS, so that all ranks get as far as
    they can without it. Now and then it is another, unless the test says which.
    """

    def __init__(self, runtime: FakeRuntime, seed: int) -> None:
        self._runtime = runtime
        self._random = random.Random(seed)
        self._slow: Queue | None = None
        self._is_kept = False
        self._idle_turns = 0
        self._stopped = False
        asyncio.get_running_loop().call_soon(self._turn)

    def keep_slow(self, stream: Any) -> None:
        """Let this stream be the slow one from now on."""
        self._slow, self._is_kept = stream.queue, True

    def _turn(self) -> None:
        if self._stopped:
            return
        busy = [queue for queue in self._runtime.scheduler.queues if queue.steps]
        if busy and not self._is_kept and not self._random.randrange(CHANGE_TURNS):
            self._slow = self._random.choice(busy)
        self._idle_turns += 1
        for _ in range(self._random.randrange(3)):
            self._step()
        asyncio.get_running_loop().call_soon(self._turn)

    def _step(self) -> None:
        queues = self._runtime.scheduler.queues
        self._random.shuffle(queues)
        queues.sort(key=lambda queue: queue is self._slow)
        others = any(queue.steps and queue.steps[0].ready() for queue in queues if queue is not self._slow)
        if others or self._idle_turns > PATIENT_TURNS:
            self._runtime.step()
            self._idle_turns = 0

    def stop(self) -> None:
        self._stopped = True


@functools.lru_cache(1000)
def values(rank: int, count: int, dtype: Any = np.float32, salt: int = 0) -> np.ndarray:
    """Small whole numbers, whose sums and products are exact in every dtype; only to be read."""
    numbers = np.random.default_rng([salt, rank, count]).integers(0, 3, count).astype(dtype)
    numbers.flags.writeable = False
    return numbers


def everybody(size: int, count: int, dtype: Any = np.float32, salt: int = 0) -> Sequence[np.ndarray]:
    return [values(rank, count, dtype, salt) for rank in range(size)]
