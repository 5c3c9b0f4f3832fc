"""asyncdist for ordinary scripts: the same functions, which wait, with torch.distributed's calling conventions.

    import asyncdist.blocking as dist

    dist.init_process_group()
    work = dist.all_reduce(x, async_op=True)   # issued now
    ...                                        # compute meanwhile
    work.wait()                                # x holds the sum
    dist.destroy_process_group()

A thread that waits makes the progress, and while none waits one communication thread does, so that operations proceed
while the caller computes. Collectives wait and return None, or with `async_op=True` return a `Work`; `send` and `recv`
wait, `isend` and `irecv` return a `Work`. Any thread may call; calls are issued in the order in which they are made, so
threads that issue collectives at the same time use different tags or groups, as tasks do. Errors are raised in the
calling thread. Inside a running event loop everything that waits raises RuntimeError: use `asyncdist` itself there.

Ctrl-C ends any waiting at once: a send or receive is withdrawn, unless it has matched; another operation goes on, and
`destroy_process_group` aborts the group rather than wait for it.
"""

from asyncdist.api import coalesced, collectives, groups, objects, point_to_point, queries
from asyncdist.api.groups import SHRINK_ABORT, GroupMember
from asyncdist.arrays import reduce_op as reduce_op  # `dist.reduce_op.SUM`, as torch's tutorials write it
from asyncdist.arrays.reduce_op import ReduceOp
from asyncdist.blocking.data_parallel import DistributedDataParallel, DistributedSampler, GradientBuckets
from asyncdist.blocking.group import (
    ProcessGroup,
    destroy_process_group,
    get_default_group,
    init_process_group,
    is_initialized,
)
from asyncdist.blocking.lifting import P2POp, asked, collective, completed, issued
from asyncdist.blocking.mesh import DeviceMesh, init_device_mesh
from asyncdist.blocking.stores import FileStore, HashStore, PrefixStore, Store, TCPStore
from asyncdist.blocking.work import ChunkStream, Work
from asyncdist.collectives.backend import Backend
from asyncdist.data_parallel import DataPartitioner, Partition, gradients
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
    RemoteError,
    RemoteProtocolError,
    StoreLimitError,
    StoreTimeoutError,
    WaitTimeoutError,
    WatchCompactedError,
)
from asyncdist.group.methods.streams import StreamChunk
from asyncdist.group.non_member import NonMember
from asyncdist.group.survivors import RankLost
from asyncdist.group.team import Reduced
from asyncdist.launch.spawn import spawn
from asyncdist.store import TLSConfig
from asyncdist.world.init_method import register_rendezvous_handler

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
    "DeviceMesh",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "DistributedDataParallel",
    "DistributedSampler",
    "FileStore",
    "GradientBuckets",
    "GroupAbortedError",
    "GroupMember",
    "HashStore",
    "LaunchError",
    "LeaseLostError",
    "NonMember",
    "P2POp",
    "Partition",
    "PeerLostError",
    "PrefixStore",
    "ProcessGroup",
    "QueueEmptyError",
    "RankLost",
    "ReduceOp",
    "Reduced",
    "RemoteError",
    "RemoteProtocolError",
    "Store",
    "StoreLimitError",
    "StoreTimeoutError",
    "StreamChunk",
    "TCPStore",
    "TLSConfig",
    "WaitTimeoutError",
    "WatchCompactedError",
    "Work",
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
    "dump",
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
    "init_device_mesh",
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
    "register_rendezvous_handler",
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

all_gather = collective(collectives.all_gather)
all_gather_into_tensor = collective(collectives.all_gather_into_tensor)
all_gather_single = collective(collectives.all_gather_single)
all_reduce = collective(collectives.all_reduce)
barrier = collective(collectives.barrier)
broadcast = collective(collectives.broadcast)
gather = collective(collectives.gather)
reduce = collective(collectives.reduce)
reduce_scatter = collective(collectives.reduce_scatter)
reduce_scatter_single = collective(collectives.reduce_scatter_single)
reduce_scatter_tensor = collective(collectives.reduce_scatter_tensor)
scatter = collective(collectives.scatter)

