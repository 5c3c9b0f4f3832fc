"""Subject torch-store: torch's own client, one request at a time, to asyncdist's daemon and to torch's server.

Either server has a process of its own; one process is the client of both, with the same unmodified
`torch.distributed.TCPStore`, and asks them in turns, a block of requests each. So wherever the kernel puts it, both are
measured from there. get is two round trips of torch's (wait, then get); set has no answer, so each is followed by a
check that it has arrived.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from time import perf_counter_ns

from bench.cases import Case, Record
from bench.missing import missing_module, missing_torch
from bench.model import Candidate, Profile, Subject
from bench.servers import asyncdist_torch_server, torch_store_server
from bench.store import KEY, TorchStoreRank, value_of

OPERATIONS = frozenset({"get", "set", "add", "check"})
COUNTER = "bench/counter"
BLOCKS = 8
"""A run of 200 requests is as long as a few turns of the kernel's scheduler; of 25, one."""


class TorchClientRank(TorchStoreRank):
    """torch's client, one request at a time."""

    async def beside(self, address: str) -> TorchClientRank:
        """Return a client of the server at `address`, in this process."""
        other = TorchClientRank(dataclasses.replace(self._context, address=address))
        await other.open()
        return other

    async def measure(self, case: Case) -> Record:
        operation = {"get": self._get, "set": self._set, "add": self._add, "check": self._check}[case.operation]
        self._client.set(KEY, value_of(0))
        record = Record()
        base = self._client.add(COUNTER, 0)
        for number in range(case.warmup + case.samples):
            if case.operation == "get":
                self._client.set(KEY, value_of(number))
            start_ns = perf_counter_ns()
            wrong = operation(number if case.operation != "add" else base + number + 1)
            end_ns = perf_counter_ns()
            record.wrong += wrong
            if number >= case.warmup:
                record.add(start_ns, end_ns)
        return record

    def _set(self, number: int) -> int:
        self._client.set(KEY, value_of(number))
        return int(self._client.check([KEY]) is not True)

    def _add(self, expected: int) -> int:
        return int(self._client.add(COUNTER, 1) != expected)


def missing() -> str | None:
    """Why torch's client cannot be measured on asyncdist's daemon, or None."""
    return missing_torch() or missing_module("asyncdist_server")


def cases(profile: Profile) -> Sequence[Case]:
    """Return the cells of a profile."""
    samples, warmup = profile.samples(large=False)
    return [
        Case("get", 8, samples, warmup),
        Case("set", 8, samples, warmup, title="set 8 B and check"),
        Case("add", 0, samples, warmup),
        Case("check", 0, samples, warmup),
    ]


ASYNCDIST = Candidate(
    "asyncdist's daemon",
    "bench.torch_store:TorchClientRank",
    OPERATIONS,
    missing=missing,
    server=asyncdist_torch_server,
    own=True,
)
TORCH = Candidate(
    "torch's server",
    "bench.torch_store:TorchClientRank",
    OPERATIONS,
    missing=missing_torch,
    server=torch_store_server,
    ranks_of=ASYNCDIST.name,
)
SUBJECT = Subject("torch-store", "Store requests of torch's client", (1,), cases, (ASYNCDIST, TORCH), blocks=BLOCKS)
