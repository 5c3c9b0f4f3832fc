"""What needs no other rank: questions about groups and backends, and arrays in memory that a host's ranks share."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from asyncdist.arrays import reduction
from asyncdist.arrays.host import Array
from asyncdist.arrays.reduce_op import ReduceOpLike
from asyncdist.collectives.backend import Backend, parse_backend
from asyncdist.cuda import provider
from asyncdist.group import default_group as context
from asyncdist.group.default_group import Group, resolve
from asyncdist.group.methods.issuer import rank_number
from asyncdist.group.non_member import NonMember
from asyncdist.group.process_group import DTypeLike, ProcessGroup, Shape
from asyncdist.inspect.dumps import document, write


def dump(path: str | os.PathLike[str], *, reason: str = "", group: Group = None) -> None:
    """Write what this rank has done of late, and what it waits for, into a file, as JSON.

    That are its last 2,000 collectives, messages, waits for the store and what became of groups and ranks: `document`
    of `asyncdist.inspect.dumps`. It holds call sites and keys, never contents of arrays. With ASYNCDIST_DUMP_DIR set
    every rank does so before its group is torn down. Raises OSError, and ValueError without a group.
    """
    world = resolve(group)._core.world
    write(Path(path), document(world.rank, reason or "dump() was called"))


def get_rank(group: Group = None) -> int:
    """This process's rank in the group; -1 if it is not a member."""
    return -1 if isinstance(group, NonMember) else resolve(group).rank


def get_world_size(group: Group = None) -> int:
    """Number of ranks in the group; -1 if this process is not a member."""
    return -1 if isinstance(group, NonMember) else resolve(group).size


def get_backend(group: Group = None) -> str:
    """Name of the group's backend. Raises ValueError if this process is not a member."""
    return resolve(group).backend_name


def get_backend_config(group: Group = None) -> str:
    """The backend of each device, as `cpu:aio,cuda:nccl`. Raises ValueError if this process is not a member."""
    return resolve(group)._core.backend_names.describe()


def get_default_backend_for_device(device: object) -> str:
    """Name of the backend that arrays on `device` (`"cpu"`, `"cuda:0"`, a torch.device) use unless one is chosen.

    Raises ValueError for a device that has none.
    """
    kind = str(device).partition(":")[0]
    backends = parse_backend(None)
    if kind == "cuda" and provider.visible():
        return backends.on_gpus
    if kind != "cpu":
        raise ValueError(f"there is no backend for device {device}")
    return backends.main


def get_pg_count() -> int:
    """Number of open groups of the default group's world that this rank is a member of; 0 where there is none."""
    if not context.has_default_group():
        return 0
    return len(context.default_group().world.groups)


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """The rank that `global_rank` has in `group`. ValueError if it is not a member, TypeError if it is no int."""
    return resolve(group).group_rank_of(global_rank)


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """The global rank of `group_rank`. ValueError if the group has no such rank, TypeError if it is no int."""
    found = resolve(group)
    group_rank = rank_number(group_rank, "group_rank")
    if not 0 <= group_rank < found.size:
        raise ValueError(f"group rank {group_rank} is not in group {found.name}: its ranks are 0 to {found.size - 1}")
    return found.ranks[group_rank]


def get_process_group_ranks(group: Group = None) -> list[int]:
    """The members' global ranks, in group order."""
    return list(resolve(group).ranks)


def get_default_group() -> ProcessGroup:
    """The group that calls without `group=` act on. Raises ValueError if there is none."""
    return context.default_group()


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """LOCAL_RANK as set by the launcher, else `fallback_rank`. Raises RuntimeError if there is neither."""
    text = os.environ.get("LOCAL_RANK")
    if text is not None:
        return int(text)
    if fallback_rank is not None:
        return fallback_rank
    raise RuntimeError("LOCAL_RANK is not set; start with `asyncdist run`, or pass fallback_rank=")


def is_available() -> bool:
    """Whether the package works here: always."""
    return True


def is_initialized() -> bool:
    """Whether there is a default group."""
    return context.has_default_group()


def is_launched() -> bool:
    """Whether a launcher (`asyncdist run`, torchrun) started this process."""
    return "ASYNCDIST_JOB_ID" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def is_backend_available(backend: str) -> bool:
    """Whether `init_process_group(backend)` would find that backend."""
    try:
        Backend(backend)
    except (TypeError, ValueError):
        return False
    return True


def is_gloo_available() -> bool:
    """Whether `gloo` is accepted: always, as an alias of `aio`."""
    return True


def is_nccl_available() -> bool:
    """Whether the `nccl` backend can be used: cupy, a GPU and NCCL are here. Imports cupy where there is a GPU."""
    return is_backend_available(Backend.NCCL)


def is_mpi_available() -> bool:
    """Whether the `mpi` backend can be used."""
    return is_backend_available(Backend.MPI)


def is_ucc_available() -> bool:
    """Whether the `ucc` backend can be used: never."""
    return False


def is_xccl_available() -> bool:
    """Whether the `xccl` backend can be used: never."""
    return False


def supports_complex(reduceOp: ReduceOpLike) -> bool:
    """Whether complex arrays can be reduced with this operation: sums, products and means can."""
    try:
        reduction.validate(reduceOp, np.dtype(np.complex128))
    except TypeError:
        return False
    return True


def empty(shape: Shape, dtype: DTypeLike = np.float32, group: Group = None) -> Array:
    """A C-contiguous array of `shape` and `dtype`, not initialized, as `numpy.empty` makes it.

    Where memory is not shared (another transport or system, ASYNCDIST_EMPTY_BYTES reached) it is just that. Local: the
    other ranks need not call it. Raises TypeError and ValueError as numpy does.

    They stay valid as long as anyone uses them, whatever becomes of the group, and their memory goes with the last view
    of them. A forked child has the parent's memory, not a copy of it: what either writes, both see.
    """
    return resolve(group).empty(shape, dtype)


def zeros(shape: Shape, dtype: DTypeLike = np.float32, group: Group = None) -> Array:
    """As `empty`, filled with zeros.

    They stay valid as long as anyone uses them, whatever becomes of the group, and their memory goes with the last view
    of them. A forked child has the parent's memory, not a copy of it: what either writes, both see.
    """
    return resolve(group).zeros(shape, dtype)
