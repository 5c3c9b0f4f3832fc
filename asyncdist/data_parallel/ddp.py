"""DistributedDataParallel: a model whose copies on all ranks stay alike, step after step."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from typing import Any

import numpy as np

from asyncdist.arrays.device import any_array
from asyncdist.arrays.host import Array
from asyncdist.arrays.reduce_op import ReduceOp, ReduceOpLike
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.concurrency.integers import spell_ranks
from asyncdist.data_parallel.gradients import (
    BUCKET_BYTES,
    CommHook,
    GradientBuckets,
    average_gradients,
    broadcast_parameters,
    copy_gradient,
)
from asyncdist.errors import CollectiveMismatchError
from asyncdist.group.default_group import Group, resolve
from asyncdist.work import Work


class DistributedDataParallel:
    """Keeps the parameters of `module` alike on all ranks, by averaging their gradients.

        ddp = await DistributedDataParallel({"weights": weights, "bias": bias})  # rank 0's are everybody's now
        for batch in batches:
            ...                                 # compute the gradients, best the last layer's first
            ddp.ready("bias", gradient)         # its bucket leaves as soon as it is full
            ddp.ready("weights", gradient)
            averages = await ddp.averaged()     # by name

    `module` is a dict of arrays by name, or has `named_parameters()` (and `named_buffers()`), as torch's modules. All
    ranks list the same names, shapes and dtypes. Awaiting compares the names (CollectiveMismatchError), and
    copies the parameters and buffers of the group's first rank into everybody's. Buckets of about `bucket_bytes` hold
    the gradients of parameters in reverse order, and leave while others are computed.

    Of a torch module every parameter tells of its gradient by itself, whatever thread `backward` runs in:

        ddp = await DistributedDataParallel(model)
        loss = compute_loss(ddp(inputs))
        await asyncio.to_thread(loss.backward)  # while the event loop sends
        await ddp.averaged()                    # each parameter's .grad is the average
        optimizer.step()

    `op` may be another reduction than the average, `comm_hook` another way to send a bucket (see `CommHook`). With
    `find_unused_parameters` a gradient that is not ready at the end of a step counts as zeros, else that is a
    ValueError. `tag` and `timeout` are those of every operation: other collectives issued during a step need another
    tag (with a hook each bucket has one of its own, from `tag` + 1 on). Raises TypeError and ValueError for no or
    unsuitable arrays.
    """

    def __init__(
        self,
        module: Any,
        group: Group = None,
        *,
        op: ReduceOpLike = ReduceOp.AVG,
        bucket_bytes: int = BUCKET_BYTES,
        comm_hook: CommHook | None = None,
        find_unused_parameters: bool = False,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> None:
        self.module = module
        self.parameters, self.buffers = _named(module)
        self._group = resolve(group)
        self._loop = asyncio.get_running_loop()
        self._tag = tag
        self._timeout: Timeout = timeout
        self._fills_in = find_unused_parameters
        names = list(reversed(self.parameters))
        self._index = {name: index for index, name in enumerate(names)}
        listed = [self.parameters[name] for name in names]
        self._buckets = GradientBuckets(
            listed, self._group, op=op, bucket_bytes=bucket_bytes, comm_hook=comm_hook, tag=tag, timeout=timeout
        )
        self.gradients = dict(zip(names, self._buckets.gradients, strict=True))
        """One array for each parameter, by name: room for this step's gradient, and then for the average."""
        self._added: set[str] = set()  # gradients[name] holds something of this step already
        self._ready: set[str] = set()
        self._syncing = True
        self._steps = 0
        self.joining = False
        self._told: list[Work[Any]] = []  # that this rank takes part in this step
        self._error: BaseException | None = None
        for name, parameter in self.parameters.items():
            if hasattr(parameter, "register_post_accumulate_grad_hook"):
                parameter.register_post_accumulate_grad_hook(self._hook(name))

    def __await__(self) -> Generator[Any, None, DistributedDataParallel]:
        return self.agree().__await__()

    async def agree(self) -> DistributedDataParallel:
        """What awaiting it does."""
        names = repr([*self.parameters, None, *self.buffers]).encode()
        own = np.frombuffer(hashlib.sha256(names).digest(), np.uint8)
        digests = np.empty((self._group.size, own.size), np.uint8)
        await self._group.all_gather_into_tensor(digests, own, tag=self._tag, timeout=self._timeout)
        others = np.flatnonzero((digests != own).any(axis=1))
        if others.size:
            raise CollectiveMismatchError(
                f"{self!r}: group ranks {spell_ranks(others.tolist())} list other names of parameters and buffers, or "
                f"in another order, than group rank {self._group.rank}"
            )
        await self.sync_parameters()
        return self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the module."""
        return self.module(*arguments, **options)

    def __repr__(self) -> str:
        return f"<DistributedDataParallel of {len(self.parameters)} parameters in {len(self._buckets)} buckets>"

    def sync_parameters(self, group_src: int = 0) -> Work[Any]:
        """Copy the parameters and buffers of one rank (in the group) into everybody's."""
        arrays = [*self.parameters.values(), *self.buffers.values()]
        return broadcast_parameters(
            map(_detached, arrays), group=self._group, group_src=group_src, tag=self._tag, timeout=self._timeout
        )

    def ready(self, name: str, gradient: Any = None) -> None:
        """The gradient of this step is in `gradients[name]`, or is `gradient`, which is copied (or added) there now.

        Any thread may call it. Another thread's mistakes are raised by `averaged`. Raises KeyError for a name that is
        none, and what `GradientBuckets.ready` raises.
        """
        if name not in self._index:
            raise KeyError(f"no parameter is called {name!r}")
        if asyncio._get_running_loop() is self._loop:
            self._take(name, gradient)
        else:
            self._loop.call_soon_threadsafe(self._take_from_thread, name, gradient)

    def averaged(self) -> Work[dict[str, Array]]:
        """End the step: return a Work whose result is `gradients`, done once all of them are averaged.

        Fails as `GradientBuckets.averaged`. Within `no_sync` there is nothing to end: call it in the next step only.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._fills_in:
            for name in self._index.keys() - self._ready:
                if name not in self._added:
                    self.gradients[name][...] = 0
                self._give(name)
        work = self._buckets.averaged(self.gradients, self._told)
        self._added.clear()
        self._ready.clear()
        self._told = []
        self._steps += 1
        return work

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients are added up and not sent: they go with those of the first step after it."""
        syncing, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = syncing

    @contextlib.asynccontextmanager
    async def join(self) -> AsyncIterator[None]:
        """Train within it where ranks have different numbers of steps: a rank that has no more takes part with zeros.

        Averages stay those over all ranks of the group. At the end all have the parameters of the rank that came last.
        Every rank enters it, and every step within it says so to the others, by one small all_reduce.
        """
        self.begin_join()
        try:
            yield
            await self.end_join()
        finally:
            self.joining = False

    def begin_join(self) -> None:
        """See `join`."""
        if self.joining:
            raise RuntimeError("join() is entered already")
        self.joining = True

    async def end_join(self) -> None:
        """See `join`: take part in the others' steps until all have come here."""
        own_steps = self._steps
        while await self._others_go_on():
            for name, index in self._index.items():
                self.gradients[name][...] = 0
                self._buckets.ready(index)
            await self._buckets.averaged()
        self.joining = False
        steps = np.empty(self._group.size, np.int64)
        await self._group.all_gather_into_tensor(steps, np.array([own_steps]), tag=self._tag, timeout=self._timeout)
        await self.sync_parameters(int(steps.argmax()))

    async def _others_go_on(self) -> bool:
        count = np.zeros(1, np.int64)
        await self._group.all_reduce(count, tag=self._tag, timeout=self._timeout)
        return bool(count[0])

    def _take(self, name: str, gradient: Any) -> None:
        room = self.gradients[name]
        if gradient is not None:
            copy_gradient(gradient, room, repr(name), add=name in self._added)
        self._added.add(name)
        if self._syncing:
            self._give(name)

    def _give(self, name: str) -> None:
        if self.joining and not self._ready:
            one = np.ones(1, np.int64)
            self._told.append(self._group.all_reduce(one, tag=self._tag, timeout=self._timeout))
        self._ready.add(name)
        self._buckets.ready(self._index[name])

    def _take_from_thread(self, name: str, gradient: Any) -> None:
        try:
            self._take(name, gradient)
        except Exception as error:
            self._error = self._error or error

    def _hook(self, name: str) -> Any:
        """What a torch parameter calls when its gradient is complete: from then on the gradient lies in our room."""
        room = _tensor_over(self.gradients[name], self.parameters[name])

        def tell(parameter: Any) -> None:
            if self._syncing:
                if parameter.grad.data_ptr() != room.data_ptr():
                    room.copy_(parameter.grad)
                    parameter.grad = room
                if parameter.is_cuda:  # asyncdist begins behind the default stream, and backward may run on another
                    cuda = sys.modules["torch"].cuda
                    cuda.default_stream(room.device).wait_stream(cuda.current_stream(room.device))
                self.ready(name)

        return tell


