"""Program: a plan made ready to run many times.

The plan's steps become parallel tuples indexed by step number, dependencies become counters and successors, and slots
become the bytes that name a message on the wire. All of it is worked out once per plan and kept with it.
"""

from __future__ import annotations

from typing import Final

from asyncdist.plan.steps import Buffer, Copy, Plan, Recv, RecvReduce, Reduce, Send, Slice
from asyncdist.transport.frame import key_suffix

__all__ = ["COPY", "RECV", "RECV_REDUCE", "REDUCE", "SEND", "Program"]

SEND: Final = 0
RECV: Final = 1
RECV_REDUCE: Final = 2
REDUCE: Final = 3
COPY: Final = 4

COLLECTIVE_CHANNEL: Final = 1


class Program:
    """One rank's plan, compiled.

    For step i: `kinds[i]`, `peers[i]` (group rank, -1 for local steps), `suffixes[i]` (end of the message's key),
    `places[i]` (the slice written or sent), `sources[i]` (the slice read by local steps), `lefts[i]` (whether the
    incoming operand goes left), `successors[i]`; `pending` is how many steps each waits for, `ready` those that wait
    for none, `peer_ranks` every peer named.
    """

    __slots__ = (
        "kinds",
        "lefts",
        "peer_ranks",
        "peers",
        "pending",
        "places",
        "plan",
        "ready",
        "sources",
        "successors",
        "suffixes",
    )

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        steps = plan.steps
        successors: list[list[int]] = [[] for _ in steps]
        for index, step in enumerate(steps):
            for earlier in step.after:
                successors[earlier].append(index)
        nothing = Slice(Buffer.SCRATCH, 0, 0)
        self.successors = tuple(map(tuple, successors))
        self.pending = [len(step.after) for step in steps]
        self.ready = tuple(index for index, step in enumerate(steps) if not step.after)
        self.kinds = tuple(_KINDS[type(step)] for step in steps)
        self.peers = tuple(step.peer if isinstance(step, _MESSAGES) else -1 for step in steps)
        self.suffixes = tuple(
            key_suffix(step.slot, COLLECTIVE_CHANNEL) if isinstance(step, _MESSAGES) else b"" for step in steps
        )
        self.places = tuple(step.source if isinstance(step, Send) else step.target for step in steps)
        self.sources = tuple(step.source if isinstance(step, Copy | Reduce) else nothing for step in steps)
        self.lefts = tuple(
            step.incoming_left
            if isinstance(step, RecvReduce)
            else step.source_left
            if isinstance(step, Reduce)
            else False
            for step in steps
        )
        self.peer_ranks = tuple(sorted({peer for peer in self.peers if peer >= 0}))


_KINDS: Final = {Send: SEND, Recv: RECV, RecvReduce: RECV_REDUCE, Reduce: REDUCE, Copy: COPY}
_MESSAGES: Final = (Send, Recv, RecvReduce)
