"""torch.distributed on asyncdist: backend "asyncdist" for CPU tensors, a Store, a rendezvous, and Works to await.

    import torch.distributed as dist
    import asyncdist.torch

    dist.init_process_group("asyncdist")              # or "cpu:asyncdist,cuda:nccl"
    dist.all_reduce(tensor)
    await asyncdist.torch.wait(dist.all_reduce(tensor, async_op=True))

Where asyncdist is installed, torch registers the backend by itself when it is imported. Needs the extra `torch`.
"""

from asyncdist.torch.process_group import ProcessGroup
from asyncdist.torch.stores import Store
from asyncdist.torch.work import Work, wait
from asyncdist_torch import register

__all__ = ["ProcessGroup", "Store", "Work", "register", "wait"]

register()
