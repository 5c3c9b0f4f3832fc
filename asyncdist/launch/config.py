"""What `asyncdist run` was asked to do: parsed, checked, and not changed afterwards."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asyncdist.launch.logs import LogSpec

if TYPE_CHECKING:
    from asyncdist.store.credentials import TLSConfig

__all__ = [
    "DEFAULT_EXPELLED_AFTER_S",
    "DEFAULT_GRACE_S",
    "DEFAULT_JOIN_TIMEOUT_S",
    "DEFAULT_LAST_CALL_S",
    "DEFAULT_LOST_AFTER_S",
    "DEFAULT_PORT",
    "DEFAULT_SHUTDOWN_TIMEOUT_S",
    "ENDING",
    "MAX_PROCESSES_PER_NODE",
    "Endpoint",
    "LaunchConfig",
    "RdzvTimes",
    "interface_with",
    "parse_endpoint",
    "parse_metrics_port",
    "parse_nnodes",
    "parse_nproc",
    "parse_rdzv_conf",
    "parse_signals",
    "usable_cores",
    "worker_command",
]

DEFAULT_PORT: Final = 29500
"""torchrun's default master port; used when a multi-node address names none."""

DEFAULT_GRACE_S: Final = 3.0
"""After a failure: what the other workers get to raise, and again to obey SIGTERM."""

DEFAULT_SHUTDOWN_TIMEOUT_S: Final = 30.0
"""After a signal to the launcher: what the workers get to end by themselves (torchrun's value)."""

DEFAULT_LAST_CALL_S: Final = 30.0
"""How long an elastic job that has enough nodes waits for more (torchrun's last_call_timeout)."""

DEFAULT_LOST_AFTER_S: Final = 3.0
"""A launcher only waits, so 3 s of silence mean that it, its host or the network is gone. Two seconds later all ranks
have heard of that, and have raised."""

DEFAULT_EXPELLED_AFTER_S: Final = 20.0
"""While launchers work together they know of each other without the job's store. That may be slow or busy, and who was
silent there loses a place in the job."""

DEFAULT_JOIN_TIMEOUT_S: Final = 600.0
"""How long nodes wait for the store and for each other (torchrun's join_timeout)."""

MAX_PROCESSES_PER_NODE: Final = 4096
"""A typing mistake must not fork-bomb the machine; four pipes and files each also meet the usual limits here."""

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a job, unless the user says which do."""

_NOT_TO_HANDLE: Final = frozenset({"SIGKILL", "SIGSTOP", "SIGCHLD", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"})
"""Those that the kernel lets no process handle, those that a process causes itself, and that of a child's end."""

_INTERVAL_S: Final = 5.0
_ATTEMPTS: Final = 4.0
"""What torchrun calls its keep-alives, where only one of them is given; only their product counts here."""

