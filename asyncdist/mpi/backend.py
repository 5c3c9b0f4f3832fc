"""MpiBackend: the collectives of one group by MPI's own operations, once all ranks have agreed on what comes.

Ranks that call different things would hang in MPI, or get each other's bytes. So the ranks first exchange the
fingerprints of each collective, in the order of the calls (`Iallgather` of one number, some microseconds). Where all
are equal MPI's operation begins on all ranks, or the plan of `aio` where MPI has no such operation
(`transfer.has_equal`). Where one is not, that rank is named, and nothing has moved.

MPI's order is one for each communicator. So collectives of tag 0 go this way, and those of other tags by plans, whose
messages have tags of their own. A group of some ranks gets its communicators with its first collective.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from time import perf_counter
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from asyncdist.arrays import reduction
from asyncdist.arrays.reduce_op import PremulSum, ReduceOp
from asyncdist.collectives.arguments.call import Call, barrier
from asyncdist.collectives.backend import CollectiveWork, OnEnd
from asyncdist.collectives.executor.runner import different, run_sliced
from asyncdist.collectives.host.backend import HostBackend
from asyncdist.collectives.shared.agreement import RESERVED
from asyncdist.errors import DistBackendError
from asyncdist.mpi.library import leave_behind, threads_allowed
from asyncdist.mpi.mesh import Communicators, MpiMesh
from asyncdist.mpi.transfer import Transfer, has_equal
from asyncdist.plan.selection.selector import plan_id
from asyncdist.transport.base_mesh import BaseMesh

__all__ = ["MpiBackend"]

REFUSED: Final = -1
"""In place of a fingerprint: this rank does not carry the operation out."""
ELSEWHERE: Final = -2
"""In place of a fingerprint: the arrays are on GPUs, whose backend carries the operation out."""
SETTLE_S: Final = 0.05
"""How long an abort waits for MPI's operations: all ranks have begun them, as a rule, so that they end at once."""
FINGERPRINTS_KEPT: Final = 256
GROUP_TAGS: Final = 1 << 14
"""Tags that tell groups apart which are made at the same time."""


class Issued(NamedTuple):
    """A collective as the group has issued it."""

    call: Call
    work: CollectiveWork
    on_end: OnEnd


class Agreement:
    """The exchange of fingerprints in one place of the order. `issued` is None where this rank has nothing to begin."""

    __slots__ = ("done", "fingerprint", "issued", "mine", "number", "request", "theirs")

    def __init__(self, comm: Any, number: int, issued: Issued | None, fingerprint: int) -> None:
        self.number = number
        self.issued = issued
        self.fingerprint = fingerprint
        self.mine = np.array([fingerprint], np.int64)
        self.theirs = np.empty(comm.Get_size(), np.int64)
        self.done = False
        self.request = comm.Iallgather(self.mine, self.theirs)


