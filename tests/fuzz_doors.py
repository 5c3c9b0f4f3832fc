"""Fuzz both doors of a running store daemon: the native protocol and torch's.

    python tests/fuzz_doors.py --frames 1000000

Hundreds of thousands of connections send frames that are mostly wrong. Meanwhile clients of other jobs work on the same
daemon, and every answer they get is checked. The daemon must stay alive, log no error, and its memory must stay flat.

A frame counts once it is known to have been read: behind each stands a probe, and the daemon's answer to it, or its
closing the connection, says how far it came. Those behind a frame that ended the connection are sent again on another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
from fuzz_frames import HandshakeFrames, NativeFrames, TorchFrames
from jobs import free_port
from torch_wire_kit import VALIDATE, blob, number

from asyncdist.store import TCPStore
from asyncdist_server import messages as m
from asyncdist_server.auth import AuthenticationError, ClientHandshake, Refusal, store_context
from asyncdist_server.messages import Encoder, FrameReader, Hello, ProtocolError, decode_replies
from asyncdist_server.threaded import new_event_loop
from asyncdist_server.torch_wire import Query

TOKEN: Final = "fuzz" * 11
FUZZED_JOB: Final = "fuzzed"
PARALLEL: Final = 48
"""Connections at a time."""
BATCH_FRAMES: Final = 16
"""Frames on one connection, if it lives that long."""
ROUND_FRAMES: Final = 25_000
"""After so many frames all keys of the fuzzed jobs are removed: the limits on what is stored are tested elsewhere."""
REPORT_ROUNDS: Final = 4
"""How often progress is reported, in rounds."""
HANDSHAKES_SHARE: Final = 0.03
"""Frames that take the place of a message of the handshake; each needs a connection of its own."""
CLIENT_IDS: Final = 5000
"""Clients that the connections take turns to be: each is remembered for two minutes, as it might reconnect."""
MAX_GROWTH_BYTES: Final = 24 * 1024 * 1024
"""What the daemon may grow after its first rounds: fragments, and the clients it remembers."""
STUCK_S: Final = 30.0
"""A connection that the daemon neither answers nor closes for so long is a fault."""
PAUSE_S: Final = 0.002
"""What a healthy client rests between two requests."""


@dataclass
class Fuzzed:
    """What happened at one door."""

    door: str
    frames: int = 0
    connections: int = 0
    ended: int = 0
    """Connections that a frame made the daemon end."""
    seconds: float = 0.0
    resident_bytes: list[int] = field(default_factory=list)
    """Of the daemon: after each round."""
    checks: int = 0
    """Answers to the healthy clients that were checked."""
    slowest_s: float = 0.0

    @property
    def growth_bytes(self) -> int:
        """How much the daemon's memory grew between the rounds; the first of several warms it up."""
        warm = self.resident_bytes[min(1, len(self.resident_bytes) - 1)]
        return max(self.resident_bytes) - warm

    def __str__(self) -> str:
        mebibytes = [size / 2**20 for size in self.resident_bytes]
        return (
            f"{self.door}: {self.frames} frames in {self.seconds:.0f} s ({self.frames / self.seconds:.0f}/s) on "
            f"{self.connections} connections, {self.ended} of them ended by the daemon; resident "
            f"{mebibytes[0]:.1f} MiB after one round, {mebibytes[-1]:.1f} at the end, "
            f"growth {self.growth_bytes / 2**20:.1f}; "
            f"{self.checks} answers to healthy clients right, the slowest after {self.slowest_s * 1e3:.0f} ms"
        )


class Daemon:
    """The process under test: native clients and torch's on ports of their own."""

    def __init__(self, process: asyncio.subprocess.Process, errors: Any, torch_ports: list[int]) -> None:
        self.process = process
        self.port = 0
        self.fuzzed_torch_port, self.healthy_torch_port = torch_ports
        self._errors = errors

    def resident_bytes(self) -> int:
        """VmRSS."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return 1024 * int(found[1])

    def said(self) -> str:
        """The errors it logged."""
        self._errors.seek(0)
        text: str = self._errors.read().decode(errors="replace")
        return text


@contextlib.asynccontextmanager
async def running_daemon() -> AsyncIterator[Daemon]:
    """A daemon, which must end by itself with code 0 and without having logged an error."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCDIST_")}
    torch_ports = [free_port(), free_port()]
    options = ["--port", "0", "--log-level", "error", *(f"--torch-port={port}" for port in torch_ports)]
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "asyncdist_server", *options),
            env={**clean, "ASYNCDIST_TOKEN": TOKEN},
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )
        daemon = Daemon(process, errors, torch_ports)
        try:
            assert process.stdout is not None
            line = (await process.stdout.readline()).decode()
            assert " ready on " in line, daemon.said()
            daemon.port = int(line.split()[-1].rpartition(":")[2])
            yield daemon
            assert process.returncode is None, f"the daemon ended with {process.returncode}:\n{daemon.said()}"
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(STUCK_S):
                code = await process.wait()
            assert code == 0, f"the daemon ended with {code}:\n{daemon.said()}"
            assert daemon.said() == "", daemon.said()
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