_KEYS: Final = ("join_timeout", "last_call_timeout", "keep_alive_interval", "keep_alive_max_attempt")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host (name or address, no brackets) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """One node's part of a job.

    `command` is a worker's argument vector, in which `--local_rank=N` goes to the place `local_rank_at`. `store` is a
    daemon that already runs (ASYNCDIST_STORE): then no launcher hosts one. `endpoint` is where the nodes meet, and
    where the first of them hosts the store. Neither: this node is alone and hosts on an ephemeral loopback port. `tls`
    holds for every store but one on loopback that is hosted here. `logs` says where the workers' output goes,
    `dump_dir` where they write what they did before they failed, `metrics` where this launcher serves what they do,
    `ending_signals` which signals to the launcher end the job. With `virtual_local_rank` each worker sees one GPU and
    is local rank 0. Where several launchers share a host, `first_local_rank` and `local_world_size` count the workers
    of all. `interface` is the network interface the workers use. A daemon may be away for `store_outage_s` while all
    nodes are well. All times are seconds.

    A node is lost after `lost_after_s` of silence among the launchers. With `min_nodes` the job is elastic: `nnodes`
    are the most it may have, nodes come and go, also after `expelled_after_s` of silence at the store, and `node_rank`
    says no more than whether this launcher may host the store.
    """

    command: tuple[str, ...]
    nproc_per_node: int = 1
    nnodes: int = 1
    node_rank: int | None = None
    endpoint: Endpoint | None = None
    store: Endpoint | None = None
    job_id: str | None = None
    token: str | None = None
    tls: TLSConfig | None = None
    max_restarts: int = 0
    grace_s: float = DEFAULT_GRACE_S
    shutdown_timeout_s: float = DEFAULT_SHUTDOWN_TIMEOUT_S
    join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S
    local_rank_at: int | None = None
    role: str = "default"
    logs: LogSpec = field(default_factory=LogSpec)
    dump_dir: str | None = None
    metrics: Endpoint | None = None
    ending_signals: tuple[signal.Signals, ...] = ENDING
    virtual_local_rank: bool = False
    first_local_rank: int = 0
    local_world_size: int | None = None
    interface: str | None = None
    min_nodes: int | None = None
    last_call_s: float = DEFAULT_LAST_CALL_S
    lost_after_s: float = DEFAULT_LOST_AFTER_S
    expelled_after_s: float = DEFAULT_EXPELLED_AFTER_S
    store_outage_s: float = math.inf

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("nothing to run: give a script, -m MODULE, or --no-python COMMAND")
        if not 1 <= self.nproc_per_node <= MAX_PROCESSES_PER_NODE:
            raise ValueError(
                f"nproc-per-node must be between 1 and {MAX_PROCESSES_PER_NODE}, got {self.nproc_per_node}"
            )
        if self.nnodes < 1:
            raise ValueError(f"nnodes must be at least 1, got {self.nnodes}")
        if self.min_nodes is not None and not 1 <= self.min_nodes < self.nnodes:
            raise ValueError(
                f"a range of nodes begins with 1 or more and ends above, got {self.min_nodes}:{self.nnodes}"
            )
        if self.node_rank is not None and not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"node-rank must be between 0 and {self.nnodes - 1} (nnodes - 1), got {self.node_rank}")
        if self.nnodes > 1 and self.endpoint is None and self.store is None:
            raise ValueError(
                f"{self.nnodes} nodes need a place to meet: give --rdzv-endpoint HOST:PORT or --master-addr HOST, "
                "or set ASYNCDIST_STORE to a daemon"
            )
        if self.nnodes > 1 and self.store is not None and not self.job_id:
            raise ValueError(
                "several nodes on one ASYNCDIST_STORE need --rdzv-id NAME, else they cannot tell their job from others"
            )


def parse_endpoint(text: str, *, least_port: int = 1) -> Endpoint:
    """Parse `host`, `host:port`, `[v6]` or `[v6]:port`.

    Raises ValueError for anything else, and for a port outside `least_port`..65535.
    """
    text = text.strip()
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is not HOST:PORT")
        port_text = rest[1:]
    elif text.count(":") > 1:
        host, port_text = text, ""
    else:
        host, _, port_text = text.partition(":")
    if not host:
        raise ValueError(f"{text!r} names no host")
    if not port_text:
        return Endpoint(host, DEFAULT_PORT)
    if not port_text.isascii() or not port_text.isdigit() or not least_port <= int(port_text) <= 65535:
        raise ValueError(f"{port_text!r} in {text!r} is not a port (1..65535)")
    return Endpoint(host, int(port_text))


