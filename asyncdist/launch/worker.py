"""One worker: its environment, its process in a session of its own, its two output streams, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Final

from asyncdist.errors import LaunchError
from asyncdist.launch.config import Endpoint
from asyncdist.launch.orphan_killer import OrphanKiller
from asyncdist.launch.streams import Destination, Stream
from asyncdist.store.credentials import TLS_VARIABLES

__all__ = ["Exit", "NodePlace", "Roster", "Worker", "line_prefix", "own_device", "worker_environment"]

_GUARD: Final = Path(__file__).with_name("exec_guard.py")

_POLL_S: Final = 0.05
"""Where the kernel offers no pidfd: how often an exit is looked for."""


VMSTAT: Final = Path("/proc/vmstat")
"""Counts them for the whole host, those of containers and other control groups among them."""

DRAIN_IDLE_S: Final = 1.0
"""After a worker ended: how long a pipe may be silent before it is closed although a descendant holds it open."""

_PREFIX_VARIABLE: Final = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"

_INHERITED: Final = (
    "ASYNCDIST_LOSSES",
    "ASYNCDIST_ROUND",
    "ASYNCDIST_STORE_OUTAGE",
    "ASYNCDIST_TOKEN",
    "ASYNCDIST_TOKEN_FILE",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""What concerns the launcher alone: its own secret, and its place in a job around this one."""


@dataclass(frozen=True, slots=True)
class Roster:
    """The nodes that take part: this node's rank, every node's number of workers, and the name of the run."""

    node_rank: int
    nprocs: tuple[int, ...]
    run_id: str

    @property
    def nproc(self) -> int:
        """Workers of this node."""
        return self.nprocs[self.node_rank]

    @property
    def first_rank(self) -> int:
        """Global rank of this node's first worker."""
        return sum(self.nprocs[: self.node_rank])

    @property
    def world_size(self) -> int:
        """Workers of all nodes."""
        return sum(self.nprocs)


@dataclass(frozen=True, slots=True)
class NodePlace:
    """This node's place in a job: which ranks are its own, and where the store is.

    `master` is what MASTER_ADDR and MASTER_PORT say: the store's address, unless the user named another. `tls` says
    whether the store has TLS. All ranks of a job have one `role`, which is for the script to read. With
    `virtual_local_rank` each worker sees only its GPU. `interface` is the network interface to use, if one was chosen.
    `restarts` is how many restarts an elastic job has had: its rounds, the attempts, may be more. Where several
    launchers share a host, `first_local_rank` and `local_world_size` count the workers of all. `losses` is where the
    launcher tells of lost ranks (`Losses.address`).
    """

    roster: Roster
    store: Endpoint
    master: Endpoint
    token: str | None
    tls: bool = False
    role: str = "default"
    virtual_local_rank: bool = False
    interface: str | None = None
    restarts: int | None = None
    first_local_rank: int = 0
    local_world_size: int | None = None
    losses: str | None = None