# ---- connections


class _Door(asyncio.Protocol):
    """One connection: says what it has to say, and hears the daemon out."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.finished = False
        """Whether this side has said everything: then an end is none of the daemon's making."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write_eof")
        self.transport = transport  # type: ignore[assignment]  # uvloop's is of no class of asyncio's

    def finish(self, data: bytes) -> None:
        """Send the last of it."""
        self.transport.write(data)
        if not self.transport.is_closing():
            self.transport.write_eof()
        self.finished = True

    def fail(self, problem: str) -> None:
        """End the run: this is the daemon's fault."""
        if not self.closed.done():
            self.closed.set_exception(AssertionError(problem))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


class _NativeDoor(_Door):
    """Proves the token, says hello, then the batch, and once its last probe is answered, the last frame.

    `spoil` says which message of the handshake is not what it should be.
    """

    token = TOKEN

    def __init__(
        self,
        client_id: bytes,
        batch: bytes = b"",
        last_probe: int = 0,
        last: bytes = b"",
        spoil: tuple[int, HandshakeFrames] | None = None,
    ) -> None:
        super().__init__()
        self.answered: set[int] = set()
        self.late = False
        """Whether it was refused because this side was too slow: other processes want the cores."""
        self._batch = batch
        self._last_probe = last_probe
        self._last = last
        self._spoil = spoil
        self._stage = 0
        self._handshake: ClientHandshake | None = ClientHandshake(self.token, store_context(FUZZED_JOB, 1))
        self._hello = Encoder().hello(Hello(client_id))
        self._reader = FrameReader()
        self._welcomed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self._handshake is not None
        self._say(self._handshake.start())

    def _say(self, message: bytes) -> None:
        """Send the next message of the handshake, or what comes in its place, which is the last then."""
        if self._spoil is not None and self._stage == self._spoil[0]:
            self.finish(self._spoil[1].spoil(message))
        else:
            self.transport.write(message)
        self._stage += 1

    def data_received(self, data: bytes) -> None:
        try:
            if self._handshake is not None:
                if self.finished:
                    return
                answer = self._handshake.receive(data)
                if answer:
                    self._say(answer)
                if not self._handshake.done or self.finished:
                    return
                data, self._handshake = self._handshake.leftover, None
                self._say(self._hello)
                if not self.finished:
                    self.transport.write(self._batch)
            for payload in self._reader.feed(data):
                if self._welcomed:
                    self.answered.update(reply[0] for reply in decode_replies(payload))
                self._welcomed = True
            if self._last_probe in self.answered and not self.finished:
                self.finish(self._last)
        except AuthenticationError as error:
            self.late = error.refusal is Refusal.TIMEOUT
            if not self.late and self._spoil is None:
                self.fail(f"the daemon refuses a client that does no wrong: {error}")
        except ProtocolError as error:
            self.fail(f"the daemon breaks its own protocol: {error}")


class _TorchDoor(_Door):
    def __init__(self, opening: bytes, batch: bytes) -> None:
        super().__init__()
        self.heard = bytearray()
        self._data = opening + batch

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.finish(self._data)

    def data_received(self, data: bytes) -> None:
        self.heard += data


