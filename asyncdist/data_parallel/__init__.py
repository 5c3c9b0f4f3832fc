"""What data-parallel training needs around its collectives: dividing the data, and averaging the gradients."""

from asyncdist.data_parallel import hooks
from asyncdist.data_parallel.ddp import DistributedDataParallel, PeriodicAverager
from asyncdist.data_parallel.gradients import (
    CommHook,
    GradientBucket,
    GradientBuckets,
    average_gradients,
    broadcast_parameters,
)
from asyncdist.data_parallel.partitioner import DataPartitioner, Partition
from asyncdist.data_parallel.sampler import DistributedSampler

__all__ = [
    "CommHook",
    "DataPartitioner",
    "DistributedDataParallel",
    "DistributedSampler",
    "GradientBucket",
    "GradientBuckets",
    "Partition",
    "PeriodicAverager",
    "average_gradients",
    "broadcast_parameters",
    "hooks",
]
