"""Random programs on connected cores against the rule they must obey: per key, first sent to first posted.

Sizes and limits are small, so that credit, offers, stalls, asks and early pulls all happen in a few steps. After every
step the bounds hold; at the end everything that can be matched is, once, in order, with the right bytes.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest
from fewer_cases import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from small_limits import ASKS, CREDIT, EAGER, EARLY_PULL, EARLY_PULLS, OFFERS, small_limits
from transport_pair import Recorder, Wire

from asyncdist.errors import CollectiveMismatchError, CollectiveTimeoutError, PeerLostError
from asyncdist.transport.protocol.frame import pack_key
from asyncdist.transport.protocol.matching import AnySourceTable, DroppedGroups
from asyncdist.transport.protocol.operations import Receive, ReceiveState, SendOp, SendState
from asyncdist.transport.protocol.peer import PeerCore

TAGS = 3
GROUPS = (1, 2)
ALL_SIZES = (0, 1, 100, EARLY_PULL, EARLY_PULL + 1, EAGER, EAGER + 1, 3000)
SIZES = st.sampled_from(ALL_SIZES)
RANKS = st.integers(0, 2)


class Message:
    """What was sent, and what became of it."""

    def __init__(self, source: int, target: int, key: bytes, data: bytes, meta: bytes, token: Any) -> None:
        self.op: SendOp
        self.withdrawn = False
        self.token = token
        self.source = source
        self.target = target
        self.key = key
        self.data = data
        self.meta = meta


class Posted:
    """A receive, and what became of it."""

    def __init__(self, rank: int, source: int | None, receive: Receive, token: Any) -> None:
        self.rank = rank
        self.source = source
        self.receive = receive
        self.token = token
        self.withdrawn = False


class World(RuleBasedStateMachine):
    """Three ranks, each connected with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = small_limits()
        self.limits.__enter__()
        self.any_source = [AnySourceTable() for _ in range(3)]
        self.dropped = [DroppedGroups() for _ in range(3)]
        self.sinks = [Recorder() for _ in range(3)]
        self.messages: list[Message] = []
        self.receives: list[Posted] = []
        self.slots: dict[tuple[int, int], int] = defaultdict(int)
        self.dropped_at: dict[tuple[int, int], tuple[dict[Any, bytes], int]] = {}
        self.counter = 0

    @initialize(seed=st.integers(0, 1 << 32))
    def connect(self, seed: int) -> None:
        rng = random.Random(seed)
        self.cores = {
            (rank, peer): PeerCore(
                rank, peer, lambda rank, payload: None, any_source=self.any_source[rank], dropped=self.dropped[rank]
            )
            for rank in range(3)
            for peer in range(3)
            if rank != peer
        }
        self.wires = [Wire(core, self.cores[peer, rank], rng) for (rank, peer), core in self.cores.items()]
        self.opened = [False] * len(self.wires)

    def teardown(self) -> None:
        try:
            if self.messages or self.receives:
                self.settle()
                self.check_matching()
        finally:
            self.limits.__exit__(None, None, None)

    # -- what may happen

    @rule(wire=st.integers(0, 5))
    def open(self, wire: int) -> None:
        if not self.opened[wire]:
            self.opened[wire] = True
            self.wires[wire].open()

    @rule(wire=st.integers(0, 5), limit=st.sampled_from((1, 48, 500, 5000, None)), step=st.sampled_from((1, 7, None)))
    def deliver(self, wire: int, limit: int | None, step: int | None) -> None:
        self.wires[wire].deliver(limit, step)

    @rule(wire=st.integers(0, 5), capacity=st.sampled_from((0, 100, 1000, 1 << 30)))
    def squeeze(self, wire: int, capacity: int) -> None:
        self.wires[wire].capacity = capacity

    @rule(
        source=RANKS,
        offset=st.integers(1, 2),
        tag=st.integers(0, TAGS - 1),
        group=st.sampled_from(GROUPS),
        size=SIZES,
        count=st.sampled_from((1, 1, 2, 8)),
        meta=st.sampled_from((b"", b"float32 3 4")),
    )
    def send(self, source: int, offset: int, tag: int, group: int, size: int, count: int, meta: bytes) -> None:
        for _ in range(count):
            self._send(source, (source + offset) % 3, pack_key(group, tag, 0, 0, 0), size, meta)

    def _send(self, source: int, target: int, key: bytes, size: int, meta: bytes, *, bulk: bool = False) -> None:
        if (source, key[0]) in self.dropped_at:
            return
        self.counter += 1
        data = (self.counter.to_bytes(4, "little") * (size // 4 + 1))[:size]
        token = ("s", self.counter)
        self.messages.append(Message(source, target, key, data, meta, token))
        op = SendOp(key, memoryview(data), meta, self.sinks[source], token, bulk=bulk)
        self.messages[-1].op = op
        if self.cores[source, target].post_send(op):
            self.sinks[source].message_sent(token)

    @rule(
        rank=RANKS,
        offset=st.integers(0, 2),
        tag=st.integers(0, TAGS - 1),
        group=st.sampled_from(GROUPS),
        count=st.sampled_from((1, 1, 2, 8)),
    )
    def receive(self, rank: int, offset: int, tag: int, group: int, count: int) -> None:
        for _ in range(count):
            source = None if offset == 0 else (rank + offset) % 3
            self._receive(rank, source, pack_key(group, tag, 0, 0, 0), None)

    def _receive(self, rank: int, source: int | None, key: bytes, size: int | None, *, bulk: bool = False) -> None:
        if (rank, key[0]) in self.dropped_at:
            return
        self.counter += 1
        token = ("r", self.counter)
        sink = self.sinks[rank]
        target = None
        if size is not None:
            sink.arrays[token] = bytearray(size)
            target = memoryview(sink.arrays[token])
        receive = Receive(key, target, sink, token, bulk=bulk)
        self.receives.append(Posted(rank, source, receive, token))
        try:
            if source is None:
                complete = self.any_source[rank].post(receive, range(3))
            else:
                complete = self.cores[rank, source].post_receive(receive)
        except CollectiveMismatchError as error:
            sink.message_failed(token, error)
        else:
            if complete:
                sink.message_received(token, receive)

    @rule(
        source=RANKS,
        offset=st.integers(1, 2),
        size=SIZES,
        first=st.booleans(),
        wrong=st.sampled_from((0, 0, 0, 1)),
        steps=st.integers(0, 3),
        group=st.sampled_from(GROUPS),
        meta=st.sampled_from((b"", b"meta")),
        bulk=st.sampled_from(((False, False), (True, True), (False, True), (True, False))),
    )
    def collective(
        self,
        source: int,
        offset: int,
        size: int,
        first: bool,
        wrong: int,
        steps: int,
        group: int,
        meta: bytes,
        bulk: tuple[bool, bool],
    ) -> None:
        target = (source + offset) % 3
        slot = self.slots[source, target]
        self.slots[source, target] += 1
        key = pack_key(group, 0, 1, slot, 1)
        posts = [
            lambda: self._send(source, target, key, size, meta, bulk=bulk[0]),
            lambda: self._receive(target, source, key, size + wrong, bulk=bulk[1]),
        ]
        posts[first]()
        for wire in self.wires[:steps]:
            wire.deliver(1000)
        posts[not first]()

    @rule(which=st.integers(0, 1 << 16))
    def withdraw(self, which: int) -> None:
        posted = [p for p in self.receives if not p.withdrawn and not p.receive.key[20]]
        if not posted:
            return
        chosen = posted[which % len(posted)]
        if chosen.source is None:
            chosen.withdrawn = self.any_source[chosen.rank].withdraw(chosen.receive)
        else:
            chosen.withdrawn = self.cores[chosen.rank, chosen.source].withdraw(chosen.receive)

    @rule(which=st.integers(0, 1 << 16))
    def withdraw_send(self, which: int) -> None:
        """Its receive, if it has met one, fails instead of meeting another message in its place."""
        pending = [
            m
            for m in self.messages
            if not (m.withdrawn or m.key[20] or (m.source, m.key[0]) in self.dropped_at)
            and m.token not in self.sinks[m.source].order
        ]
        if not pending:
            return
        chosen = pending[which % len(pending)]
        core = self.cores[chosen.source, chosen.target]
        chosen.withdrawn = core.withdraw(chosen.op) or core.give_up(chosen.op)
        if not chosen.withdrawn:
            self.sinks[chosen.source].message_sent(chosen.token)

    @rule(rank=RANKS)
    def drop_group(self, rank: int) -> None:
        """Group 2 only, so that group 1 is always left to go on."""
        if (rank, 2) in self.dropped_at:
            return
        group = pack_key(2, 0, 0, 0, 0)[:8]
        self.dropped[rank].add(group)
        self.any_source[rank].drop_group(group)
        for (owner, _), core in self.cores.items():
            if owner == rank:
                core.drop_group(group)
        sink = self.sinks[rank]
        arrays = {
            p.token: bytes(sink.arrays[p.token])
            for p in self.receives
            if p.rank == rank and p.receive.key[0] == 2 and p.token in sink.arrays
        }
        self.dropped_at[rank, 2] = arrays, len(sink.order)

    def run_long(self, rng: random.Random, steps: int) -> None:
        """Steps weighed differently by each seed."""
        sizes = ALL_SIZES
        counts = (1, 1, 2, 8)
        drop_at = rng.choice((-1, rng.randrange(steps)))
        any_share, send_share, delivery_share = rng.choice((0, 0.1, 0.5)), rng.choice((0.2, 0.5, 0.8)), rng.random()
        one_pair = rng.random() < 0.5
        for step in range(steps):
            if rng.random() < delivery_share:
                self.deliver(rng.randrange(6), rng.choice((1, 48, 500, 5000, None)), rng.choice((1, 7, None, None)))
            source, offset = (0, 1) if one_pair else (rng.randrange(3), rng.choice((1, 2)))
            action = rng.random()
            if action < 0.5 * send_share:
                meta = rng.choice((b"", b"float"))
                self.send(
                    source, offset, rng.randrange(TAGS), rng.choice(GROUPS), rng.choice(sizes), rng.choice(counts), meta
                )
            elif action < 0.5:
                back = 0 if rng.random() < any_share else 3 - offset
                self.receive((source + offset) % 3, back, rng.randrange(TAGS), rng.choice(GROUPS), rng.choice(counts))
            elif action < 0.7:
                wrong = rng.choice((0, 0, 0, 1))
                first = rng.random() < 0.5
                group, meta = rng.choice(GROUPS), rng.choice((b"", b"m"))
                bulk = rng.choice(((False, False), (True, True), (False, True), (True, False)))
                self.collective(source, offset, rng.choice(sizes), first, wrong, rng.randrange(4), group, meta, bulk)
            elif action < 0.8:
                rng.choice((self.withdraw, self.withdraw_send))(rng.randrange(1000))
            elif action < 0.9:
                self.open(rng.randrange(6))
            else:
                self.squeeze(rng.randrange(6), rng.choice((0, 100, 1000, 1 << 30)))
            if step == drop_at:
                self.drop_group(rng.randrange(3))
            self.bounded()
            self.states_are_what_the_sinks_heard()

    # -- what must hold

    @invariant()
    def bounded(self) -> None:
        if not hasattr(self, "cores"):
            return
        for core in self.cores.values():
            held = core.statistics()
            assert held["unexpected_bytes"] <= 2 * CREDIT
            assert held["unexpected_offers"] <= 2 * (OFFERS + len(self.receives))
            assert held["early_pulls"] <= EARLY_PULLS
            assert held["credit"] <= 2 * CREDIT
            for window in core._receiver.windows:
                assert len(window.asked) <= ASKS

    @invariant()
    def states_are_what_the_sinks_heard(self) -> None:
        held: dict[tuple[int, int], int] = defaultdict(int)
        streaming: dict[tuple[int, int], int] = defaultdict(int)
        for message in self.messages:
            sink, state, pair = self.sinks[message.source], message.op.state, (message.source, message.target)
            held[pair] += state is SendState.HELD
            streaming[pair] += state is SendState.STREAMING
            assert (message.token in sink.failed) is (state is SendState.FAILED)
            if message.token in sink.sent:  # a send that is given up too late is complete
                assert state in (SendState.SENT, SendState.DROPPED)
            else:
                assert state is not SendState.SENT
        for posted in self.receives:
            sink, of_receive = self.sinks[posted.rank], posted.receive.state
            assert (posted.token in sink.received) is (of_receive is ReceiveState.RECEIVED)
            assert (posted.token in sink.failed) is (of_receive is ReceiveState.FAILED)
            assert posted.withdrawn is (of_receive is ReceiveState.WITHDRAWN)
        for pair, core in getattr(self, "cores", {}).items():
            assert core.statistics()["held"] == held[pair]
            assert (
                core.statistics()["streams_out"] >= streaming[pair] - 1
            )  # one was stopped in the middle of a fragment

    def settle(self) -> None:
        for wire, opened in zip(self.wires, self.opened, strict=True):
            wire.capacity = 1 << 60
            wire.rng = None
            if not opened:
                wire.open()
        for _ in range(10_000):
            if not sum(wire.deliver() for wire in self.wires):
                return
        raise AssertionError("never comes to rest")

    def check_matching(self) -> None:
        dropped = {group for _, group in self.dropped_at}
        for rank in range(3):
            for key in {p.receive.key for p in self.receives if p.rank == rank} | {m.key for m in self.messages}:
                if key[0] not in dropped:
                    self.check_key(rank, key)
        for (rank, group), (arrays, told) in self.dropped_at.items():
            later = set(self.sinks[rank].order[told:])
            assert not [p for p in self.receives if p.rank == rank and p.receive.key[0] == group and p.token in later]
            assert not [m for m in self.messages if m.source == rank and m.key[0] == group and m.token in later]
            for token, image in arrays.items():
                assert bytes(self.sinks[rank].arrays[token]) == image, "written to after its group was dropped"
        self.check_ended()
        for core in self.cores.values():
            if not dropped:
                assert core.statistics()["streams_in"] == 0
                assert core.statistics()["streams_out"] == 0

    def check_ended(self) -> None:
        """Credit is conserved, nothing is under way, and no send waits for a rank that has dropped its group."""
        waiting = SendState.HELD, SendState.OFFERED
        assert all(m.op.state >= SendState.SENT or m.op.state in waiting for m in self.messages)
        assert not any(p.receive.state is ReceiveState.STREAMING for p in self.receives)
        for (rank, peer), core in self.cores.items():
            receiver = self.cores[peer, rank]
            due = receiver._sender.queue._credit_due
            for channel, (out, into) in enumerate(zip(core._sender.windows, receiver._receiver.windows, strict=True)):
                assert out.credit + into.owed + into.unexpected_bytes + due[channel] == CREDIT
                assert out.stall == into.stall
        for message in self.messages:
            group = message.key[0]
            stalled = self.cores[message.source, message.target]._sender.windows[message.key[20]].stall
            target_dropped = (message.target, group) in self.dropped_at
            heard = (message.source, group) not in self.dropped_at and not message.withdrawn
            if target_dropped and heard and not stalled:
                sink = self.sinks[message.source]
                assert message.token in sink.sent or isinstance(sink.failed[message.token], PeerLostError)

    def check_key(self, rank: int, key: bytes) -> None:
        sink = self.sinks[rank]
        for source in range(3):
            tried = [m for m in self.messages if (m.source, m.target, m.key) == (source, rank, key)]
            sent = [m for m in tried if not m.withdrawn]
            posted = [p for p in self.receives if p.rank == rank and p.receive.key == key and not p.withdrawn]
            given_up = [p for p in posted if isinstance(sink.failed.get(p.token), CollectiveTimeoutError)]
            assert sum(p.receive.source == source for p in given_up) <= len(tried) - len(sent)
            posted = [p for p in posted if p not in given_up]
            failed = [p for p in posted if p.token in sink.failed and p.source == source]
            if failed:
                assert key[20]
                assert isinstance(sink.failed[failed[0].token], CollectiveMismatchError)
                assert len(failed[0].receive.target or b"") != len(sent[0].data)
                continue
            got = [p for p in posted if p.token in sink.received and p.receive.source == source]
            taken = sent[: len(got)]
            assert [bytes(sink.arrays[p.token]) for p in got] == [m.data for m in taken]
            assert [p.receive.meta for p in got] == [m.meta for m in taken]
            assert all(m.token in self.sinks[source].sent for m in taken)
            waiting = [p for p in posted if p.token not in sink.received and p.source in (None, source)]
            assert not waiting or len(got) == len(sent), "a message and a receive of one key never met"


World.TestCase.settings = settings(
    max_examples=examples(20), stateful_step_count=40, suppress_health_check=list(HealthCheck)
)
TestWorld = World.TestCase


@pytest.mark.parametrize("seed", range(20))
def test_long_program(seed: int) -> None:
    """Programs long enough for stalls to begin, be asked through, and end; each seed has a temper of its own."""
    rng = random.Random(seed)
    world = World()
    try:
        world.connect(seed)
        world.run_long(rng, steps=300)
        world.settle()
        world.check_matching()
    finally:
        world.limits.__exit__(None, None, None)
