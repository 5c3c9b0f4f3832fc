"""asyncdist: torch.distributed's job, natively for asyncio.

    import asyncdist as dist

    async def main():
        async with dist.init_process_group() as group:   # as `asyncdist run` set the environment
            work = dist.all_reduce(x)                    # issued now, in call order
            ...                                          # compute meanwhile
            await work                                   # x holds the sum

    dist.run(main())

Processes find each other through a store, form groups, and await point-to-point messages and collectives on arrays.
Importing this package opens nothing and starts nothing.
"""

from asyncdist.api.arrays import all_gather_array, broadcast_array, gather_array, scatter_array
from asyncdist.api.batch import P2POp, batch_isend_irecv
from asyncdist.api.coalesced import (
    all_gather_coalesced,
    all_gather_into_tensor_coalesced,
    all_reduce_coalesced,
    broadcast_coalesced,
    reduce_scatter_tensor_coalesced,
)
from asyncdist.api.collectives import (
    all_gather,
    all_gather_into_tensor,
    all_gather_single,
    all_reduce,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
    scatter,
)
from asyncdist.api.exchange import all_to_all, all_to_all_single
from asyncdist.api.groups import GroupMember, new_group
from asyncdist.api.manual import complete_help as _complete_help
from asyncdist.api.memory import empty, zeros
from asyncdist.api.monitored import monitored_barrier
from asyncdist.api.multi_device import (
    all_gather_multigpu,
    all_reduce_multigpu,
    broadcast_multigpu,
    reduce_multigpu,
    reduce_scatter_multigpu,
)
from asyncdist.api.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from asyncdist.api.point_to_point import irecv, isend, recv, recv_array, send
from asyncdist.api.queries import (
    destroy_process_group,
    get_backend,
    get_backend_config,
    get_default_backend_for_device,
    get_default_group,
    get_global_rank,
    get_group_rank,
    get_node_local_rank,
    get_pg_count,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    is_available,
    is_backend_available,
    is_gloo_available,
    is_initialized,
    is_launched,
    is_mpi_available,
    is_nccl_available,
    is_ucc_available,
    is_xccl_available,
    supports_complex,
)
from asyncdist.api.scans import exscan, scan
from asyncdist.api.streams import all_gather_stream, broadcast_stream
from asyncdist.api.subgroups import (
    SHRINK_ABORT,
    new_subgroups,
    new_subgroups_by_enumeration,
    shrink_group,
    split_group,
)
from asyncdist.arrays import reduce_op as reduce_op  # `dist.reduce_op.SUM`, as torch's tutorials write it
from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.collectives.backend import Backend
from asyncdist.concurrency.loop import run
from asyncdist.data_parallel import (
    DataPartitioner,
    DistributedSampler,
    GradientBuckets,
    Partition,
    average_gradients,
    broadcast_parameters,
)
from asyncdist.errors import (
    ClosedError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ConnectTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    GroupAbortedError,
    LaunchError,
    LeaseLostError,
    PeerLostError,
    QueueEmptyError,
    RemoteProtocolError,
    StoreLimitError,
    StoreTimeoutError,
    WaitTimeoutError,
    WatchCompactedError,
)
from asyncdist.group.methods.streams import ChunkStream, StreamChunk
from asyncdist.group.non_member import NonMember
from asyncdist.group.process_group import ProcessGroup
from asyncdist.init import init_process_group
from asyncdist.launch.spawn import spawn
from asyncdist.store import (
    FileStore,
    HashStore,
    Lease,
    Lock,
    MemberEvent,
    Membership,
    PrefixStore,
    Store,
    TCPStore,
    TLSConfig,
    Watch,
    WatchEvent,
)
from asyncdist.work import Work

__version__ = "0.1.0"

__all__ = [
    "SHRINK_ABORT",
    "Backend",
    "ChunkStream",
    "ClosedError",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ConnectTimeoutError",
    "DataPartitioner",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "DistributedSampler",
    "FileStore",
    "GradientBuckets",
    "GroupAbortedError",
    "GroupMember",
    "HashStore",
    "LaunchError",
    "Lease",
    "LeaseLostError",
    "Lock",
    "MemberEvent",
    "Membership",
    "NonMember",
    "P2POp",
    "Partition",
    "PeerLostError",
    "PrefixStore",
    "ProcessGroup",
    "QueueEmptyError",
    "ReduceOp",
    "RemoteProtocolError",
    "Store",
    "StoreLimitError",
    "StoreTimeoutError",
    "StreamChunk",
    "TCPStore",
    "TLSConfig",
    "WaitTimeoutError",
    "Watch",
    "WatchCompactedError",
    "WatchEvent",
    "Work",
    "__version__",
    "all_gather",
    "all_gather_array",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_multigpu",
    "all_gather_object",
    "all_gather_single",
    "all_gather_stream",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce_multigpu",
    "all_to_all",
    "all_to_all_single",
    "average_gradients",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_array",
    "broadcast_coalesced",
    "broadcast_multigpu",
    "broadcast_object_list",
    "broadcast_parameters",
    "broadcast_stream",
    "destroy_process_group",
    "empty",
    "exscan",
    "gather",
    "gather_array",
    "gather_object",
    "get_backend",
    "get_backend_config",
    "get_default_backend_for_device",
    "get_default_group",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_launched",
    "is_mpi_available",
    "is_nccl_available",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "recv",
    "recv_array",
    "recv_object_list",
    "reduce",
    "reduce_multigpu",
    "reduce_scatter",
    "reduce_scatter_multigpu",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "run",
    "scan",
    "scatter",
    "scatter_array",
    "scatter_object_list",
    "send",
    "send_object_list",
    "shrink_group",
    "spawn",
    "split_group",
    "supports_complex",
    "zeros",
]

_complete_help(function for name, function in list(globals().items()) if name in __all__ and callable(function))
