"""SharedLane: the operations of one lane under way on this rank, moved on whenever a member has moved.

Steps that publish wait for room, steps that fetch for the item. Nobody waits in line for a wake-up: whoever changes
something that another member may wait for rings its doorbell, and every rank looks at all its operations when rung.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, TypeVar

import numpy as np

from asyncdist.collectives.executor.program import Program
from asyncdist.collectives.shared.channel import BY_ITEMS, NO_NEEDS, READY, Differs, Lane
from asyncdist.collectives.shared.inline_protocol import Express, ExpressKind, Payloads
from asyncdist.collectives.shared.layout import EXPRESS_BYTES, RECORDS, SKIPPED, LaneFault
from asyncdist.collectives.shared.operation import TURN_BYTES, SharedExecution, SharedPart, different
from asyncdist.errors import CollectiveMismatchError, PeerLostError
from asyncdist.transport.shared_memory.doorbell import Ringer

__all__ = ["SharedLane"]

T = TypeVar("T")
Lend: TypeAlias = Callable[[memoryview, bool], tuple[int, int] | None]

EXPRESS_NEWS: Final = 16
"""Express operations after which those who wait for us are looked after: a fourth of how far they can be ahead."""
EXPRESS_KINDS: Final = 32
"""Kinds of express operations whose payloads are kept as arrays."""


class SharedLane:
    """One member's side of a lane: `core` is the memory, `ringers` wake the other members (None for ourselves).

    `on_fault(rank, error)` is called, once and from the loop, when a member's memory says what cannot be: nothing moves
    any more then. `on_different(number, rank)` is called, from anywhere, when a member was found to run something else
    in a place of the order that may have ended here.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        core: Lane,
        ranks: Sequence[int],
        ringers: Sequence[Ringer | None],
        on_fault: Callable[[int, Exception], None],
        lend: Lend = lambda payload, single_copy: None,
        on_different: Callable[[int, int], None] = lambda number, rank: None,
    ) -> None:
        self.core = core
        self.lend = lend
        """Segment and offset of a payload that all members can read where it is, else None; with `single_copy` also in
        this process's own memory."""
        self.moved = 0
        """Bytes copied and reduced in this turn of the loop."""
        self.changed = False
        self.pumping = False
        """Whether `flush` will follow: what is done outside of that has to ask for a turn of its own."""
        self._on_fault = on_fault
        self._on_different = on_different
        self._left: dict[int, PeerLostError] = {}
        self._loop = loop
        self._ranks = ranks
        self._ringers = ringers
        self._others = [ringer for ringer in ringers if ringer is not None]
        self._parts: list[SharedPart] = []
        self._unbegun: deque[SharedPart | Express] = deque()
        self._express: deque[Express] = deque()
        self._payloads: dict[ExpressKind, dict[int, Payloads]] = {}
        self._again: asyncio.Handle | None = None
        self.closed = False

    def add(
        self, fingerprint: int, program: Program | None = None, execution: SharedExecution | None = None
    ) -> SharedPart:
        """Take the next place in the order, for an operation that runs here, or (without one) elsewhere or nowhere."""
        part = SharedPart(self, fingerprint, program, execution)
        self._unbegun.append(part)
        self.moved = 0
        self.pumping = program is not None
        self._begin()
        if self._left:
            self._loop.call_soon(self._fail_deserted)
        return part

    def add_express(self, operation: Express) -> None:
        """Take the next place in the order; the operation ends in this call if the others are there already."""
        if self._left:
            self._loop.call_soon(self._fail_deserted)
        self.moved = 0
        if self._unbegun or not self._begin_express(operation):
            self._unbegun.append(operation)
            self.soon()
            return
        # Who is not the last would only wake the others to find that they have to wait on. Each looks after it has said
        # that it is here, so at least the last one sees all.
        try:
            last = self.core.express_begun(operation.number)
        except LaneFault as error:
            self.fault(error)
            return
        if operation.kind.needed is not None:
            for member in operation.wakes(last=last):
                ringer = self._ringers[member]
                if ringer is not None:
                    ringer.knock()
        elif last:
            for ringer in self._others:
                ringer.knock()
        else:
            return
        if self._express[0] is operation:
            self._advance_express()

    def add_begun(self, operation: Express, program: Program, execution: SharedExecution) -> SharedPart:
        """Have the first of the operations in records go on in steps; what it gives is in its payload."""
        self._express.remove(operation)
        kind = operation.kind
        part = SharedPart(self, kind.fingerprint, program, execution, given=True)
        part.operation = self.core.by_items(operation.number, kind.fingerprint, program.needs)
        self._parts.append(part)
        return part

    def drop_express(self, operation: Express) -> None:
        """Forget an operation."""
        if operation in self._express:
            self._express.remove(operation)
            if not self.closed:
                self._retire(self.core.express_done, operation.number)
                self.soon()
        elif operation in self._unbegun:  # it takes its place all the same, in which nothing is to be found
            place = SharedPart(self, SKIPPED, None, None)
            self._unbegun[self._unbegun.index(operation)] = place

    def not_begun(self, number: int) -> tuple[int, ...]:
        """Members that have not begun operation `number`, or not put out their results; of -1, those that keep us from
        beginning it.
        """
        if self.closed:
            return ()
        try:
            if number < 0:
                return tuple(self.core.least_finished())
            behind = self.core.behind(number)
            if not behind and any(operation.number == number and operation.kind.folds for operation in self._express):
                behind = self.core.without_results(number)
            return tuple(behind)
        except LaneFault as error:
            return (error.member,)

    def poll(self) -> bool:
        """Look at what the members have done, and move on; whether anything was done."""
        if self.closed or not (self._express or self._parts or self._unbegun or self.changed or self.core.waiting):
            return False
        done = False
        self.moved = 0
        if self._express:
            done = self._advance_express()
            # That these have ended is news only to who is far ahead: the loop's next turn tells it.
            if not (self._unbegun or self._parts or (self.core.waiting and not done)):
                return done
        self.pumping = True
        try:
            self.core.retire()
            if self.core.differences:
                self._tell_differences()
            if self._unbegun and self._begin():
                done = True
                self.soon()  # the others may have begun those before us, and will not ring again
            for part in list(self._parts):
                done |= part.poll()
        except LaneFault as error:
            self.fault(error)
            done = True
        self.flush()
        return done

    def look(self) -> bool:
        """As `poll`, for whoever calls it again soon: nobody is told what has ended who is not close behind us."""
        if not self._express or self._unbegun or self._parts or self.core.open or self.closed:
            return self.poll()
        self.moved = 0
        return self._advance_express()

    def soon(self) -> None:
        """Poll in the loop's next turn."""
        if self._again is None and not self.closed:
            self._again = self._loop.call_soon(self._go_on)

    def left(self, member: int, error: PeerLostError) -> None:
        """A member has said goodbye. What it has put out is there still; what it has not begun will never be."""
        self._left[member] = error
        self.core.left(member)
        self._loop.call_soon(self._fail_deserted)

    def fault(self, error: LaneFault) -> None:
        """A member's memory says what cannot be. Its pair is broken off, which ends all it takes part in."""
        if not self.closed:
            self.close()
            self._loop.call_soon(self._on_fault, self._ranks[error.member], error)

    def tell(self) -> None:
        """Ring for what has changed, in the middle of a turn."""
        self.changed = False
        for ringer in self._others:
            ringer.ring()

    def flush(self) -> None:
        """Ring for what has changed since the last time; go on in the loop's next turn if this one was full."""
        self.pumping = False
        core = self.core
        if self.changed:
            self.changed = core.news = False
            for ringer in self._others:
                ringer.ring()
        elif core.news:
            core.news = False
            for member in core.wanted_by():
                waiting = self._ringers[member]
                if waiting is not None:
                    waiting.ring()
        if self.moved >= TURN_BYTES:
            self.soon()

    def ended(self, part: SharedPart) -> None:
        """An operation is over."""
        if part in self._parts:
            self._parts.remove(part)
        if part.operation is not None and not self.closed:
            self._retire(self.core.end, part.operation)
            if not self.pumping:
                self.soon()

    def different(self, member: int) -> CollectiveMismatchError:
        """A member runs another operation in this place of the order."""
        return different(self._ranks[member])

    def close(self) -> None:
        """Touch the memory no more, and have nobody take what is still lent. Idempotent."""
        if not self.closed:
            self.core.revoke_all()
        self.closed = True
        if self._again is not None:
            self._again.cancel()
        self._parts.clear()
        self._unbegun.clear()
        self._express.clear()
        self._payloads.clear()

    def _go_on(self) -> None:
        self._again = None
        self.poll()

    def _begin(self) -> bool:
        unbegun, done = self._unbegun, False
        while unbegun:
            part = unbegun[0]
            if not isinstance(part, SharedPart):
                if not self._begin_express(part):
                    break
                unbegun.popleft()
                done = self.changed = True
                continue
            program = part._program
            items, needs = (0, NO_NEEDS) if program is None else (program.items, program.needs)
            operation = self.core.begin(part.fingerprint, items, needs)
            if operation is None:
                break
            unbegun.popleft()
            done = self.core.news = True  # who waits for others to begin as well
            part.operation = operation
            if part.over:
                self._retire(self.core.end, operation)
            else:
                self._parts.append(part)
        return done

    def _begin_express(self, operation: Express) -> bool:
        kind, core, nbytes = operation.kind, self.core, operation.nbytes
        number = core.express_turn(nbytes)
        if number < 0:
            return False
        if kind.pieces:
            if nbytes:
                operation.put(np.frombuffer(core.express_payload(number, core.rank, nbytes), np.uint8))
        elif nbytes:
            try:
                payloads = self._payloads[kind][number % RECORDS]
            except KeyError:
                payloads = self._payloads_of(kind, number)
            operation.payloads = payloads
            if kind.gives:
                operation.put(payloads.own)
        core.express(number, kind.fingerprint, nbytes, kind.needs)
        operation.number = number
        self._express.append(operation)
        return True

    def _payloads_of(self, kind: ExpressKind, number: int) -> Payloads:
        """Arrays over the payloads of operation `number`, kept for all that come to lie in its place."""
        if kind not in self._payloads:
            if len(self._payloads) >= EXPRESS_KINDS:
                self._payloads.clear()
            self._payloads[kind] = {}
        core, needed = self.core, kind.needed
        arrays = {
            member: np.frombuffer(core.express_payload(number, member, kind.nbytes), kind.dtype)
            for member in (range(len(self._ranks)) if needed is None else {*needed, core.rank})
        }
        operands = [arrays[member] for member in (arrays if needed is None else needed)]
        found = self._payloads[kind][number % RECORDS] = Payloads(arrays[core.rank], operands)
        return found

    def _advance_express(self) -> bool:
        """End express operations, in their order, as far as all members have begun them; whether any has ended."""
        express, core = self._express, self.core
        done = False
        while express:
            operation = express[0]
            number, kind = operation.number, operation.kind
            try:
                if not (self._results(operation) if kind.folds else self._ready(operation)):
                    break
                operation.take()
            except LaneFault as error:
                self.fault(error)
                return True
            except Exception as error:
                if isinstance(error, Differs):
                    error = self.different(error.member)
                operation.fail(error)
                return True
            express.popleft()
            core.express_done(number, begun=kind.needed is None)
            if core.differences:  # in this one, or in one before it: it does not end well any more
                self._tell_differences()
                return True
            done = True
            if kind.nbytes > EXPRESS_BYTES or not number % EXPRESS_NEWS:  # one may wait for the next slot already
                self.flush()
            elif self._again is None:  # nor may one who is far ahead wait for us while we sleep
                self.soon()
            self.moved += kind.nbytes * len(self._ranks)
            operation.done()
            if self.moved >= TURN_BYTES:
                self.soon()
                break
        return done

    def _ready(self, operation: Express) -> bool:
        kind, core = operation.kind, self.core
        if not kind.pieces:
            return core.express_ready(operation.number, kind.fingerprint, kind.needed)
        found = core.express_pieces(operation.number, kind.fingerprint, kind.needs)
        if found == BY_ITEMS:
            operation.by_items()
            self.soon()
        return found == READY

    def _results(self, operation: Express) -> bool:
        """Whether all results are there. Puts ours out once all payloads are."""
        core, number = self.core, operation.number
        if operation.folded:
            return not core.without_results(number)
        if not self._ready(operation):
            return False
        operation.fold()
        operation.folded = True
        if not core.express_results(number):
            return False
        for ringer in self._others:  # as who begins last does
            ringer.knock()
        return True

    def _retire(self, end: Callable[[T], None], what: T) -> None:
        try:
            end(what)
        except LaneFault as error:
            self.fault(error)
        if self.core.differences:
            self._tell_differences()

    def _tell_differences(self) -> None:
        differences, self.core.differences = self.core.differences, []
        for number, member in differences:
            self._on_different(number, self._ranks[member])

    def _fail_deserted(self) -> None:
        """Fail what a member that has left will never begin."""
        self.poll()  # what it has begun all others can begin as well; of that none is kept waiting here
        for operation in [*self._express, *self._parts, *self._unbegun]:
            if self.closed:
                return
            number = operation.number
            gone = [member for member in self.not_begun(number) if member in self._left] if number >= 0 else self._left
            for member in gone:
                operation.fail(self._left[member])
                break