class Fuzzer:
    """Sends frames to one door until so many have been read."""

    def __init__(self, daemon: Daemon, seed: int, result: Fuzzed) -> None:
        self.daemon = daemon
        self.result = result
        self._random = random.Random(seed)
        self._unread: deque[bytes] = deque()

    async def run(self, frames: int) -> None:
        """Have `frames` more read."""
        goal = self.result.frames + frames
        workers = [asyncio.create_task(self._work(goal)) for _ in range(PARALLEL)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, goal: int) -> None:
        while self.result.frames < goal:
            if self._random.random() < HANDSHAKES_SHARE:
                await self.opening()
                self.result.frames += 1
                continue
            batch = [self._unread.popleft() if self._unread else self.make() for _ in range(BATCH_FRAMES)]
            answered = await self.batch(batch)
            if answered is None:
                self._unread.extend(batch)
                continue
            read = min(answered + 1, len(batch))  # the one behind the last answer was read as well: it was the end
            self.result.ended += answered < len(batch)
            self.result.frames += read
            self._unread.extend(batch[read:])

    async def connect(self, port: int, make: Callable[[], Any]) -> Any:
        """Connect, and wait until the connection has ended."""
        self.result.connections += 1
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(STUCK_S):
            _, door = await loop.create_connection(make, "127.0.0.1", port)
            await door.closed
        return door

    def make(self) -> bytes:
        """Return a frame."""
        raise NotImplementedError

    async def opening(self) -> None:
        """Have something wrong read before the first frame."""
        raise NotImplementedError

    async def batch(self, frames: list[bytes]) -> int | None:
        """Send frames on one connection; returns how many probes behind them were answered, None if it did not open."""
        raise NotImplementedError

    async def clean_up(self) -> None:
        """Remove what the frames have left."""


class NativeFuzzer(Fuzzer):
    """The native door."""

    def __init__(self, daemon: Daemon, seed: int, result: Fuzzed) -> None:
        super().__init__(daemon, seed, result)
        self._frames = NativeFrames(seed)
        self._handshakes = HandshakeFrames(seed)
        self._clients = 0

    def make(self) -> bytes:
        return self._frames.frame()

    def _client_id(self) -> bytes:
        self._clients += 1
        return b"fuzz" + (self._clients % CLIENT_IDS).to_bytes(12, "big")

    async def opening(self) -> None:
        spoil = (self._random.randrange(3), self._handshakes)
        await self.connect(self.daemon.port, lambda: _NativeDoor(self._client_id(), spoil=spoil))

    async def batch(self, frames: list[bytes]) -> int | None:
        probes = [self._frames.probe() for _ in frames]
        data = b"".join(frame + probe for frame, (probe, _) in zip(frames, probes, strict=True))
        last = self._frames.lie()
        door = await self.connect(self.daemon.port, lambda: _NativeDoor(self._client_id(), data, probes[-1][1], last))
        if door.late:
            return None
        answered = [request_id in door.answered for _, request_id in probes]
        if all(answered):
            self.result.frames += 1  # the last one
            return len(answered)
        return answered.index(False)

    async def clean_up(self) -> None:
        async with TCPStore("127.0.0.1", self.daemon.port, token=TOKEN, namespace=FUZZED_JOB) as store:
            await store._request(m.DELETE_NAMESPACE, (), 10.0)


class TorchFuzzer(Fuzzer):
    """Torch's door. Its keys go with the last connection, at the end of every round."""

    def __init__(self, daemon: Daemon, seed: int, result: Fuzzed) -> None:
        super().__init__(daemon, seed, result)
        self._frames = TorchFrames(seed)

    def make(self) -> bytes:
        return self._frames.frame()

    async def opening(self) -> None:
        await self.connect(self.daemon.fuzzed_torch_port, lambda: _TorchDoor(self._frames.spoiled_magic(), b""))

    async def batch(self, frames: list[bytes]) -> int:
        probes = [self._frames.probe() for _ in frames]
        data = b"".join(frame + probe for frame, (probe, _) in zip(frames, probes, strict=True))
        door = await self.connect(self.daemon.fuzzed_torch_port, lambda: _TorchDoor(VALIDATE, data))
        position = 0
        for index, (_, nonce) in enumerate(probes):
            position = door.heard.find(nonce, position)
            if position < 0:
                return index
            position += len(nonce)
        return len(frames)


# ---- healthy clients


