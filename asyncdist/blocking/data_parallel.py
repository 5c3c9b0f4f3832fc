"""The classes of `asyncdist.data_parallel` that act on a group, for ordinary threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from asyncdist.api import queries
from asyncdist.arrays.host import Array
from asyncdist.arrays.reduce_op import ReduceOp, ReduceOpLike
from asyncdist.blocking.group import ProcessGroup, Session, current_session, inner_of
from asyncdist.blocking.lifting import asked
from asyncdist.blocking.work import refuse_loop
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.data_parallel.ddp import DistributedDataParallel as InnerDDP
from asyncdist.data_parallel.gradients import BUCKET_BYTES, list_of
from asyncdist.data_parallel.gradients import GradientBuckets as InnerBuckets
from asyncdist.data_parallel.sampler import DistributedSampler as InnerSampler
from asyncdist.group.default_group import resolve
from asyncdist.group.non_member import NonMember

_rank = asked(queries.get_rank)
_world_size = asked(queries.get_world_size)


class DistributedSampler(InnerSampler):
    """See `asyncdist.DistributedSampler`: `num_replicas` and `rank` are by default those of the default group."""

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        num_replicas = _world_size() if num_replicas is None else num_replicas
        super().__init__(dataset, num_replicas, _rank() if rank is None else rank, shuffle, seed, drop_last)


class GradientBuckets:
    """See `asyncdist.GradientBuckets`; here `averaged()` waits, while buckets leave in the background from `ready` on.

    buckets = GradientBuckets(parameters)
    ...                                     # compute buckets.gradients[index], in place
    buckets.ready(index)
    gradients = buckets.averaged()
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        group: ProcessGroup | NonMember | None = None,
        *,
        op: ReduceOpLike = ReduceOp.AVG,
        bucket_bytes: int = BUCKET_BYTES,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> None:
        refuse_loop("GradientBuckets")
        options: dict[str, Any] = {"op": op, "bucket_bytes": bucket_bytes, "tag": tag, "timeout": timeout}
        self._session = _session_for(group)
        parameters = list_of(parameters, "parameters")
        self._inner: InnerBuckets = self._session.call(InnerBuckets, parameters, inner_of(group), **options)

    @property
    def gradients(self) -> list[Array]:
        """One array for each parameter."""
        return self._inner.gradients

    def __len__(self) -> int:
        """How many buckets there are, and so operations in each step."""
        return len(self._inner)

    def __repr__(self) -> str:
        return f"<blocking {repr(self._inner)[1:]}"

    def ready(self, index: int, gradient: Any = None) -> None:
        """Gradient number `index` of this step is in `gradients[index]`, or is `gradient` and copied there now."""
        refuse_loop("GradientBuckets.ready")
        self._session.call(self._inner.ready, index, gradient)

    def averaged(self, async_op: bool = False) -> Any:
        """End the step: wait until all gradients are averaged and return them; with `async_op=True` return a Work."""
        refuse_loop("GradientBuckets.averaged")
        if async_op:
            return self._session.call(self._inner.averaged)
        return self._session.complete(self._inner.averaged)


class DistributedDataParallel:
    """See `asyncdist.DistributedDataParallel`: parameters are alike once it is made, and `averaged()` waits.

    ddp = DistributedDataParallel(model)
    loss = compute_loss(ddp(inputs))
    loss.backward()                         # buckets leave meanwhile
    ddp.averaged()
    optimizer.step()
    """

    def __init__(self, module: Any, group: ProcessGroup | NonMember | None = None, **options: Any) -> None:
        refuse_loop("DistributedDataParallel")
        self._session = _session_for(group)
        self._inner: InnerDDP = self._session.call(InnerDDP, module, inner_of(group), **options)
        self._session.complete(self._inner.agree)
        self.module = module
        self.parameters = self._inner.parameters
        self.buffers = self._inner.buffers
        self.gradients = self._inner.gradients

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the module."""
        return self.module(*arguments, **options)

    def __repr__(self) -> str:
        return f"<blocking {repr(self._inner)[1:]}"

    def sync_parameters(self, group_src: int = 0) -> None:
        """Copy the parameters and buffers of one rank (in the group) into everybody's."""
        refuse_loop("DistributedDataParallel.sync_parameters")
        self._session.complete(self._inner.sync_parameters, group_src)

    def ready(self, name: str, gradient: Any = None) -> None:
        """The gradient of this step is in `gradients[name]`, or is `gradient`, which is copied (or added) there now."""
        refuse_loop("DistributedDataParallel.ready")
        self._session.call(self._inner.ready, name, gradient)

    def averaged(self, async_op: bool = False) -> Any:
        """End the step: wait until all gradients are averaged and return them; with `async_op=True` return a Work."""
        refuse_loop("DistributedDataParallel.averaged")
        if async_op:
            return self._session.call(self._inner.averaged)
        return self._session.complete(self._inner.averaged)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients are added up and not sent: they go with those of the first step after it."""
        with self._inner.no_sync():
            yield

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Train within it where ranks have different numbers of steps; see `asyncdist.DistributedDataParallel.join`."""
        refuse_loop("DistributedDataParallel.join")
        self._inner.begin_join()
        try:
            yield
            self._session.complete(self._inner.end_join)
        finally:
            self._inner.joining = False


def _session_for(group: ProcessGroup | NonMember | None) -> Session:
    session = group._session if isinstance(group, ProcessGroup) else current_session()
    if session is None:
        resolve(inner_of(group))  # raises, as there is no group
        raise AssertionError("a group was found where there is none")
    return session
