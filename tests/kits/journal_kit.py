"""A journal in memory, what an engine holds in a form to compare, and daemons in processes of their own to kill."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked

from asyncdist_server.engine.changes import ChangeLog
from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.history import EVENT_BYTES, HISTORY_OVERHEAD_BYTES
from asyncdist_server.engine.leases import HOLD_BYTES, LEASE_BYTES, LEASED_KEY_BYTES
from asyncdist_server.engine.membership import JOB_BYTES, Job
from asyncdist_server.engine.namespace import ITEM_OVERHEAD_BYTES, KEY_OVERHEAD_BYTES, QUEUE_OVERHEAD_BYTES
from asyncdist_server.journal.batch import Batch, BatchMaker
from asyncdist_server.journal.journal import ROW_OVERHEAD_BYTES, RowReader, decode, encode
from asyncdist_server.journal.replay import Replay
from asyncdist_server.wire.messages import Limits


class MemoryJournal:
    """Satisfies `journal.Journal`; its rows survive whoever wrote them. `before_write` gets each write's number."""

    incarnation = b"incarnation-0123"
    description = "memory"

    def __init__(self) -> None:
        self.rows: dict[int, bytes] = {}
        self.writes = 0
        self.calls: list[str] = []
        self.before_write: Callable[[int], None] = lambda number: None

    def read(self, row: RowReader) -> None:
        for number, contents in sorted(self.rows.items()):
            row(number, len(contents) + ROW_OVERHEAD_BYTES, *decode(contents))

    def write(self, batch: Batch) -> None:
        self.writes += 1
        self.calls.append("write")
        self.before_write(self.writes)
        payloads = encode(batch)
        batch.bytes = sum(map(len, payloads)) + ROW_OVERHEAD_BYTES * len(payloads)
        self.rows.update(zip(range(batch.first_row, batch.next_row), payloads, strict=True))
        while self.rows and (oldest := next(iter(self.rows))) < batch.keep_from:
            del self.rows[oldest]

    def tidy(self) -> None:
        self.calls.append("tidy")

    def announce(self) -> None:
        pass

    def backup(self, path: Path, between: Callable[[], None]) -> None:
        between()

    def close(self) -> None:
        self.calls.append("close")

    def abandon(self) -> None:
        self.calls.append("abandon")


class JournaledEngine:
    """An engine and its journal, without a daemon: `commit` writes what changed, `crash` returns what comes back."""

    def __init__(self, journal: MemoryJournal, now: float, limits: Limits | None = None) -> None:
        self.journal = journal
        self.limits = limits
        self.engine = StoreEngine(journal.incarnation, limits)
        self.changes = ChangeLog("torch/")
        self.maker = BatchMaker(self.engine, self.changes)
        self.replay = Replay()
        journal.read(self.replay.row)
        self.replay.restore(self.engine, self.changes, self.maker, now)

    def commit(self, flags: int = 0) -> Batch:
        batch = self.maker.take(flags)
        self.journal.write(batch)
        self.maker.written(batch)
        return batch

    def crash(self, now: float) -> JournaledEngine:
        return JournaledEngine(self.journal, now, self.limits)


def contents(engine: StoreEngine) -> dict[str, Any]:
    """All that a journal must bring back, but for what clients remember."""
    found: dict[str, Any] = {}
    for name, namespace in engine.namespaces.items():
        if name.startswith("torch/"):
            continue
        held = {
            "values": dict(namespace.values),
            "queues": {key: list(queue) for key, queue in namespace.queues.items()},
            "leased": {key: lease.lease_id for key, lease in namespace.leased.items()},
            "leases": {number: (lease.ttl_s, lease.owner) for number, lease in namespace.leases.items()},
            "bound": {owner: sorted(lease.lease_id for lease in some) for owner, some in namespace.bound.items()},
            "holds": {
                prefix: (hold.linger_s, sorted(lease.lease_id for lease in hold.leases), hold.job and hold.job.name)
                for prefix, hold in namespace.holds.items()
            },
            "histories": {
                prefix: (history.floor, list(history.events), history.pinned)
                for prefix, history in namespace.histories.items()
            },
            "jobs": {job.name: _members(job) for job in namespace.jobs.values()},
        }
        if any(held.values()):
            found[name] = held
    return found


def _members(job: Job) -> Any:
    """What the keys of a job say: they may have been deleted under it."""
    if job.prefix + b"epoch" not in job.namespace.values:
        return None
    living = {
        name: lease
        for name, lease in job.leases.items()
        if job.namespace.leased.get(job.prefix + b"members/" + name) is lease
    }
    ranks = {name: rank for name, rank in job.ranks.items() if name in living}
    return job.epoch, ranks, {name: lease.lease_id for name, lease in living.items()}, living and (job.least, job.most)


def charged(engine: StoreEngine) -> int:
    """The bytes that an engine without clients must have charged for what it holds."""
    total = 0
    for namespace in engine.namespaces.values():
        total += sum(KEY_OVERHEAD_BYTES + len(key) + len(value) for key, value in namespace.values.items())
        for key, queue in namespace.queues.items():
            total += QUEUE_OVERHEAD_BYTES + len(key) + sum(ITEM_OVERHEAD_BYTES + len(item) for item in queue)
        total += LEASE_BYTES * len(namespace.leases) + LEASED_KEY_BYTES * len(namespace.leased)
        total += sum(HOLD_BYTES + len(prefix) for prefix in namespace.holds) + JOB_BYTES * len(namespace.jobs)
        for prefix, history in namespace.histories.items():
            total += HISTORY_OVERHEAD_BYTES + len(prefix)
            total += sum(EVENT_BYTES + len(event[2]) + len(event[3]) for event in history.events)
    return total + sum(client.remembered_bytes for client in engine.all_clients())


class Daemon:
    """`asyncdist-server` in a process of its own, on one port and one data directory from start to start."""

    def __init__(self, data_dir: Path, port: int, *arguments: str) -> None:
        self.data_dir = data_dir
        self.port = port
        self.arguments = arguments
        self.process: subprocess.Popen[str] | None = None

    def start(self, **environment: str) -> Daemon:
        """Start the process and wait until it serves; AssertionError with what it said if it does not."""
        self.process = forked.Popen(
            self.command(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("asyncdist-server ready on"), self.communicate()
        self.port = int(line.split()[3].rpartition(":")[2])
        return self

    def command(self) -> list[str]:
        place = ["--port", str(self.port), "--data-dir", str(self.data_dir)]
        durability = [] if "--durability" in self.arguments else ["--durability", "durable"]
        return [sys.executable, "-m", "asyncdist_server", *place, *durability, *self.arguments]

    def kill(self) -> None:
        """End the process as a power cut would."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.communicate()

    def stop(self) -> str:
        """End the process in order; returns what it said."""
        assert self.process is not None
        self.process.terminate()
        said = self.communicate()
        assert self.process.returncode == 0, said
        return said

    def communicate(self) -> str:
        """Wait for the end; returns what it said on stderr."""
        assert self.process is not None
        return self.process.communicate(timeout=60)[1]


@contextlib.contextmanager
def daemon(data_dir: Path, *arguments: str, port: int = 0) -> Iterator[Daemon]:
    """A daemon that does not outlive the block."""
    running = Daemon(data_dir, port, *arguments)
    try:
        yield running
    finally:
        if running.process is not None:
            running.process.kill()
            running.communicate()
