"""Calls between ranks, on the connections of a process group.

from asyncdist import rpc

@rpc.register
async def add(x, y):
    return x + y

async with dist.init_process_group() as group, rpc.serve():
    if group.rank == 0:
        print(await rpc.call(1, "add", 2, 3))
"""

from asyncdist.rpc.agent import Reference, call, create, serve, statistics, stream
from asyncdist.rpc.registry import register

__all__ = ["Reference", "call", "create", "register", "serve", "statistics", "stream"]