async def healthy_native_client(daemon: Daemon, result: Fuzzed, seed: int) -> None:
    """Two clients of one job, who check all they are told, for ever."""
    rng = random.Random(seed)
    where = {"token": TOKEN, "namespace": "healthy", "timeout": STUCK_S}
    model: dict[str, bytes] = {}
    count = 0

    def lost() -> None:
        raise AssertionError("the daemon lost its data")

    async with (
        TCPStore("127.0.0.1", daemon.port, **where, on_incarnation_change=lost) as one,
        TCPStore("127.0.0.1", daemon.port, **where) as other,
    ):
        while True:
            began = time.monotonic()
            key, value = f"key/{rng.randrange(50)}", rng.randbytes(rng.choice((1, 50, 3000)))
            waiting = asyncio.ensure_future(other.get(f"new/{count}"))
            await one.set(key, value)
            model[key] = value
            asked = rng.choice(list(model))
            count += 1
            assert await other.get(asked) == model[asked]
            assert await one.add("count", 1) == count
            assert await other.compare_set(asked, b"something else", b"x") == model[asked]
            await one.queue_push("queue", value)
            assert await other.queue_pop("queue") == value
            assert not await other.check(["never"])
            await one.set(f"new/{count - 1}", value)
            assert await waiting == value
            assert await one.delete_key(f"new/{count - 1}")
            assert await other.num_keys() == len(model) + 1
            result.checks += 7
            result.slowest_s = max(result.slowest_s, time.monotonic() - began)
            await asyncio.sleep(PAUSE_S)


async def healthy_torch_client(daemon: Daemon, result: Fuzzed, seed: int) -> None:
    """One client on a port of its own, who checks all it is told, for ever."""
    rng = random.Random(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", daemon.healthy_torch_port)
    try:
        writer.write(VALIDATE)
        count = 0
        while True:
            began = time.monotonic()
            value = rng.randbytes(rng.choice((1, 50, 3000)))
            count += 1
            writer.write(bytes([Query.SET]) + blob(b"/k") + blob(value) + bytes([Query.GET]) + blob(b"/k"))
            writer.write(bytes([Query.ADD]) + blob(b"/n") + number(1))
            writer.write(bytes([Query.CHECK]) + number(2) + blob(b"/k") + blob(b"/never"))
            async with asyncio.timeout(STUCK_S):
                assert await reader.readexactly(8 + len(value)) == blob(value)
                assert await reader.readexactly(8) == number(count)
                assert await reader.readexactly(1) == b"\x01"
            result.checks += 3
            result.slowest_s = max(result.slowest_s, time.monotonic() - began)
            await asyncio.sleep(PAUSE_S)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


DOORS: Final[dict[str, type[Fuzzer]]] = {"native": NativeFuzzer, "torch": TorchFuzzer}


async def fuzz(door: str, frames: int, seed: int = 1, progress: Callable[[Fuzzed], None] | None = None) -> Fuzzed:
    """Have `frames` read at one door of a new daemon. Raises AssertionError for whatever is not as it should be."""
    result = Fuzzed(door)
    async with running_daemon() as daemon:
        healthy = [
            asyncio.create_task(healthy_native_client(daemon, result, seed)),
            asyncio.create_task(healthy_torch_client(daemon, result, seed)),
        ]
        fuzzing = asyncio.create_task(_rounds(DOORS[door](daemon, seed, result), frames, progress))
        began = time.monotonic()
        try:
            await asyncio.wait([fuzzing, *healthy], return_when=asyncio.FIRST_COMPLETED)
            for task in (*healthy, fuzzing):
                if task.done():
                    task.result()
            assert fuzzing.done()
        finally:
            result.seconds = time.monotonic() - began
            for task in (fuzzing, *healthy):
                task.cancel()
            await asyncio.gather(fuzzing, *healthy, return_exceptions=True)
    return result


async def _rounds(fuzzer: Fuzzer, frames: int, progress: Callable[[Fuzzed], None] | None) -> None:
    result = fuzzer.result
    while result.frames < frames:
        await fuzzer.run(min(ROUND_FRAMES, frames - result.frames))
        await fuzzer.clean_up()
        result.resident_bytes.append(fuzzer.daemon.resident_bytes())
        if progress is not None:
            progress(result)


@click.command()
@click.option("--frames", default=1_000_000, show_default=True, help="Frames at each door.")
@click.option("--door", type=click.Choice(["native", "torch", "both"]), default="both", show_default=True)
@click.option("--seed", default=1, show_default=True)
def main(frames: int, door: str, seed: int) -> None:
    """Fuzz a store daemon with frames of both protocols while healthy clients use it."""

    def progress(result: Fuzzed) -> None:
        if len(result.resident_bytes) % REPORT_ROUNDS == 0:
            resident = result.resident_bytes[-1] / 2**20
            click.echo(f"{result.door}: {result.frames} frames, resident {resident:.1f} MiB", err=True)

    for each in DOORS if door == "both" else [door]:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            result = runner.run(fuzz(each, frames, seed, progress))
        click.echo(str(result))
        if result.growth_bytes > MAX_GROWTH_BYTES:
            raise click.ClickException(f"the daemon grew by {result.growth_bytes / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
