"""DistributedSampler: which items of a data set a rank takes in each epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np

from asyncdist.api.queries import get_rank, get_world_size


class DistributedSampler:
    """Iterates over the indices of `dataset` (anything with a length) that are this rank's, the same number on all.

    Arguments and division are those of torch.utils.data.DistributedSampler: of one order of all indices, shuffled by
    `seed` and the epoch, rank r takes every `num_replicas`-th from the r-th on. Where the length does not divide evenly
    the first indices are taken a second time, or with `drop_last` the last ones not at all. The shuffled order itself
    is numpy's, not torch's; all ranks give the same `seed`.

    `num_replicas` and `rank` are by default the default group's size and this rank in it. Raises ValueError where there
    is no default group, for a rank that is not among the replicas, and for a negative seed; TypeError for a data set
    that has no length.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.num_replicas = get_world_size() if num_replicas is None else num_replicas
        self.rank = get_rank() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank={self.rank} is not among the ranks 0 to {self.num_replicas - 1}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, but is {seed}")
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        len(self)  # raises TypeError for what has no length

    def set_epoch(self, epoch: int) -> None:
        """Shuffle differently from now on; call it with the same number on all ranks before each epoch's iteration.

        Raises ValueError for a negative one.
        """
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, but is {epoch}")
        self.epoch = epoch

    def __len__(self) -> int:
        """Indices of one rank: the length divided by the number of ranks, rounded down with `drop_last`, else up."""
        length = len(self.dataset)
        return length // self.num_replicas if self.drop_last else -(-length // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        length, total = len(self.dataset), len(self) * self.num_replicas
        order = np.arange(length)
        if self.shuffle:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(length)
        mine = np.arange(self.rank, total, self.num_replicas)
        return iter(order[mine % length].tolist() if length else [])
