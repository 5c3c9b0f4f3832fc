"""What the processes of a torch job do in tests. A program of its own: imports torch once and forks jobs on request.

Each line of its input is a JSON array: the name of a function below, how many processes are to run it, and its further
arguments; a process calls the function with its rank, the number of processes and those. Each line of the output is the
list of their exit statuses; what they print goes to stderr.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.run

torch.set_num_threads(1)
TIMEOUT = datetime.timedelta(seconds=20)


def store(port: int, **options: Any) -> dist.TCPStore:
    """A store that is hosted elsewhere."""
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT, **options)


def race(rank: int, world_size: int, port: int) -> None:
    """Take a lock by compare_set, count under it, and add, append and pop beside each other."""
    mine = store(port, world_size=world_size)
    for _ in range(50):
        while mine.compare_set("lock", "", str(rank)) != str(rank).encode():
            pass
        count = int(mine.get("count")) if mine.check(["count"]) else 0
        mine.set("count", str(count + 1))
        assert mine.delete_key("lock")
        mine.add("sum", rank)
        mine.append("log", str(rank))
        mine.queue_push("queue", f"{rank}")
    mine.barrier("pushed", world_size)
    for _ in range(50):  # as many blocking pops as there are items, from all processes at the same time
        mine.append("popped", mine.queue_pop("queue").decode())
    mine.barrier("done", world_size)
    assert mine.get("count") == b"%d" % (50 * world_size)
    assert mine.add("sum", 0) == 50 * sum(range(world_size))
    for log in (mine.get("log"), mine.get("popped")):
        assert sorted(log.decode()) == sorted(str(rank) for rank in range(world_size) for _ in range(50))
    assert mine.queue_len("queue") == 0


def hand_over(rank: int, world_size: int, port: int) -> None:
    """Pop from queues that are always empty: every item wakes exactly one, and no pop comes too late."""
    mine = store(port)
    if rank == 0:
        for item in range(30 * (world_size - 1)):
            mine.queue_push("jobs", str(item))
    else:
        for _ in range(30):
            mine.queue_pop("jobs")
    for _ in range(20):
        mine.barrier("again", world_size)  # one key, many rounds
    assert mine.get("again") == b"%d" % (20 * world_size)


def wait_and_set(rank: int, world_size: int, port: int) -> None:
    """Pass a word round in a ring, many times."""
    mine = store(port)
    for lap in range(20):
        if rank or lap:
            mine.wait([f"{lap if rank else lap - 1}/{(rank - 1) % world_size}"], TIMEOUT)
        mine.set(f"{lap}/{rank}", "passed")
    last = [f"{lap}/{r}" for lap in range(20) for r in range(world_size)]
    assert mine.multi_get(last) == [b"passed"] * len(last)


def collectives(rank: int, world_size: int) -> None:
    """A few of gloo's collectives, in the whole world and in a group of the first two."""
    x = torch.full((1000,), float(rank + 1))
    dist.all_reduce(x)
    assert x[0] == world_size * (world_size + 1) / 2
    pair = dist.new_group([0, 1])
    if rank < 2:
        y = torch.tensor([rank])
        dist.broadcast(y, 1, group=pair)
        assert y[0] == 1
    names: list[Any] = [None] * world_size
    dist.all_gather_object(names, f"rank {rank}")
    assert names == [f"rank {r}" for r in range(world_size)]
    dist.monitored_barrier()
    dist.destroy_process_group()


def gloo(rank: int, world_size: int, port: int) -> None:
    """A job that gives its store to init_process_group."""
    dist.init_process_group("gloo", store=store(port), rank=rank, world_size=world_size, timeout=TIMEOUT)
    collectives(rank, world_size)


