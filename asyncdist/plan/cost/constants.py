"""Constants: what a machine and its network cost, for predictions (`plan.cost`) and simulations (`plan.simulation`).

All times are in seconds, all sizes in bytes. A message of n bytes between two idle ranks takes alpha_s + n beta_s; one
that is reduced where it arrives takes n gamma_s more. Of alpha_s, overhead_s is CPU time of the sender and overhead_s
is CPU time of the receiver; the rest is spent on the way, while both do other things.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

UNLIMITED: Final = 0
"""`Constants.cores` of hosts on which every rank has a core of its own."""


@dataclass(frozen=True, slots=True)
class Link:
    """What messages between hosts cost, instead of `Constants.alpha_s` and `Constants.beta_s`.

    `alpha_s` is as there. `beta_s` is seconds per byte of the host's network card, one direction; all ranks of the
    host share it, each direction by itself.
    """

    alpha_s: float
    beta_s: float


READ_S: Final = 1 / 20e9
"""The kernel copies page by page."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """What it costs to publish items in memory that all ranks of a host share, and to fetch them."""

    wake_s: float
    """From the moment an item is there until a rank goes on that had nothing to do, and has a core of its own."""
    step_s: float
    """CPU time to publish, fetch or reduce an item, without its bytes."""
    operand_s: float
    """CPU time to look at, and fold, what a rank has put into its record: small vectors and barriers need no items."""
    copy_s: float
    """CPU time per byte copied in or out."""
    reduce_s: float
    """CPU time per byte reduced where it lies."""
    begin_s: float = 0.0
    """CPU time to begin and to end a collective that moves items, however many."""
    read_s: float = READ_S
    """CPU time per byte of a long item read where it lies in its rank's memory, so that it is not copied in and out."""


SHARED_MEMORY: Final = SharedMemory(
    wake_s=7e-6, step_s=5e-6, operand_s=0.9e-6, copy_s=1 / 28e9, reduce_s=1 / 31e9, begin_s=12e-6
)
"""Python event loops that look at shared memory, woken by an eventfd; chunks that stay in the processor's cache. With
these, ranks of a small host all reduce whole vectors up to a megabyte, and share the work beyond."""


@dataclass(frozen=True, slots=True)
class Constants:
    """Seconds per message and per byte. Raises ValueError for negative ones.

    Every rank has one port to send and one to receive (`beta_s` each), and one thread that does all of its CPU work.
    Ranks of a host share its `cores`: where there are fewer than ranks, CPU work waits for a core.
    """

    alpha_s: float
    """One message without bytes, from the call that sends it until its receiver goes on: half a round trip."""
    beta_s: float
    """Per byte on the wire, from rank to rank."""
    gamma_s: float
    """Per byte reduced, CPU time. A local copy costs `COPY_SHARE` of it."""
    overhead_s: float
    """CPU time per message at each of its two ends; both are part of alpha_s."""
    copy_s: float = 0.0
    """CPU time per byte at each of a message's two ends: the copies into and out of the kernel. Both are made while
    bytes are under way, so a message alone is not slower by them; they count where a thread or cores are the limit."""
    cores: int = UNLIMITED
    """Cores of a host, shared by its ranks; 0: every rank has one of its own."""
    between: Link | None = None
    """Messages between hosts; None: they cost what they cost inside, and hosts have no card to share."""
    shared: SharedMemory = SHARED_MEMORY
    """Memory that the ranks of a host share, for groups that have a lane."""
    turn_s: float = 0.0
    """Where ranks share cores: from the moment one of them begins a collective until the next one, on the same core,
    has begun it too. Whatever the algorithm, it cannot end before all have begun."""

    def __post_init__(self) -> None:
        values = [self.alpha_s, self.beta_s, self.gamma_s, self.overhead_s, self.copy_s, float(self.cores), self.turn_s]
        values += [self.between.alpha_s, self.between.beta_s] if self.between else []
        shared = self.shared
        values += [shared.wake_s, shared.step_s, shared.operand_s, shared.copy_s, shared.reduce_s, shared.begin_s]
        if not all(value >= 0 for value in values):  # written so that NaN is refused as well
            raise ValueError(f"constants must not be negative: {self}")

    @property
    def latency_s(self) -> float:
        """Time on the way inside a host: alpha_s without the CPU time at both ends."""
        return max(0.0, self.alpha_s - 2 * self.overhead_s)

    def begun_s(self, ranks: int) -> float:
        """Until all have begun, where a host has `ranks` ranks: a turn for each that shares a core, but the first."""
        return self.turn_s * (ranks / self.cores - 1) if 0 < self.cores < ranks else 0.0

    def crowding(self, ranks: int) -> float:
        """How much longer it takes to go on when something has come, where a host has `ranks` ranks.

        A message is under way about as long as another rank works on it, so two to a core are not in each other's way.
        Who shares it with more has it back after all of them.
        """
        return max(1.0, ranks / (2 * self.cores)) if self.cores else 1.0

    @property
    def between_latency_s(self) -> float:
        """Time on the way between hosts."""
        return max(0.0, self.between.alpha_s - 2 * self.overhead_s) if self.between else self.latency_s


