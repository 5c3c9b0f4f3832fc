"""Fuzz both doors of a running store daemon: the native protocol and torch's.

    python tests/soak/fuzz_doors.py --frames 1000000

Hundreds of thousands of connections send frames that are mostly wrong. Meanwhile clients of other jobs work on the same
daemon, and every answer they get is checked. The daemon must stay alive, log no error, and its memory must stay flat.

A frame counts once it is known to have been read: behind each stands a probe, and the daemon's answer to it, or its
closing the connection, says how far it came. Those behind a frame that ended the connection are sent again on another.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1] / "kits"))

import click
from fuzz_connections import FUZZED_JOB, NativeDoor, TorchDoor
from fuzz_daemon import STUCK_S, TOKEN, Checked, Daemon, healthy_native_client, healthy_torch_client, running_daemon
from fuzz_frames import HandshakeFrames, NativeFrames, TorchFrames
from torch_wire_kit import VALIDATE

from asyncdist.store import TCPStore
from asyncdist_server.serving.threaded import new_event_loop
from asyncdist_server.wire import messages as m

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
"""What the daemon may grow after its first rounds without counting it: fragments."""


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
    counted_bytes: list[int] = field(default_factory=list)
    """What the daemon says it holds for clients, which its limit bounds: keys, events, replies it remembers."""
    healthy: Checked = field(default_factory=Checked)

    @property
    def growth_bytes(self) -> int:
        """How much the daemon's memory grew without being counted; the first two rounds warm it up."""
        uncounted = [
            resident - counted for resident, counted in zip(self.resident_bytes, self.counted_bytes, strict=True)
        ]
        return max(uncounted) - uncounted[min(1, len(uncounted) - 1)]

    def __str__(self) -> str:
        mebibytes = [size / 2**20 for size in self.resident_bytes]
        return (
            f"{self.door}: {self.frames} frames in {self.seconds:.0f} s ({self.frames / self.seconds:.0f}/s) on "
            f"{self.connections} connections, {self.ended} of them ended by the daemon; resident "
            f"{mebibytes[0]:.1f} MiB after one round, {mebibytes[-1]:.1f} at the end, "
            f"of which {self.counted_bytes[-1] / 2**20:.1f} are counted as held for clients; "
            f"grown uncounted {self.growth_bytes / 2**20:.1f}; "
            f"{self.healthy.answers} answers to healthy clients right, the slowest round of them took "
            f"{self.healthy.slowest_s * 1e3:.0f} ms"
        )


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
        await self.connect(self.daemon.port, lambda: NativeDoor(self._client_id(), spoil=spoil))

    async def batch(self, frames: list[bytes]) -> int | None:
        probes = [self._frames.probe() for _ in frames]
        data = b"".join(frame + probe for frame, (probe, _) in zip(frames, probes, strict=True))
        last = self._frames.lie()
        door = await self.connect(self.daemon.port, lambda: NativeDoor(self._client_id(), data, probes[-1][1], last))
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
        await self.connect(self.daemon.fuzzed_torch_port, lambda: TorchDoor(self._frames.spoiled_magic(), b""))

    async def batch(self, frames: list[bytes]) -> int:
        probes = [self._frames.probe() for _ in frames]
        data = b"".join(frame + probe for frame, (probe, _) in zip(frames, probes, strict=True))
        door = await self.connect(self.daemon.fuzzed_torch_port, lambda: TorchDoor(VALIDATE, data))
        position = 0
        for index, (_, nonce) in enumerate(probes):
            position = door.heard.find(nonce, position)
            if position < 0:
                return index
            position += len(nonce)
        return len(frames)


DOORS: Final[dict[str, type[Fuzzer]]] = {"native": NativeFuzzer, "torch": TorchFuzzer}


async def fuzz(door: str, frames: int, seed: int = 1, progress: Callable[[Fuzzed], None] | None = None) -> Fuzzed:
    """Have `frames` read at one door of a new daemon. Raises AssertionError for whatever is not as it should be."""
    result = Fuzzed(door)
    async with running_daemon() as daemon:
        healthy = [
            asyncio.create_task(healthy_native_client(daemon, result.healthy, seed)),
            asyncio.create_task(healthy_torch_client(daemon, result.healthy, seed)),
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
        result.counted_bytes.append(await fuzzer.daemon.counted_bytes())
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
            raise click.ClickException(f"the daemon grew by {result.growth_bytes / 2**20:.1f} MiB it does not count")


if __name__ == "__main__":
    main()