def env(rank: int, world_size: int, port: int) -> None:
    """A job that finds the store by its environment, in which somebody says that the store is hosted already."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    dist.init_process_group("gloo", timeout=TIMEOUT)
    collectives(rank, world_size)


def store_verbs(rank: int, world_size: int, port: int) -> None:
    """asyncdist's store as torch's, itself and within PrefixStores."""
    from asyncdist.torch import Store

    mine = Store("127.0.0.1", port, "verbs", TIMEOUT)
    for store in (dist.PrefixStore("b", dist.PrefixStore("a", mine)), mine):
        if rank == 0:
            store.set("key", "value")
            store.append("key", "!")
            store.multi_set(["x", "y"], ["1", "2"])
        store.barrier("set", world_size)
        assert store.get("key") == b"value!", store.get("key")
        assert store.multi_get(["x", "y"]) == [b"1", b"2"]
        store.add("count", rank + 1)
        store.barrier("came", world_size)
        assert store.add("count", 0) == 3
        assert store.check(["x", "count"])
        assert not store.check(["z"])
        assert store.compare_set("x", "0", "9") == b"1"
        store.barrier("compared", world_size)
        if rank == 0:
            assert store.delete_key("y")
            assert not store.delete_key("y")
    if rank == 0:
        mine.queue_push("jobs", "one")
        assert "x" in mine.list_keys()
    else:
        assert mine.queue_pop("jobs") == b"one"
    with contextlib.suppress(dist.DistStoreError):
        mine.wait(["never"], datetime.timedelta(milliseconds=50))
        raise AssertionError("the key is there")
    other = mine.clone()
    assert other.get("x") == b"1"
    assert other.timeout == TIMEOUT
    other.close()
    mine.close()
    with contextlib.suppress(dist.DistNetworkError):
        Store("127.0.0.1", 1, timeout=datetime.timedelta(seconds=0.2))
        raise AssertionError("nobody listens there")


def world_by_store(rank: int, world_size: int, port: int) -> None:
    """A world that meets by such a store, and one that meets again by it."""
    from asyncdist.torch import Store

    mine = Store("127.0.0.1", port, "world", TIMEOUT)
    for _ in range(2):
        dist.init_process_group("asyncdist", store=mine, rank=rank, world_size=world_size, timeout=TIMEOUT)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == world_size
        dist.destroy_process_group()
    mine.close()


def mixed_devices(rank: int, world_size: int, port: int) -> None:
    """A group whose tensors of another device go to another backend."""
    import torch.testing._internal.distributed.fake_pg

    import asyncdist.torch

    assert asyncdist.torch, torch.testing  # both register a backend
    dist.init_process_group(
        "cpu:asyncdist,meta:fake", store=store(port), rank=rank, world_size=world_size, timeout=TIMEOUT
    )
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == world_size
    dist.all_reduce(torch.ones(1, device="meta"))
    group = dist.new_group()
    dist.all_gather([torch.ones(1, device="meta")] * world_size, torch.ones(1, device="meta"), group=group)
    dist.all_reduce(tensor, group=group)
    assert dist.get_backend(group) == "cpu:asyncdist,meta:fake"
    dist.destroy_process_group()


def hang(rank: int, world_size: int, port: int, key: str) -> None:
    """Wait for a key that never comes, until the store goes."""
    try:
        store(port).wait([key], TIMEOUT)
    except dist.DistNetworkError:
        return
    raise AssertionError("the wait ended")


def agent(rank: int, world_size: int, *arguments: str) -> None:
    """What `torchrun` does."""
    torch.distributed.run.main(arguments)


PROGRAMS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (race, hand_over, wait_and_set, gloo, env, hang, agent, store_verbs, world_by_store, mixed_devices)
}


def start(name: str, rank: int, world_size: int, arguments: list[Any]) -> int:
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.dup2(2, 1)
        PROGRAMS[name](rank, world_size, *arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Run jobs until the input ends."""
    for line in sys.stdin:
        name, world_size, *arguments = json.loads(line)
        processes = [start(name, rank, world_size, arguments) for rank in range(world_size)]
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