class MpiBackend(HostBackend):
    """Collectives of one group on host arrays."""

    name: ClassVar[str] = "mpi"

    _mesh: MpiMesh

    def __init__(self, mesh: BaseMesh, group_id: int, ranks: tuple[int, ...], rank: int, **options: Any) -> None:
        """Raises ValueError in a world that was not opened with this backend."""
        super().__init__(mesh, group_id, ranks, rank, **options)
        if not isinstance(mesh, MpiMesh):
            raise ValueError('backend "mpi" needs a world that init_process_group("mpi") or ("cpu:mpi") has opened')
        self._progress = mesh.progress
        self._comms: Communicators | None = mesh.take_communicators(ranks)
        self._owns_comms = self._comms is None
        self._making = False
        self._by_mpi = len(ranks) > 1 and (self._comms is not None or threads_allowed(mesh.mpi))
        self._due: dict[int, Issued | int] = {}
        """By place in the order, what is not agreed on yet, or REFUSED, or ELSEWHERE."""
        self._next = 0
        self._agreements: deque[Agreement] = deque()
        self._transfers: dict[int, tuple[Transfer, Issued]] = {}
        self._fingerprints: dict[tuple[Any, ...], int] = {}
        self._ended = False

    def start(self, call: Call, work: CollectiveWork, on_end: OnEnd) -> None:
        """Begin `call`, once all ranks have come to its place of the order."""
        if work.tag or not self._by_mpi:
            super().start(call, work, on_end)
        else:
            self._due[work.number] = Issued(call, work, on_end)
            self._agree()

    def elsewhere(self, tag: int, sequence: int) -> None:
        """See GroupBackend. The place is agreed on, too: another rank may refuse it, or have a host array there."""
        if not tag and self._by_mpi and sequence >= self._next:
            self._due[sequence] = ELSEWHERE
            self._agree()

    def waiting_for(self, tag: int, sequence: int) -> tuple[int, ...]:
        """See HostBackend. MPI does not say whom it waits for: all others, unless the group is being made."""
        if (tag, sequence) in self.running or tag or not self._by_mpi:
            return super().waiting_for(tag, sequence)
        if self._comms is None:
            return super().waiting_for(0, RESERVED[0])
        return tuple(rank for index, rank in enumerate(self.ranks) if index != self.rank)

    def drop(self, tag: int, sequence: int) -> None:
        """See GroupBackend. A place that is not agreed on yet is told to be refused, in its turn."""
        super().drop(tag, sequence)
        if tag or not self._by_mpi or sequence in RESERVED or self._ended:
            return
        if sequence >= self._next:
            self._due[sequence] = REFUSED
            self._agree()
            return
        for agreement in self._agreements:
            if agreement.number == sequence:
                agreement.issued = None
        if sequence in self._transfers:
            self._settle_transfers([sequence])

    def abort(self, error: BaseException) -> None:
        """See GroupBackend. An array whose operation does not end soon may be written as long as the process lives."""
        self._ended = True
        super().abort(error)
        self._due.clear()
        self._settle_transfers(list(self._transfers))
        for agreement in self._agreements:
            if self._progress.forget(agreement):
                leave_behind("agreements on collectives", [agreement.request], agreement)
        self._agreements.clear()

    def close(self) -> None:
        """See GroupBackend."""
        super().close()
        if self._owns_comms and self._comms is not None and not self._ended:
            self._ended = True
            for comm in self._comms:
                comm.Free()

    # -- agreeing

    def _agree(self) -> None:
        """Tell the others what comes in the next places of the order, as far as this rank knows them."""
        if self._comms is None:
            self._make_communicators()
            return
        while self._next in self._due:
            number, due = self._next, self._due.pop(self._next)
            issued, mine = (None, due) if isinstance(due, int) else (due, self._fingerprint(due.call))
            agreement = Agreement(self._comms[0], number, issued, mine)
            self._next += 1
            self._agreements.append(agreement)
            self._progress.wait(agreement, [agreement.request], partial(self._agreed, agreement))

    def _fingerprint(self, call: Call) -> int:
        found = self._fingerprints.get(call.recipe_key)
        if found is None:
            op = ReduceOp.PREMUL_SUM if isinstance(call.op, PremulSum) else call.op  # factors may differ between ranks
            detail = f"{call.dtype.name} {op!r} {call.detail}"
            if len(self._fingerprints) >= FINGERPRINTS_KEPT:
                del self._fingerprints[next(iter(self._fingerprints))]
            found = plan_id(call.collective, call.algorithm or "mpi", len(self.ranks), call.counts, call.root, detail)
            self._fingerprints[call.recipe_key] = found
        return found

    def _agreed(self, agreement: Agreement, error: Exception | None) -> None:
        if error is not None:
            if agreement.issued is not None:
                self._fail(agreement.issued, error)
            return
        agreement.done = True
        while self._agreements and self._agreements[0].done:
            first = self._agreements.popleft()
            if first.issued is None:
                continue
            mine, theirs = first.fingerprint, first.theirs.tolist()
            if theirs.count(mine) == len(theirs):
                self._carry_out(first.issued)
            elif REFUSED not in theirs:  # who refuses it says why
                differs = next(index for index, one in enumerate(theirs) if one != mine)
                first.issued.on_end(first.issued.work, different(self.ranks[differs]))

    # -- carrying out

    def _carry_out(self, issued: Issued) -> None:
        call, work, on_end = issued
        assert self._comms is not None
        try:
            if not has_equal(call, len(self.ranks)):
                super().start(call, work, on_end)
                return
            transfer = Transfer(self._mesh.mpi, self._comms[1], call, self.ranks, self.rank, work.number)
        except Exception as error:  # out of memory, or MPI said no: nobody else may wait for us either
            self._fail(issued, error)
            return
        self._transfers[work.number] = transfer, issued
        self._progress.wait(transfer, transfer.requests, partial(self._moved, issued), call.nbytes, transfer.statuses)

    def _moved(self, issued: Issued, error: Exception | None) -> None:
        """MPI is through with an operation."""
        transfer, _ = self._transfers[issued.work.number]
        call = issued.call
        try:
            if error is not None:
                raise transfer.failure(error) or DistBackendError(f"MPI: {error}") from error
            transfer.finish()
        except Exception as failure:
            self._settle_transfers([issued.work.number])  # one of several requests has failed
            issued.on_end(issued.work, failure)
            return
        if call.op is not ReduceOp.AVG or not call.finishes:
            self._deliver(issued)
            return
        elements, world = call.outputs[0].elements, len(self.ranks) * call.shares

        def divide(start: int, stop: int) -> None:
            if issued.work.number in self._transfers:
                reduction.finish(ReduceOp.AVG, elements[start:stop], world)

        run_sliced(self.loop, elements.size, elements.itemsize, divide, partial(self._deliver, issued))

    def _deliver(self, issued: Issued) -> None:
        if self._transfers.pop(issued.work.number, None) is None:  # aborted meanwhile
            return
        error: Exception | None = None
        try:
            for flat in issued.call.outputs:
                flat.write_back()
        except Exception as failure:  # an array cannot be written any more: its owner has changed it meanwhile
            error = failure
        issued.on_end(issued.work, error)

    def _fail(self, issued: Issued, error: Exception) -> None:
        mpi = isinstance(error, self._mesh.mpi.Exception)
        issued.on_end(issued.work, DistBackendError(f"MPI: {error}") if mpi else error)

    def _settle_transfers(self, numbers: list[int]) -> None:
        """Give MPI a moment to end operations that nobody waits for any more, and leave the others behind."""
        until_s = perf_counter() + SETTLE_S
        for number in numbers:
            transfer, issued = self._transfers.pop(number)
            self._progress.forget(transfer)
            while not (ended := self._progress.is_over(transfer.requests)) and perf_counter() < until_s:
                pass
            if not ended:
                leave_behind(issued.work.operation, transfer.requests, transfer)

    # -- communicators of a group of some ranks

    def _make_communicators(self) -> None:
        """Once all members are there: MPI's way of making one blocks, for a moment, and so is taken in a thread."""
        if not self._making:
            self._making = True
            work = CollectiveWork(self.loop, "new_group", 0, 0, RESERVED[0], None)
            super().start(barrier(), work, self._members_there)

    def _members_there(self, work: CollectiveWork, error: BaseException | None) -> None:
        if error is None:
            threading.Thread(target=self._create, name="asyncdist mpi group", daemon=True).start()
        else:
            self._fail_all(error)

    def _create(self) -> None:
        comms: Communicators | None = None
        failure: BaseException | None = None
        world = self._mesh.comm
        try:
            comm = world.Create_group(world.Get_group().Incl(self.ranks), self.group_id % GROUP_TAGS)
            comms = comm, comm.Dup()
        except Exception as error:
            failure = error
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._created, comms, failure)

    def _created(self, comms: Communicators | None, error: BaseException | None) -> None:
        self._comms = comms
        if error is not None:
            self._fail_all(DistBackendError(f"MPI makes no communicator for the group: {error}"))
        elif not self._ended:
            self._agree()

    def _fail_all(self, error: BaseException) -> None:
        due = list(self._due.values())
        self._due.clear()
        for issued in due:
            if not self._ended and not isinstance(issued, int):
                issued.on_end(issued.work, error)
