"""ProcessGroup: torch.distributed's calls, carried out by a group of asyncdist in the communication thread.

torch calls a method with lists of tensors and an options object, from Python or through C++. A method says which
operations of `asyncdist.ProcessGroup` that is, on arrays over the tensors' memory; ranks are group ranks in both.

The default group meets by the store that torch gives, and is a world; groups of its ranks are groups of that world, and
need not meet. A group made beside a default group of another backend is a world of its own.
"""

from __future__ import annotations

import asyncio
import functools
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from asyncdist import blocking
from asyncdist.arrays.host import Array, host_array
from asyncdist.arrays.reduce_op import PremulSum, ReduceOp
from asyncdist.blocking.group import inner_of, session_of
from asyncdist.errors import CollectiveTimeoutError, DistError, GroupAbortedError
from asyncdist.torch.stores import store_of
from asyncdist.torch.work import NO_TIMEOUT, TIMED_OUT, Work, in_torch_words, outside_loop

__all__ = ["ProcessGroup", "create"]

Method = TypeVar("Method", bound=Callable[..., Any])

BACKEND: Final = "asyncdist"
CPU: Final = torch.device("cpu")
OPTION_NAMES: Final = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
"""Arguments of the short forms, `group.broadcast(tensor, root)`, and what they are called in the options."""

REDUCTIONS: Final = {getattr(dist.ReduceOp.RedOpType, op.name): op for op in ReduceOp}
"""Ours by torch's."""

_default: ProcessGroup | None = None
"""torch's default group, where it is ours."""


def array_of(tensor: torch.Tensor) -> Array:
    """A numpy array over the memory of a CPU tensor. Raises TypeError for what numpy cannot see."""
    try:
        array: Array = tensor.numpy()
    except (RuntimeError, TypeError):  # a gradient is required; bfloat16; or it is on another device
        array = host_array(tensor)
    return array


def arrays_of(tensors: Sequence[torch.Tensor]) -> list[Array]:
    return [array_of(tensor) for tensor in tensors]


def reduction_of(opts: Any) -> ReduceOp | PremulSum:
    given = opts.reduceOp
    op = REDUCTIONS[given.op]
    return op if op is not ReduceOp.PREMUL_SUM else op(given.__getstate__()[1])


