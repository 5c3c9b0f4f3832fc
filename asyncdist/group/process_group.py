"""ProcessGroup: a group as users hold it.

A group is made by `init_process_group` (all ranks of a world) or `new_group` (some of them). Its operations are methods
by subject; its core carries them out, on this event loop or in the communication thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np

from asyncdist.arrays.host import Array
from asyncdist.collectives.backend import Backend, BackendNames
from asyncdist.concurrency import trace as events
from asyncdist.concurrency.deadline import INHERIT, Deadline, Timeout, timeout_seconds
from asyncdist.errors import DistError, GroupAbortedError, PeerLostError
from asyncdist.group.hooks import ISSUING_MESSAGES, Hook, Hooks
from asyncdist.group.methods import Operations
from asyncdist.group.methods.issuer import Core, check_rank, rank_number
from asyncdist.group.survivors import RankLost

Shape: TypeAlias = int | Sequence[int]
DTypeLike: TypeAlias = type[Any] | np.dtype[Any] | str


class ProcessGroup(Operations):
    """Some ranks of a world, in an order of their own.

    Methods take and return group ranks (0 .. `size` - 1); errors name global ranks. All operations must be called from
    the event loop the group was made on. `async with group:` closes it at the end, or aborts it on an exception.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        core.face = self
        self.world = core.world
        self.group_id = core.group_id
        self.ranks = core.ranks
        self.size = core.size
        self.rank = core.rank
        self.name = core.name
        self.timeout_s = core.timeout_s
        self.pairs = core.pairs
        self._collective = core.issue  # called without a detour: small operations count nanoseconds
        self._hooks: Hooks | None = None
        self._group_rank = {rank: index for index, rank in enumerate(core.ranks)}

    def __repr__(self) -> str:
        return repr(self._core)

    @property
    def watches(self) -> bool:
        """Whether to warn of Works that nobody asks about."""
        return self._core.watches

    @property
    def closed(self) -> bool:
        """Whether the group is closed."""
        return self._core.closed

    @property
    def backend_name(self) -> Backend:
        """Name of the backend that carries out collectives on host arrays, or on GPU arrays if on those alone."""
        return self._core.backend_names.main

    def group_rank_of(self, rank: int, name: str = "rank") -> int:
        """The group rank of global rank `rank`. Raises ValueError if it is not a member, TypeError if it is no int."""
        if self._core.is_world:
            return check_rank(rank, self.size, name)
        rank = rank_number(rank, name)
        if rank not in self._group_rank:
            raise ValueError(f"{name}={rank} is not in group {self.name}: its global ranks are {list(self.ranks)}")
        return self._group_rank[rank]

    def set_timeout(self, timeout: Timeout) -> None:
        """Give collectives `timeout` (seconds, a timedelta, or None) from now on, where the call says nothing else.

        Local: ranks whose time-outs differ end an operation when the first one's has passed.
        """
        self.timeout_s = self._core.timeout_s = timeout_seconds(timeout, self.timeout_s)

    def add_hook(self, before: Hook | None = None, after: Hook | None = None) -> Callable[[], None]:
        """Have `before(work)` called when an operation is issued here, and `after(work)` once it has ended.

        For metrics and logs: a Work has `operation`, `nbytes`, `sequence`, and then `duration` and `exception()`. They
        see collectives and messages that are issued by this object, or by functions with it as their group. `before` is
        called in the call that issues; what it raises, that call raises. `after` is called from the event loop. Returns
        a function that removes both.
        """
        if self._hooks is None:
            self._hooks = Hooks()
            self._collective = self._hooks.around(self._collective)
            for name in ISSUING_MESSAGES:
                setattr(self.pairs, name, self._hooks.around(getattr(self.pairs, name)))
        return self._hooks.add(before, after)

    def check_usable(self, operation: str) -> None:
        """Raise unless the group is open and this is its event loop."""
        self._core.check_usable(operation)

    def where(self, operation: str, sequence: int | None = None) -> str:
        """`group default, rank 3, all_reduce #17`, the beginning of every message."""
        return self._core.where(operation, sequence)

    def empty(self, shape: Shape, dtype: DTypeLike = np.float32) -> Array:
        """A C-contiguous array of `shape` and `dtype`, not initialized, as `numpy.empty` makes it.

        The other ranks of this host can read its memory, so that nothing of it need be copied there. It stays valid as
        long as anyone uses it, whatever becomes of the group; its memory goes with the last view of it. A forked child
        has the parent's memory, not a copy of it: what either writes, both see.

        Where memory is not shared (another transport or system, ASYNCDIST_EMPTY_BYTES reached) it is just that. Local:
        the other ranks need not call it. Raises TypeError and ValueError as numpy does.
        """
        self._core.check_usable("empty")
        made = np.empty(0, dtype).dtype
        extents = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        shared = None
        if not made.hasobject and all(extent > 0 for extent in extents):
            shared = self._core.shared_array(extents, made)
        if shared is None:
            events.info("an array of shape %s and dtype %s is not in shared memory", extents, made)
            return np.empty(extents, made)
        return shared

    def zeros(self, shape: Shape, dtype: DTypeLike = np.float32) -> Array:
        """As `empty`, filled with zeros."""
        array = self.empty(shape, dtype)
        array[...] = 0
        return array

    def bind_device(self, device: int | None) -> None:
        """Open communicators for arrays on that GPU at once, if all ranks do; None does nothing."""
        self._core.bind_device(device)

    def abort(self, reason: str = "") -> None:
        """Give up now: every operation under way raises `GroupAbortedError` here and on all connected members.

        Later calls raise it too. Returns at once; arrays of operations under way are free when it returns.
        """
        self._core.abort(reason)

    async def close(self) -> None:
        """Wait for everything under way (receives that nothing matched are withdrawn), then leave; issue no more.

        The world's group closes all others first, then says goodbye to all peers and to the store. Raises, once, the
        first failure of a work that nobody asked about. Cancelling aborts what is under way, and lets the bounded end
        finish first. May be called again, also meanwhile.
        """
        await self._core.close()

    async def shrink(self, timeout: Timeout = INHERIT) -> ProcessGroup:
        """Make a group of the surviving ranks, in their order, once all of them call this; the ranks agree on who.

        For what follows a `PeerLostError` or a `GroupAbortedError`. This group is aborted, and its ranks that have not
        noticed yet are told. Ranks that die meanwhile are left out as well: when it returns, all ranks of the new group
        have met. A rank that another one has lost, although both are alive, gets GroupAbortedError. Where a network
        falls into parts, each part goes on by itself.

        Raises CollectiveTimeoutError, with the ranks that do not answer in `missing`, after `timeout` (seconds or a
        timedelta; the group's by default), and ClosedError. Cancelling stops only the waiting: call it again.
        """
        loop = asyncio.get_running_loop()
        deadline = Deadline.after(timeout_seconds(timeout, self.timeout_s), loop.time())
        ranks = await self._core.survivors(deadline.given_s)
        made = self.make_subgroup(ranks, self.timeout_s, None, members_only=True)
        assert made is not None, "this rank is one of them"
        try:
            await made.barrier(timeout=deadline.remaining_s(loop.time()))
        except (PeerLostError, GroupAbortedError):
            smaller = await made.shrink(deadline.remaining_s(loop.time()))
            with contextlib.suppress(DistError):
                await made.close()
            return smaller
        return made

    def membership(self) -> AsyncIterator[RankLost]:
        """Iterate over the ranks that are lost or leave, from the first one on, until the group is closed.

        async for change in group.membership():
            print(change.rank, "is gone,", change.ranks, "are left")
        """
        losses: AsyncIterator[RankLost] = self._core.losses()
        return losses

    def __await__(self) -> Generator[Any, None, Self]:
        yield from ()  # awaiting a group gives the group at once
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
            return
        self._core.leave_with(error)
        with contextlib.suppress(DistError):  # the exception that ended the block is the one to raise
            await self.close()

    def make_subgroup(
        self,
        ranks: Sequence[int],
        timeout_s: float | None,
        name: str | None,
        backend_names: BackendNames | None = None,
        *,
        members_only: bool = False,
    ) -> ProcessGroup | None:
        """Make the group of `ranks` (global); None where this rank is not a member.

        Called on members and, unless `members_only`, on all others, in the same order.
        """
        core = self._core.subgroup(ranks, timeout_s, name, backend_names, members_only=members_only)
        return None if core is None else ProcessGroup(core)
