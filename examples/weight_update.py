"""New weights for inference servers, while they answer requests.

    asyncdist run --nproc-per-node 8 examples/weight_update.py --updates 3 --megabytes 32

Ranks 1 to 7 serve a model over HTTP. Trainers, processes of their own that rank 0 starts, broadcast new weights to all
of them, each in a world of its own: the servers join it for the time of one update. An update goes to a second set of
arrays, which takes the place of the first when it is complete on every server. So it has one version, and one that
fails - here because the trainer is killed half way, or because it brings another model - leaves the servers with the
version they have, ready for the next.

Rank 0 sends requests all the time and prints how long they take, before and during updates. It fails if an answer is
made from two versions, if a failed update changes anything, or if a later one does not succeed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import signal
import sys
import time

import numpy as np

import asyncdist as dist

LAYERS = 8
BEFORE_S = 1.0
UPDATE_TIMEOUT_S = 30.0  # a trainer that hangs is as bad as one that dies
REQUEST_INTERVAL_S = 0.01  # on each connection, one to each server
FAULTS = ("killed half way", "another model")


class Model:
    """Weights of one version, and room for those of the next. All elements of version v are v."""

    def __init__(self, megabytes: int, version: int = 0) -> None:
        elements = max(1, (megabytes << 20) // (4 * LAYERS))
        self.version = version
        self.layers = [np.full(elements, version, np.float32) for _ in range(LAYERS)]
        self.next_layers = [layer.copy() for layer in self.layers]

    def swap(self, version: int) -> None:
        """Use the weights that have come; a request sees the old ones or the new ones, as this is one step."""
        self.version, self.layers, self.next_layers = version, self.next_layers, self.layers

    def answer(self) -> dict[str, object]:
        """What a request gets: the version, and whether first and last elements of all layers are of it."""
        return {"version": self.version, "whole": all(layer[0] == layer[-1] == self.version for layer in self.layers)}


# The servers.


async def serve(control: dist.ProcessGroup, megabytes: int) -> None:
    """Answer requests, and take part in each update that rank 0 announces until it announces number 0."""
    model = Model(megabytes)
    server = await asyncio.start_server(functools.partial(answer_requests, model), "127.0.0.1", 0)
    async with server:
        await control.send(np.array([server.sockets[0].getsockname()[1]]), 0)
        while number := int((await control.recv_array(0))[0]):
            try:
                await receive_update(model, number)
            except dist.DistError as error:
                if control.rank == 1:
                    why = type(why_it_failed(error)).__name__
                    print(f"update {number} failed, version {model.version} stays: {why}", flush=True)
            await control.send(np.array([model.version]), 0)


def why_it_failed(error: dist.DistError) -> BaseException:
    """The error itself, or what made another server abort the group before this one's next call."""
    return (isinstance(error, dist.GroupAbortedError) and error.__cause__) or error


async def receive_update(model: Model, number: int) -> None:
    """Join the world of an update and receive it."""
    async with dist.init_process_group(group_name=f"update {number}", timeout=UPDATE_TIMEOUT_S) as group:
        version = np.empty(1, np.int64)
        await group.broadcast(version, 0)
        for layer in model.next_layers:
            await group.broadcast(layer, 0)
        await group.barrier()  # all servers have everything
        model.swap(int(version[0]))


