"""What data-parallel training needs around its collectives: dividing the data, and averaging the gradients."""

from asyncdist.data_parallel.gradients import GradientBuckets, average_gradients, broadcast_parameters
from asyncdist.data_parallel.partitioner import DataPartitioner, Partition
from asyncdist.data_parallel.sampler import DistributedSampler

__all__ = [
    "DataPartitioner",
    "DistributedSampler",
    "GradientBuckets",
    "Partition",
    "average_gradients",
    "broadcast_parameters",
]
