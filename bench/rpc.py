"""An echo by `rpc.call`, beside xoscar and grpc.aio, and beside a plain round trip of this package.

    python -m bench.rpc --calls 2000 --rounds 7

Two processes on one host. All kinds alternate, and share the two event loops: rank 1 answers to each of them. They send
1 KiB of bytes and 1 MiB as an array, which for gRPC becomes bytes and an array again. The round trip is `send` and
`recv` both ways, into the same memory each time.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import click
import numpy as np

import asyncdist as dist
from asyncdist import rpc
from bench.candidates import missing_module

PROMISED = 2.0
"""Most that an echo may take, compared with the round trip."""
SIZES = (1 << 10, 1 << 20)
ECHO = "/bench/echo"

Echo = Callable[[Any], Awaitable[Any]]


@rpc.register
def echo(value: Any) -> Any:
    """What the callee runs."""
    return value


async def grpc_echo(rank: int, stack: AsyncExitStack) -> Echo | None:
    """The same by gRPC, without protobuf: bytes as they are."""
    grpc = importlib.import_module("grpc")
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    address: list[Any] = [None]
    if rank == 1:

        async def answer(request: bytes, _context: Any) -> bytes:
            return request

        server = grpc.aio.server(options=options)
        handlers = {"echo": grpc.unary_unary_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bench", handlers)])
        address = [f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"]
        await server.start()
        stack.push_async_callback(server.stop, 0)
    await dist.broadcast_object_list(address, 1)
    if rank == 1:
        return None
    method = (await stack.enter_async_context(grpc.aio.insecure_channel(address[0], options))).unary_unary(ECHO)

    async def call(value: Any) -> Any:
        if isinstance(value, bytes):
            return await method(value)
        return np.frombuffer(await method(value.tobytes()), np.uint8)

    return call


async def xoscar_echo(rank: int, stack: AsyncExitStack) -> Echo | None:
    """The same by an actor of xoscar."""
    xoscar = importlib.import_module("xoscar")

    class Actor(xoscar.Actor):  # type: ignore[misc,name-defined] # it may not be there
        def echo(self, value: Any) -> Any:
            return value

    pool = await xoscar.create_actor_pool("127.0.0.1", n_process=0)
    stack.push_async_callback(pool.stop)
    address = [pool.external_address]
    if rank == 1:
        await xoscar.create_actor(Actor, address=address[0], uid="echo")
    await dist.broadcast_object_list(address, 1)
    if rank == 1:
        return None
    call: Echo = (await xoscar.actor_ref(address=address[0], uid="echo")).echo
    return call


async def round_trip(array: np.ndarray[Any, Any]) -> Any:
    """There and back."""
    await dist.send(array, 1)
    await dist.recv(array, 1)
    return array


async def answer_round_trips(array: np.ndarray[Any, Any], count: int) -> None:
    """The other end."""
    for _ in range(count):
        await dist.recv(array, 0)
        await dist.send(array, 0)


async def rank_main(_local_rank: int, peers: list[str], calls: int, rounds: int) -> dict[str, list[list[float]]]:
    """One rank: of each kind, for each size, the median seconds of each round."""
    took: dict[str, list[list[float]]] = {}
    async with dist.init_process_group() as group, rpc.serve(), AsyncExitStack() as stack:
        kinds: dict[str, Echo | None] = {
            "round trip": round_trip,
            "asyncdist.rpc": lambda value: rpc.call(1, "echo", value),
        }
        for name in peers:
            kinds[name] = await {"grpc.aio": grpc_echo, "xoscar": xoscar_echo}[name](group.rank, stack)
        took = {name: [[] for _ in SIZES] for name in kinds}
        for _ in range(rounds):
            for name, kind in kinds.items():
                for place, nbytes in enumerate(SIZES):
                    array = np.random.default_rng(nbytes).integers(0, 255, nbytes, np.uint8)
                    count = max(calls * SIZES[0] // nbytes, calls // 10)
                    if group.rank == 0 and kind is not None:
                        small = nbytes == SIZES[0] and name != "round trip"
                        took[name][place].append(await timed(kind, array.tobytes() if small else array, count))
                    elif name == "round trip":
                        await answer_round_trips(array, count)
                    await group.barrier()
    return took


async def timed(kind: Echo, value: Any, count: int) -> float:
    """The median of `count` calls."""
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        came = await kind(value)
        samples.append(time.perf_counter() - start)
    assert bytes(came) == bytes(value)
    return statistics.median(samples)


@click.command()
@click.option("--calls", default=2000, show_default=True, help="Of 1 KiB in each round; of 1 MiB a tenth.")
@click.option("--rounds", default=7, show_default=True)
def command(calls: int, rounds: int) -> None:
    """Measure, and exit with 1 if the promise is not kept."""
    peers = {"grpc.aio": missing_module("grpc"), "xoscar": missing_module("xoscar")}
    for name, why in peers.items():
        if why is not None:
            click.echo(f"{name} is not measured: {why}")
    took = dist.spawn(rank_main, ([name for name, why in peers.items() if why is None], calls, rounds), nprocs=2)[0]
    kept = True
    for place, nbytes in enumerate(SIZES):
        ours = took["asyncdist.rpc"][place]
        for name, samples in took.items():
            ratio = statistics.median(one / other for one, other in zip(ours, samples[place], strict=True))
            most = PROMISED if name == "round trip" else 1.0
            kept &= ratio <= most or samples[place] is ours
            promise = "" if samples[place] is ours else f"   rpc takes {ratio:.2f} of it (promised {most:g})"
            click.echo(f"{nbytes >> 10:5} KiB  {name:<14} {statistics.median(samples[place]) * 1e6:8.0f} us{promise}")
    raise SystemExit(not kept)


if __name__ == "__main__":
    command()