def worker_environment(
    place: NodePlace, local_rank: int, attempt: int, max_restarts: int, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return `base` with what a worker must know about its job.

    RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_* ROLE_* MASTER_ADDR MASTER_PORT as torchrun sets them,
    ASYNCDIST_STORE ASYNCDIST_JOB_ID ASYNCDIST_TOKEN for asyncdist, TORCHELASTIC_* where scripts look for them. The job
    id carries the attempt number, so that a restarted group never reads what the failed one wrote. The token goes by
    environment and never by argument vector, which every user of the machine can read.

    Raises LaunchError if each worker is to see a GPU of its own and there are too few.
    """
    roster = place.roster
    rank = str(roster.first_rank + local_rank)
    environment = dict(base)
    for inherited in _INHERITED:
        environment.pop(inherited, None)
    if not place.tls:  # what was meant for a daemon does not hold for a store on loopback
        for name in TLS_VARIABLES:
            environment.pop(name, None)
    environment.update(
        RANK=rank,
        LOCAL_RANK=str(place.first_local_rank + local_rank),
        WORLD_SIZE=str(roster.world_size),
        LOCAL_WORLD_SIZE=str(place.local_world_size or roster.nproc),
        GROUP_RANK=str(roster.node_rank),
        GROUP_WORLD_SIZE=str(len(roster.nprocs)),
        ROLE_NAME=place.role,
        ROLE_RANK=rank,
        ROLE_WORLD_SIZE=str(roster.world_size),
        MASTER_ADDR=place.master.host.partition(",")[0],
        MASTER_PORT=str(place.master.port),
        ASYNCDIST_STORE=str(place.store),
        ASYNCDIST_JOB_ID=f"{roster.run_id}.{attempt}",
        TORCHELASTIC_RUN_ID=roster.run_id,
        TORCHELASTIC_RESTART_COUNT=str(attempt if place.restarts is None else place.restarts),
        TORCHELASTIC_MAX_RESTARTS=str(max_restarts),
    )
    if place.restarts is not None:
        environment["ASYNCDIST_ROUND"] = str(attempt)
    if place.token is not None:
        environment["ASYNCDIST_TOKEN"] = place.token
    if place.virtual_local_rank:
        environment.update(LOCAL_RANK="0", CUDA_VISIBLE_DEVICES=own_device(local_rank, base))
    if place.losses is not None:
        environment["ASYNCDIST_LOSSES"] = place.losses
    if place.interface is not None:
        environment["ASYNCDIST_SOCKET_IFNAME"] = place.interface
    environment.setdefault("PYTHONUNBUFFERED", "1")
    if roster.nproc > 1:
        # As torchrun: several workers that each start a thread per core would fight over the cores.
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def line_prefix(rank: int, local_rank: int, role: str, environ: Mapping[str, str] = os.environ) -> bytes:
    """What stands before a worker's lines on the terminal: `[rank 3] `, unless torchrun's variable says otherwise.

    TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE may have ${role_name}, ${rank} and ${local_rank}; other names are left alone.
    """
    template = environ.get(_PREFIX_VARIABLE)
    if not template:
        return f"[rank {rank}] ".encode()
    text = Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank)
    return os.fsencode(text.replace("\r", " ").replace("\n", " "))


def own_device(local_rank: int, environ: Mapping[str, str]) -> str:
    """The one GPU of a worker, in the words of CUDA_VISIBLE_DEVICES. Raises LaunchError if that names too few."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(local_rank)
    devices = [device.strip() for device in visible.split(",")]
    if local_rank >= len(devices):
        raise LaunchError(f"local rank {local_rank} has no GPU of its own: CUDA_VISIBLE_DEVICES is {visible!r}")
    return devices[local_rank]


@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker ended. `returncode` is negative for a signal, as subprocess has it.

    `out_of_memory` says that the kernel ended some process of this host for want of memory while the worker ran.
    """

    rank: int
    pid: int
    returncode: int
    out_of_memory: bool = False

    @property
    def exitcode(self) -> int:
        """As a shell would report it: 128 + n for signal n."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    def __str__(self) -> str:
        if self.returncode >= 0:
            return f"exit code {self.returncode}"
        if self.returncode == -signal.SIGKILL and self.out_of_memory:
            return "killed by SIGKILL, probably for want of memory: the kernel ended a process for that meanwhile"
        try:
            return f"killed by {signal.Signals(-self.returncode).name}"
        except ValueError:
            return f"killed by signal {-self.returncode}"


class Worker:
    """A running worker. Its maker must `await reap()`; `on_exit` is called once when the process has ended.

    The process is started with vfork and exec only (no Python code runs between), so that the launcher may have
    threads. It is left a zombie until `reap`: as long as it is one, its number, which is also its process group's,
    cannot be given to a stranger, and killing the group is safe.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        prefix: bytes,
        stdout: Destination,
        stderr: Destination,
        killer: OrphanKiller,
    ) -> None:
        self.rank = rank
        self.exit: Exit | None = None
        self.on_exit: Callable[[Exit], None] = lambda exit: None
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._killer = killer
        self._oom_kills = oom_kills()
        # A worker has no terminal to read from (it is in another session); end of file at once beats EIO later.
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()), *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=stdout.for_child(),
                stderr=stderr.for_child(),
                start_new_session=True,
            )
        except BaseException:
            stdout.close()
            stderr.close()
            raise
        self.pid = self._process.pid
        killer.add(self.pid)
        self._pidfd = -1
        self._timer: asyncio.TimerHandle | None = None
        self._watch()
        self.stdout: Stream = stdout.stream(self._process.stdout, prefix)
        self.stderr: Stream = stderr.stream(self._process.stderr, prefix)

    def signal(self, signum: int) -> None:
        """Send a signal to the worker and what it started (its process group), if it still runs."""
        if self.exit is None:
            self._kill_group(signum)

    def pass_on(self, signum: int) -> bool:
        """Send a signal to the processes of the group that have a handler for it; the others would die of it.

        Return whether there are any. Where the kernel does not say which process handles what, all processes get it.
        """
        if self.exit is not None:
            return False
        if not Path("/proc/self/status").exists():
            self._kill_group(signum)
            return True
        handling = [pid for pid in _process_group(self.pid) if _handles(pid, signum)]
        for pid in handling:
            with contextlib.suppress(OSError):
                os.kill(pid, signum)
        return bool(handling)

    async def reap(self, *, drain: bool = True) -> None:
        """Kill what is left of the process group, pass on the rest of the output, and free the process id."""
        self._kill_group(signal.SIGKILL)
        try:
            await self._ended.wait()
            if drain:
                await self.stdout.drain(DRAIN_IDLE_S)
                await self.stderr.drain(DRAIN_IDLE_S)
        finally:
            self.stdout.close()
            self.stderr.close()
            self._unwatch()
            self._killer.remove(self.pid)
            self._process.wait()

    def _kill_group(self, signum: int) -> None:
        # EPERM where a descendant changed its user, ESRCH where none is left: nothing more can be done in either case.
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signum)

    def _watch(self) -> None:
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # a kernel or sandbox without it
                self._pidfd = os.pidfd_open(self.pid)
                self._loop.add_reader(self._pidfd, self._look)
                return
        self._timer = self._loop.call_later(_POLL_S, self._poll)

    def _poll(self) -> None:
        self._look()
        if self.exit is None:
            self._timer = self._loop.call_later(_POLL_S, self._poll)

    def _look(self) -> None:
        returncode = self._peek()
        if returncode is not None and self.exit is None:
            self.exit = Exit(self.rank, self.pid, returncode, oom_kills() > self._oom_kills)
            self._unwatch()
            self._ended.set()
            self.on_exit(self.exit)

    def _peek(self) -> int | None:
        """The return code if the process has ended, without reaping it where the platform can do that."""
        if not hasattr(os, "waitid"):
            return self._process.poll()
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


def _process_group(leader: int) -> list[int]:
    found: list[int] = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.getpgid(int(name)) == leader:
                found.append(int(name))
    return found


def _handles(pid: int, signum: int) -> bool:
    """Whether a process has a handler of its own for a signal (proc(5): SigCgt)."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def oom_kills(vmstat: Path = VMSTAT) -> int:
    """How many processes the kernel has ended so since the host came up; 0 where it does not say."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