all_to_all = collective(collectives.all_to_all)
all_to_all_single = collective(collectives.all_to_all_single)

exscan = collective(collectives.exscan)
scan = collective(collectives.scan)

all_gather_coalesced = collective(coalesced.all_gather_coalesced)
all_gather_into_tensor_coalesced = collective(coalesced.all_gather_into_tensor_coalesced)
all_reduce_coalesced = collective(coalesced.all_reduce_coalesced)
broadcast_coalesced = collective(coalesced.broadcast_coalesced)
reduce_scatter_tensor_coalesced = collective(coalesced.reduce_scatter_tensor_coalesced)

all_gather_multigpu = collective(coalesced.all_gather_multigpu)
all_reduce_multigpu = collective(coalesced.all_reduce_multigpu)
broadcast_multigpu = collective(coalesced.broadcast_multigpu)
reduce_multigpu = collective(coalesced.reduce_multigpu)
reduce_scatter_multigpu = collective(coalesced.reduce_scatter_multigpu)

average_gradients = collective(gradients.average_gradients, returns_result=True)
broadcast_parameters = collective(gradients.broadcast_parameters, returns_result=True)

all_gather_array = collective(objects.all_gather_array, returns_result=True)
broadcast_array = collective(objects.broadcast_array, returns_result=True)
gather_array = collective(objects.gather_array, returns_result=True)
scatter_array = collective(objects.scatter_array, returns_result=True)

# torch has no async_op in these, and the root within the group in its place.
all_gather_object = collective(objects.all_gather_object, has_place=False)
broadcast_object_list = collective(objects.broadcast_object_list, has_place=False)
gather_object = collective(objects.gather_object, has_place=False)
recv_object_list = completed(objects.recv_object_list)
scatter_object_list = collective(objects.scatter_object_list, has_place=False)
send_object_list = completed(objects.send_object_list)

all_gather_stream = issued(collectives.all_gather_stream)
broadcast_stream = issued(collectives.broadcast_stream)

irecv = issued(point_to_point.irecv)
isend = issued(point_to_point.isend)
recv = completed(point_to_point.recv)
recv_array = completed(point_to_point.recv_array)
send = completed(point_to_point.send)

batch_isend_irecv = issued(point_to_point.batch_isend_irecv)

new_group = issued(groups.new_group)

new_subgroups = issued(groups.new_subgroups)
new_subgroups_by_enumeration = issued(groups.new_subgroups_by_enumeration)
shrink_group = issued(groups.shrink_group)
split_group = issued(groups.split_group)

empty = asked(queries.empty)
zeros = asked(queries.zeros)
dump = asked(queries.dump)
get_backend = asked(queries.get_backend)
get_backend_config = asked(queries.get_backend_config)
get_default_backend_for_device = asked(queries.get_default_backend_for_device)
get_global_rank = asked(queries.get_global_rank)
get_group_rank = asked(queries.get_group_rank)
get_node_local_rank = asked(queries.get_node_local_rank)
get_pg_count = asked(queries.get_pg_count)
get_process_group_ranks = asked(queries.get_process_group_ranks)
get_rank = asked(queries.get_rank)
get_world_size = asked(queries.get_world_size)
is_available = asked(queries.is_available)
is_backend_available = asked(queries.is_backend_available)
is_gloo_available = asked(queries.is_gloo_available)
is_launched = asked(queries.is_launched)
is_mpi_available = asked(queries.is_mpi_available)
is_nccl_available = asked(queries.is_nccl_available)
is_ucc_available = asked(queries.is_ucc_available)
is_xccl_available = asked(queries.is_xccl_available)
supports_complex = asked(queries.supports_complex)

monitored_barrier = completed(collectives.monitored_barrier)