COPY_SHARE: Final = 0.5
"""A copy reads and writes once; a reduction reads twice, writes once and computes."""

ASYNCIO: Final = Constants(
    alpha_s=32e-6,
    beta_s=1 / 11e9,
    gamma_s=1 / 20e9,
    overhead_s=5e-6,
    copy_s=1 / 11e9,
    between=Link(alpha_s=60e-6, beta_s=1 / 1.5e9),
    turn_s=80e-6,
)
"""Python event loops as the selector takes them to be where nothing was measured: rings in shared memory inside a host,
where bytes cost two copies by the processor and little else, and TCP between hosts. Fitted, as the next ones and
`SHARED_MEMORY`, to what every algorithm of five collectives took from 1 KiB to 16 MiB, on 2 and 4 ranks of 2 cores."""

ASYNCIO_LOOPBACK: Final = replace(
    ASYNCIO, alpha_s=24e-6, beta_s=1 / 4.2e9, overhead_s=5.5e-6, copy_s=1 / 5.2e9, turn_s=115e-6
)
"""The same where ranks of a host share no memory: TCP over loopback or Unix sockets there."""

ASYNCIO_TCP: Final = Constants(alpha_s=60e-6, beta_s=1 / 1.5e9, gamma_s=0.2e-9, overhead_s=15e-6)
"""Python event loops over TCP."""

ASYNCIO_SHM: Final = Constants(alpha_s=25e-6, beta_s=1 / 4e9, gamma_s=0.2e-9, overhead_s=8e-6)
"""Python event loops over shared memory, woken by a doorbell."""

MPI_LIKE: Final = Constants(alpha_s=2e-6, beta_s=1 / 10e9, gamma_s=0.05e-9, overhead_s=0.5e-6)
"""A native library on a fast network."""

NCCL: Final = Constants(
    alpha_s=1.9e-6, beta_s=1 / 50e9, gamma_s=1 / 300e9, overhead_s=0.0, between=Link(alpha_s=4e-6, beta_s=1 / 25e9)
)
"""GPUs: latencies per hop of NCCL's own cost model for its LL128 protocol on a ring (NVLink 1.9 us, network 4 us), and
the bandwidths of Summit, where the published figures come from: 50 GB/s between two GPUs, 25 GB/s per host. Its model
counts 8.5 us for a network hop of a tree, which here is one hop like any other."""

BUILT_IN: Final[Mapping[str, Constants]] = MappingProxyType(
    {
        "asyncio": ASYNCIO,
        "asyncio-loopback": ASYNCIO_LOOPBACK,
        "asyncio-tcp": ASYNCIO_TCP,
        "asyncio-shm": ASYNCIO_SHM,
        "mpi-like": MPI_LIKE,
        "nccl": NCCL,
    }
)
"""The sets by the name that `asyncdist simulate --constants` takes."""