def parse_metrics_port(text: str) -> Endpoint:
    """Parse `port`, which is on loopback, or `host:port`; 0 is any free port. Raises ValueError for anything else."""
    match = re.fullmatch(r"(?:(\[.+\]|[^:]+):)?(\d+)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is neither a port nor HOST:PORT")
    return parse_endpoint(f"{match[1] or '127.0.0.1'}:{match[2]}", least_port=0)


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _visible_gpus(environ: Mapping[str, str]) -> int:
    """NVIDIA devices a worker would see, without loading CUDA."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1", "NoDevFiles")])
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def parse_nproc(text: str, environ: Mapping[str, str] = os.environ) -> int:
    """Turn `--nproc-per-node` into a number: digits, `cpu` (usable cores), `gpu`, or `auto` (GPUs if any, else cores).

    Raises ValueError for another word and for `gpu` where there is none.
    """
    word = text.strip().lower()
    if word.isascii() and word.isdigit():
        count = int(word)
        if not 1 <= count <= MAX_PROCESSES_PER_NODE:
            raise ValueError(f"{count} is not between 1 and {MAX_PROCESSES_PER_NODE}")
        return count
    if word == "cpu":
        return usable_cores()
    if word in ("auto", "gpu"):
        gpus = _visible_gpus(environ)
        if word == "gpu" and not gpus:
            raise ValueError("no NVIDIA GPU is visible here")
        return gpus or usable_cores()
    raise ValueError(f"{text!r} is neither a number nor auto, cpu or gpu")


def parse_nnodes(text: str) -> tuple[int, int]:
    """Turn `--nnodes` into the least and the largest number of nodes: `4` and `4:4` are one number, `1:4` a range.

    Raises ValueError for anything else.
    """
    least, _, most = text.strip().partition(":")
    numbers = (least, most or least)
    if not all(each.isascii() and each.isdigit() and int(each) >= 1 for each in numbers):
        raise ValueError(f"{text!r} is not a number of nodes (1 or more), nor a range (1:4)")
    if int(numbers[0]) > int(numbers[1]):
        raise ValueError(f"{text!r} is a range that ends before it begins")
    return int(numbers[0]), int(numbers[1])


def parse_outage(text: str) -> float:
    """Turn `--store-outage` into seconds; `forever` is infinity. Raises ValueError for anything else."""
    if text.strip().lower() == "forever":
        return math.inf
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{text!r} is neither a number of seconds, 0 or more, nor forever")
    return seconds


@dataclass(frozen=True, slots=True)
class RdzvTimes:
    """Seconds; None where nothing is said. `unused` are keys that mean nothing here."""

    join_s: float | None = None
    last_call_s: float | None = None
    keep_alive_s: float | None = None
    unused: tuple[str, ...] = ()


def parse_rdzv_conf(text: str) -> RdzvTimes:
    """Parse `key=value,key=value`. Raises ValueError for what has no such form, and for values that are no times."""
    found: dict[str, str] = {}
    for item in filter(None, (each.strip() for each in text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not key or not equals:
            raise ValueError(f"--rdzv-conf needs KEY=VALUE,KEY=VALUE, not {item!r}")
        found[key] = value
    interval_s = _positive(found, "keep_alive_interval")
    attempts = _positive(found, "keep_alive_max_attempt")
    return RdzvTimes(
        join_s=_positive(found, "join_timeout"),
        last_call_s=_positive(found, "last_call_timeout"),
        keep_alive_s=(interval_s or _INTERVAL_S) * (attempts or _ATTEMPTS) if interval_s or attempts else None,
        unused=tuple(key for key in found if key not in _KEYS),
    )


def _positive(found: dict[str, str], key: str) -> float | None:
    if key not in found:
        return None
    try:
        value = float(found[key])
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"--rdzv-conf {key} must be a number above 0, not {found[key]!r}")
    return value


def parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """Parse `SIGTERM,SIGUSR1`. Raises ValueError for a name that is none, and for a signal that cannot be handled."""
    found: list[signal.Signals] = []
    for name in (each.strip() for each in text.split(",")):
        if name not in signal.Signals.__members__ or name in _NOT_TO_HANDLE:
            raise ValueError(f"{name!r} is not a signal that can be handled (SIGTERM, SIGINT, SIGUSR1, ...)")
        found.append(signal.Signals[name])
    return tuple(dict.fromkeys(found))


def interface_with(host: str) -> str:
    """The name of the interface that has the address `host`, or one that the name `host` stands for.

    Resolves names, so it may block. Raises ValueError if there is none, listing what is there.
    """
    from asyncdist.transport.addresses import list_interfaces

    interfaces = list_interfaces()
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{host!r} is no address and no name that resolves: {error}") from error
    addresses = {str(entry[4][0]) for entry in found}
    for interface in interfaces:
        if interface.ip in addresses:
            return interface.name
    there = ", ".join(f"{each.name} ({each.ip})" for each in interfaces) or "none"
    raise ValueError(f"no network interface here has {host!r}; interfaces that are up: {there}")


def worker_command(script: str, args: tuple[str, ...], *, module: bool, no_python: bool) -> tuple[str, ...]:
    """Build a worker's argument vector.

    Python is the launcher's own, or the one that torchrun's variable PYTHON_EXEC names. Raises ValueError if `module`
    and `no_python` are both set, and FileNotFoundError if the script does not exist.
    """
    if module and no_python:
        raise ValueError("-m and --no-python exclude each other")
    if no_python:
        return (script, *args)
    python = os.environ.get("PYTHON_EXEC") or sys.executable
    if module:
        return (python, "-m", script, *args)
    if not Path(script).exists():
        raise FileNotFoundError(f"there is no script {script!r} in {os.getcwd()}")
    return (python, script, *args)