async def answer_requests(model: Model, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As much of HTTP/1.1 as an example needs."""
    with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            await reader.readuntil(b"\r\n\r\n")
            body = json.dumps(model.answer()).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            await writer.drain()


# The trainer.


async def train(number: int, version: int, megabytes: int, fault: str) -> None:
    """Broadcast one version of the weights, as rank 0 of a world of its own."""
    layers = Model(megabytes, version).layers
    if fault == "another model":
        layers[-1] = np.full(layers[-1].size + 1, version, np.float32)
    async with dist.init_process_group(group_name=f"update {number}", timeout=UPDATE_TIMEOUT_S) as group:
        print("joined", flush=True)
        await group.broadcast(np.array([version]), 0)
        for count, layer in enumerate(layers):
            if fault == "killed half way" and count == LAYERS // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            await group.broadcast(layer, 0)
        await group.barrier()


# Rank 0: announces updates, starts trainers and sends requests.


class Requests:
    """Requests sent to one server all the time; `latencies` holds when each was due and how long it took from then.

    Counting from when it was due does not leave out the requests that a stall holds back.
    """

    def __init__(self, port: int) -> None:
        self.latencies: list[tuple[float, float]] = []
        self._port = port

    async def send(self) -> None:
        """Send requests until cancelled."""
        clock = time.perf_counter  # uvloop's own counts in milliseconds
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        due_s, version = clock(), 0
        with contextlib.closing(writer):
            while True:
                writer.write(b"GET / HTTP/1.1\r\nHost: model\r\n\r\n")
                head = await reader.readuntil(b"\r\n\r\n")
                answer = json.loads(await reader.readexactly(int(head.rpartition(b":")[2])))
                assert answer["whole"], "an answer made from two versions"
                assert answer["version"] >= version, "a version that was replaced is back"
                version = answer["version"]
                self.latencies.append((due_s, clock() - due_s))
                due_s += REQUEST_INTERVAL_S
                await asyncio.sleep(due_s - clock())


async def update(
    control: dist.ProcessGroup, number: int, version: int, megabytes: int, fault: str = ""
) -> tuple[float, float, set[int]]:
    """Have a trainer make an update. Returns when it began, when it had ended, and the versions the servers have."""
    servers = range(1, control.size)
    for server in servers:
        await control.send(np.array([number]), server)
    arguments = [str(number), str(version), str(megabytes), fault]
    trainer = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--train", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert trainer.stdout is not None
    try:
        await trainer.stdout.readline()  # it has joined
        began_s = time.perf_counter()
        versions = {int((await control.recv_array(server))[0]) for server in servers}
        ended_s = time.perf_counter()
        _, errors = await trainer.communicate()
    finally:
        if trainer.returncode is None:
            trainer.kill()
    if trainer.returncode and not fault:
        raise RuntimeError(f"the trainer failed:\n{errors.decode()}")
    return began_s, ended_s, versions


async def supervise(control: dist.ProcessGroup, updates: int, megabytes: int) -> None:
    """Good updates, bad ones, and a good one again, with requests all the time."""
    ports = [int((await control.recv_array(rank))[0]) for rank in range(1, control.size)]
    requests = [Requests(port) for port in ports]
    times: list[tuple[float, float]] = []
    number = 0
    async with asyncio.TaskGroup() as tasks:
        senders = [tasks.create_task(one.send()) for one in requests]
        await asyncio.sleep(BEFORE_S)
        first_s = time.perf_counter()
        for fault in [*[""] * updates, *FAULTS, ""]:
            number += 1
            good = len(times)
            began_s, ended_s, versions = await update(control, number, good + 1, megabytes, fault)
            if not fault:
                times.append((began_s, ended_s))
            assert versions == {len(times)}, f"servers have versions {versions} after update {number}"
            how = fault or f"{(ended_s - began_s) * 1e3:.0f} ms"
            print(f"update {number} ({how}): {len(ports)} servers have version {len(times)}", flush=True)
        for sender in senders:
            sender.cancel()
    for server in range(1, control.size):
        await control.send(np.array([0]), server)
    latencies = [sample for one in requests for sample in one.latencies]
    report("before", [latency for due, latency in latencies if due < first_s])
    report("during", [latency for due, latency in latencies for began, ended in times if began <= due <= ended])


def report(when: str, latencies: list[float]) -> None:
    """Print the latencies of some requests."""
    if latencies:
        p50, p99, most = np.percentile(latencies, [50, 99, 100]) * 1e3
        print(f"{when}: {len(latencies)} requests, p50 {p50:.2f} ms, p99 {p99:.2f} ms, max {most:.2f} ms", flush=True)


async def main(options: argparse.Namespace) -> None:
    """One of the servers, or what makes them work."""
    async with dist.init_process_group() as control:
        if control.rank == 0:
            await supervise(control, options.updates, options.megabytes)
        else:
            await serve(control, options.megabytes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="New weights for inference servers, while they answer requests.")
    parser.add_argument("--updates", type=int, default=3, help="good updates before the bad ones (default 3)")
    parser.add_argument("--megabytes", type=int, default=32, help="size of the weights in MiB (default 32)")
    parser.add_argument("--train", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        number, version, megabytes, fault = options.train
        dist.run(train(int(number), int(version), int(megabytes), fault))
    else:
        dist.run(main(options))