def _named(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters and the buffers of `module`, by name."""
    if isinstance(module, Mapping):
        return dict(module), {}
    if not hasattr(module, "named_parameters"):
        raise TypeError(f"module must be a dict of arrays, or have named_parameters(), not {type(module).__name__}")
    parameters = {name: value for name, value in module.named_parameters() if getattr(value, "requires_grad", True)}
    return parameters, dict(module.named_buffers()) if hasattr(module, "named_buffers") else {}


def _detached(array: Any) -> Any:
    return array.detach() if hasattr(array, "detach") else array


def _tensor_over(room: Array, like: Any) -> Any:
    """A torch tensor of the dtype of `like` over the same memory as `room`."""
    if type(room) is np.ndarray:
        room = room.view(f"V{room.itemsize}")
    return sys.modules["torch"].as_tensor(room.view(f"u{room.itemsize}"), device=like.device).view(like.dtype)


class PeriodicAverager:
    """Averages `parameters` (a list of arrays, in place) over all ranks every `period` steps: local SGD.

        averager = PeriodicAverager(parameters, period=8)
        for batch in batches:
            ...                     # a step of this rank's own
            await averager.step()

    The first `warmup_steps` average after every step. All ranks make the same number of steps. Raises ValueError for a
    `period` below 1; `step` fails as `average_gradients`.
    """

    def __init__(
        self,
        parameters: Any,
        period: int,
        warmup_steps: int = 0,
        group: Group = None,
        *,
        tag: int = 0,
        timeout: Timeout = INHERIT,
    ) -> None:
        if period < 1:
            raise ValueError(f"period must be at least 1, but is {period}")
        self._arrays = list(map(_detached, parameters))
        for one in self._arrays:
            any_array(one, "a parameter")
        self._period = period
        self._warmup_steps = warmup_steps
        self._group = resolve(group)
        self._tag = tag
        self._timeout: Timeout = timeout
        self._steps = 0

    async def step(self) -> bool:
        """End a step; returns whether the parameters were averaged."""
        self._steps += 1
        if self._steps > self._warmup_steps and (self._steps - self._warmup_steps) % self._period:
            return False
        await average_gradients(self._arrays, self._group, tag=self._tag, timeout=self._timeout)
        return True