def first_tensor(values: Sequence[Any]) -> torch.Tensor | None:
    """The first tensor in lists of lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, list) and (found := first_tensor(value)) is not None:
            return found
    return None


def operation(options: Any, count: int, *names: str) -> Callable[[Method], Method]:
    """Let a method of `count` (lists of) tensors and `options` be called in torch's other ways as well.

    Without options, and in the short form: tensors or a list instead of lists, and the arguments `names`. Tensors that
    are not on the CPU go to the backend of their device.
    """

    def decorated(method: Method) -> Method:
        @functools.wraps(method)
        def taken(self: ProcessGroup, *arguments: Any, **named: Any) -> Any:
            tensor = first_tensor(arguments)
            if tensor is not None and not tensor.is_cpu:
                return getattr(self._group_of(tensor.device), method.__name__)(*arguments, **named)
            if named or not arguments or (options is not None and type(arguments[-1]) is not options):
                arguments = _completed(options, count, names, arguments, named)
            return method(self, *arguments)

        return taken  # type: ignore[return-value] # it takes what the method takes, and more

    return decorated


def _completed(
    options: Any, count: int, names: Sequence[str], arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, ...]:
    """The arguments of a method, from those of a call in another way."""
    if options is None:
        return (*arguments, *named.values())
    tensors, rest = arguments[:count], arguments[count:]
    opts = named.pop("opts", None) or options()
    for name, value in (*zip(names, rest, strict=False), *named.items()):
        if value is not None:
            setattr(opts, OPTION_NAMES[name], value)
    if names and any(isinstance(each, torch.Tensor) for each in tensors):
        tensors = tuple([each] for each in tensors)
    return (*tensors, opts)


class ProcessGroup(dist.ProcessGroup):  # type: ignore[misc] # torch is not typed here
    """A group of torch.distributed whose CPU tensors asyncdist moves, in place and without copies.

    Tensors of other devices go to the backends that `init_process_group("cpu:asyncdist,cuda:nccl")` names for them.
    """

    supports_splitting = True
    supports_coalescing = True
    supports_time_estimate = False
    backend_name = BACKEND

    def __init__(self, group: blocking.ProcessGroup, store: dist.Store, timeout: timedelta) -> None:
        super().__init__(group.rank, group.size)
        inner = inner_of(group)
        session = session_of(inner)
        assert session is not None, "it is open"
        self.group = group
        self._inner = inner
        self._session = session
        self._store = store
        self._timeout = timeout
        self._sequence = 0
        self._coalescing: list[Work] | None = None
        self._names = {"name": "", "desc": ""}
        self._others: Any = None

    # What an operation becomes.

    def _issue(
        self,
        name: str,
        *calls: tuple[Any, ...],
        tensors: Any = (),
        opts: Any = None,
        finish: Callable[[list[Any]], None] | None = None,
        inputs: Sequence[torch.Tensor] | None = None,
    ) -> Work:
        """Issue `calls`, each an operation of the group and its arguments.

        The Work's result is `tensors`, once `finish` has had the operations' results. A profile shows `inputs`, which
        are `tensors` too unless given.
        """
        timeout = self._timeout if opts is None or opts.timeout <= NO_TIMEOUT else opts.timeout
        profiled = torch.autograd._profiler_enabled()
        inner, session = self._inner, self._session
        if len(calls) == 1 and not profiled and opts is not None and not opts.asyncOp and self._coalescing is None:
            ((method, *arguments),) = calls
            try:
                if asyncio._get_running_loop() is None:
                    result = session.complete(getattr(inner, method), *arguments, timeout=timeout)
                else:
                    with outside_loop():
                        result = session.complete(getattr(inner, method), *arguments, timeout=timeout)
            except CollectiveTimeoutError as error:
                raise in_torch_words(error, TIMED_OUT) from None
            if finish is not None:
                finish([result])
            return Work((), tensors)
        records = []
        if profiled:
            shown = list(tensors if inputs is None else inputs)
            records.append(torch._C._profiler._RecordFunctionFast(f"{self.backend_name}:{name}", shown))
            records[0].__enter__()
        works = [session.call(getattr(inner, method), *arguments, timeout=timeout) for method, *arguments in calls]
        work = Work(works, tensors, finish)
        if records:
            work.record(records)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _collective(self, name: str, *calls: tuple[Any, ...], **options: Any) -> Work:
        self._sequence += 1
        return self._issue(name, *calls, **options)

    def _group_of(self, device: torch.device) -> Any:
        """torch's own group of the devices that are not ours, made when it is first needed, by all ranks."""
        if self._others is None:
            backends = dict(pair.split(":") for pair in dist.get_backend_config(self).split(","))
            others = [f"{kind}:{name}" for kind, name in backends.items() if name != self.backend_name]
            if not any(pair.startswith(f"{device.type}:") for pair in others):
                raise RuntimeError(
                    f"group {self._inner.name}: backend {self.backend_name!r} moves CPU tensors, and this one is on "
                    f'{device}: name a backend for it, as in init_process_group("cpu:asyncdist,cuda:nccl")'
                )
            self._others, _ = c10d._new_process_group_helper(
                self.size(),
                self.rank(),
                dist.get_process_group_ranks(self),
                dist.Backend(",".join(others)),
                dist.PrefixStore("others", self._store),
                f"{self._names['name']}/others",
                timeout=self._timeout,
            )
        return self._others

    # Collectives.

    @operation(dist.AllreduceOptions, 1, "op", "timeout")
    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        (tensor,) = tensors
        if tensor.is_sparse:
            return self._all_reduce_sparse(tensor, opts)
        call = "all_reduce", array_of(tensor), reduction_of(opts)
        return self._collective("all_reduce", call, tensors=tensors, opts=opts)

    def _all_reduce_sparse(self, tensor: torch.Tensor, opts: Any) -> Work:
        if reduction_of(opts) is not ReduceOp.SUM:
            raise TypeError(f"sparse tensors can be summed only, not {reduction_of(opts)}")
        own = tensor.detach().coalesce()

        def add_up(results: list[Any]) -> None:
            indices, values = ([torch.from_numpy(part) for part in parts] for parts in results)
            total = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), tensor.shape)
            with torch.no_grad():
                tensor.copy_(total.coalesce())

        calls = [("all_gather_array", array_of(part)) for part in (own.indices(), own.values())]
        return self._collective("all_reduce", *calls, tensors=[tensor], opts=opts, finish=add_up)

    @operation(dist.AllreduceCoalescedOptions, 1)
    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        op = reduction_of(opts)
        if len({tensor.dtype for tensor in tensors}) == 1 and len(tensors) > 1:
            calls: list[tuple[Any, ...]] = [("all_reduce_coalesced", arrays_of(tensors), op)]
        else:
            calls = [("all_reduce", array_of(tensor), op) for tensor in tensors]
        return self._collective("all_reduce", *calls, tensors=tensors, opts=opts)

    @operation(dist.BroadcastOptions, 1, "root", "timeout")
    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        (tensor,) = tensors
        call = "broadcast", array_of(tensor), opts.rootRank
        return self._collective("broadcast", call, tensors=tensors, opts=opts)

    @operation(dist.ReduceOptions, 1, "root", "op", "timeout")
    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        (tensor,) = tensors
        call = "reduce", array_of(tensor), opts.rootRank, reduction_of(opts)
        return self._collective("reduce", call, tensors=tensors, opts=opts)

    @operation(c10d.AllgatherOptions, 2, "timeout")
    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Work:
        (places,), (tensor,) = outputs, inputs
        call = "all_gather", arrays_of(places), array_of(tensor)
        return self._collective("all_gather", call, tensors=places, opts=opts, inputs=inputs)

    @operation(c10d.AllgatherOptions, 2)
    def allgather_coalesced(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Work:
        calls = [
            ("all_gather", [array_of(of_rank[place]) for of_rank in outputs], array_of(tensor))
            for place, tensor in enumerate(inputs)
        ]
        return self._collective("all_gather", *calls, tensors=outputs, opts=opts, inputs=inputs)

    @operation(c10d.AllgatherOptions, 2)
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Work:
        call = "all_gather_single", array_of(output), array_of(tensor)
        return self._collective("all_gather_single", call, tensors=[output], opts=opts, inputs=[tensor])

    @operation(c10d.AllgatherOptions, 2)
    def all_gather_single_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Work:
        calls = [("all_gather_single", *map(array_of, pair)) for pair in zip(outputs, inputs, strict=True)]
        return self._collective("all_gather_single", *calls, tensors=outputs, opts=opts, inputs=inputs)

    @operation(c10d.GatherOptions, 2, "root", "timeout")
    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Work:
        (tensor,) = inputs
        places = outputs[0] if outputs else None
        call = "gather", array_of(tensor), places and arrays_of(places), opts.rootRank
        return self._collective("gather", call, tensors=places or [], opts=opts, inputs=inputs)

    @operation(c10d.ScatterOptions, 2, "root", "timeout")
    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Work:
        (output,) = outputs
        call = "scatter", array_of(output), arrays_of(inputs[0]) if inputs else None, opts.rootRank
        return self._collective("scatter", call, tensors=outputs, opts=opts, inputs=inputs[0] if inputs else [])

    @operation(dist.ReduceScatterOptions, 2, "op", "timeout")
    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Work:
        (output,), (parts,) = outputs, inputs
        call = "reduce_scatter", array_of(output), arrays_of(parts), reduction_of(opts)
        return self._collective("reduce_scatter", call, tensors=outputs, opts=opts, inputs=parts)

    @operation(dist.ReduceScatterOptions, 2)
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Work:
        call = "reduce_scatter_single", array_of(output), array_of(tensor), reduction_of(opts)
        return self._collective("reduce_scatter_single", call, tensors=[output], opts=opts, inputs=[tensor])

    @operation(dist.ReduceScatterOptions, 2)
    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> Work:
        op = reduction_of(opts)
        calls = [("reduce_scatter_single", *map(array_of, pair), op) for pair in zip(outputs, inputs, strict=True)]
        return self._collective("reduce_scatter_single", *calls, tensors=outputs, opts=opts, inputs=inputs)

    @operation(dist.AllToAllOptions, 2)
    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Work:
        call = "all_to_all", arrays_of(outputs), arrays_of(inputs)
        return self._collective("all_to_all", call, tensors=outputs, opts=opts, inputs=inputs)

    @operation(dist.AllToAllOptions, 4)
    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: list[int], input_splits: list[int], opts: Any
    ) -> Work:
        call = "all_to_all_single", array_of(output), array_of(tensor), output_splits, input_splits
        return self._collective("all_to_all_single", call, tensors=[output], opts=opts, inputs=[tensor])

    # Their older names, of which torch still calls some.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    @operation(dist.BarrierOptions, 0, "timeout")
    def barrier(self, opts: Any) -> Work:
        return self._collective("barrier", ("barrier",), opts=opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; when the time is over, the error names those that did not come, on every rank."""
        timeout = self._timeout if timeout is None else timeout
        try:
            with outside_loop():
                self._session.complete(self._inner.monitored_barrier, timeout, wait_all_ranks)
        except DistError as error:
            raise in_torch_words(error, self._what_failed(error, timeout)) from None

    def _what_failed(self, error: DistError, timeout: timedelta) -> str:
        """The beginning of torch's message about a monitored barrier, which programs may look for."""
        rank, milliseconds = self.rank(), int(timeout.total_seconds() * 1000)
        if rank:
            return (
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                "from rank 0"
            )
        missing = [self._inner.ranks.index(each) for each in getattr(error, "missing", ())]
        if not missing or not milliseconds:
            return f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {milliseconds} ms"
        ranks = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        return f"[Rank 0]: {ranks} failed to pass monitoredBarrier in {milliseconds} ms"

    # Messages.

    @operation(None, 1)
    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        return self._issue("send", ("isend", array_of(tensors[0]), rank, tag), tensors=tensors)

    @operation(None, 1)
    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        return self._issue("recv", ("irecv", array_of(tensors[0]), rank, tag), tensors=tensors)

    @operation(None, 1)
    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Work:
        return self._issue("recvAnySource", ("irecv", array_of(tensors[0]), None, tag), tensors=tensors)

    # Several operations as one.

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            self._group_of(device)._start_coalescing(device)
        else:
            self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type != "cpu":
            return self._group_of(device)._end_coalescing(device)
        issued, self._coalescing = self._coalescing or [], None
        return Work([work for each in issued for work in each._works], [each._tensors for each in issued])

    # Groups of it, and its end.

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroup | None:
        """A group of some of this one's ranks, called by all of them; None on a rank that is not among them."""
        if self.rank() not in ranks:
            return None
        global_ranks = [self._inner.ranks[rank] for rank in ranks]
        made = self._subgroup(global_ranks, group_name or "split", timeout or self._timeout, self._store)
        made._names.update(name=group_name or "", desc=group_desc or "")
        return made

    splitGroup = split_group

    def _subgroup(self, ranks: Sequence[int], name: str, timeout: timedelta, store: dist.Store) -> ProcessGroup:
        """The group of those ranks of our world, of which this one is a member."""
        timeout_s = timeout.total_seconds()
        group = self._session.call(self._inner.make_subgroup, ranks, timeout_s, name, members_only=True)
        return type(self)(group, store, timeout)

    def abort(self) -> None:
        """Give up what is under way, here and on all other ranks, where it raises GroupAbortedError; and leave."""
        if self._others is not None:
            self._others.abort()
        self.group.abort("the process group was aborted by torch.distributed")
        self.shutdown()

    def shutdown(self) -> None:
        """Wait for what is under way and leave. What went wrong and was never asked about is a warning."""
        if self._others is not None:
            self._others.shutdown()
        try:
            with outside_loop():
                self.group.close()
        except GroupAbortedError:
            pass
        except DistError as error:
            warnings.warn(f"of group {self._inner.name} nobody had asked about: {error}", stacklevel=2)

    # What torch asks of a group.

    def getBackendName(self) -> str:
        return self.backend_name

    def getGroupName(self) -> str:
        return self._names["name"]

    def setGroupName(self, name: str) -> None:
        self._names["name"] = name

    def getGroupDesc(self) -> str:
        return self._names["desc"]

    def setGroupDesc(self, desc: str) -> None:
        self._names["desc"] = desc

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU] if self._others is None else [CPU, *self._others._device_types]

    def _get_backend(self, device: torch.device | str) -> Any:
        device = torch.device(device)
        if device.type == "cpu" or self not in c10d._world.pg_map:  # while it is made
            return self
        return self._group_of(device)._get_backend(device)

    @property
    def options(self) -> Any:
        """What torch copies for groups that are split off."""
        return torch._C._distributed_c10d.Backend.Options(self.backend_name, self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """The time-out of operations that are given none, from now on."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Ranks count from 0 by themselves."""

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Only hooks would ask for it."""


def create(options: Any, kind: type[ProcessGroup] = ProcessGroup) -> ProcessGroup:
    """Make the group of torch's `_DistributedBackendOptions`; called by all its ranks."""
    global _default
    ranks = list(options.global_ranks_in_group)
    if ranks and _default is not None and not _default.group.closed:
        return _default._subgroup(ranks, options.group_id, options.timeout, options.store)
    with outside_loop():
        group = blocking.init_process_group(
            store=store_of(options.store, options.group_id),
            rank=options.group_rank,
            world_size=options.group_size,
            timeout=options.timeout,
            group_name=f"torch-{options.group_id}",
        )
    made = kind(group, options.store, options.timeout)
    if not ranks:
        _default = made
    return made
