"""Client and daemon over a line that is cut anywhere: each change is made once, and no queue item is lost or doubled.

The real bookkeeping of both sides runs without sockets: hypothesis decides what is asked, cancelled and delivered, byte
by byte, and where the line breaks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from fewer_cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from server_kit import everything

from asyncdist.store.pipeline import Pipeline
from asyncdist.store.reply import Reply
from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.engine.session import Session
from asyncdist_server.wire import messages
from asyncdist_server.wire.auth import ClientHandshake, store_context
from asyncdist_server.wire.messages import ADD, APPEND, GET, QUEUE_LEN, QUEUE_POP, QUEUE_PUSH, Encoder, FrameReader


class Line:
    """One client, one daemon, and the bytes under way between them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = StoreEngine(b"i" * messages.INCARNATION_BYTES)
        self.pipeline = Pipeline(loop, "line", lambda: None)
        self.up = b""
        self.down = b""
        self.now = 0.0
        self.session: Session | None = None
        self.connect()

    def connect(self) -> None:
        """Break the connection if there is one, lose what is under way, and make a new one."""
        if self.session is not None:
            self.session.close(self.now)
            self.pipeline.on_lost()
        self.up = self.down = b""
        self.session = Session(self.engine, None, lambda: None, Encoder())
        self.reader = FrameReader()
        handshake = ClientHandshake(None, store_context("job"))
        data = handshake.start()
        while not handshake.done:
            data = handshake.receive(self._ask(data))
        hello = messages.Hello(b"c" * messages.CLIENT_ID_BYTES, self.pipeline.to_retry())
        [payload] = self.reader.feed(self._ask(Encoder().hello(hello)))
        self.pipeline.on_welcome(messages.decode_welcome(payload))

    def _ask(self, data: bytes) -> bytes:
        assert self.session is not None
        self.session.receive(data, self.now)
        return everything(self.session)

    def send(self) -> None:
        """Put what the client has to say on the line."""
        while (frame := self.pipeline.next_frame()) is not None:
            self.up += frame

    def deliver_up(self, count: int) -> None:
        """Let the daemon read `count` bytes."""
        assert self.session is not None
        self.session.receive(self.up[:count], self.now)
        self.up = self.up[count:]
        while self.session.busy:
            self.session.resume(self.now)
        self.down += everything(self.session)

    def deliver_down(self, count: int) -> None:
        """Let the client read `count` bytes."""
        data, self.down = self.down[:count], self.down[count:]
        for payload in self.reader.feed(data):
            self.pipeline.on_replies(payload)

    def settle(self) -> None:
        """Deliver everything until nothing moves any more."""
        self.send()
        while self.up or self.down:
            self.deliver_up(len(self.up))
            self.deliver_down(len(self.down))
            self.send()


@contextmanager
def line() -> Iterator[Line]:
    """A line whose futures belong to a loop that never runs: nothing here waits."""
    loop = asyncio.new_event_loop()
    try:
        yield Line(loop)
    finally:
        loop.close()


steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["add", "append", "push", "pop", "get", "send", "cut"]), st.just(0)),
        st.tuples(st.sampled_from(["up", "down"]), st.integers(1, 60)),
        st.tuples(st.just("cancel"), st.integers(0, 10)),
    ),
    min_size=30,  # short programs rarely get as far as an answer that is lost
    max_size=80,
)


@settings(max_examples=examples(50))
@given(steps)
def test_every_change_is_made_once(program: list[tuple[str, int]]) -> None:
    with line() as wire:
        pipeline = wire.pipeline
        issued: dict[str, list[Reply]] = {name: [] for name in ("add", "append", "push", "pop", "get")}
        requests = {
            "add": lambda number: (ADD, (b"n", 1)),
            "append": lambda number: (APPEND, (b"log", b"%d," % number)),
            "push": lambda number: (QUEUE_PUSH, (b"q", b"%d" % number)),
            "pop": lambda number: (QUEUE_POP, (b"q",)),
            "get": lambda number: (GET, (b"absent",)),
        }
        for name, number in program:
            if name in requests:
                operation, arguments = requests[name](len(issued[name]))
                issued[name].append(pipeline.submit(operation, arguments, None, 0, Reply))
            elif name == "send":
                wire.send()
            elif name == "cut":
                wire.connect()
            elif name == "up":
                wire.deliver_up(number)
            elif name == "down":
                wire.deliver_down(number)
            else:  # those that wait are cancelled; a change's caller would only learn less
                waiting = [each for each in issued["pop"] + issued["get"] if not each.done()]
                if waiting:
                    waiting[number % len(waiting)].cancel()
        wire.settle()

        assert [reply.result() for reply in issued["add"]] == list(range(1, len(issued["add"]) + 1))
        assert all(reply.done() and reply.exception() is None for reply in issued["append"] + issued["push"])
        namespace = wire.engine.open("job", lambda reply: None).namespace
        log = b"".join(b"%d," % number for number in range(len(issued["append"])))
        assert namespace.values.get(b"log", b"") == log
        popped = [reply.result() for reply in issued["pop"] if reply.done() and not reply.cancelled()]
        left = list(namespace.queues.get(b"q", ()))
        assert sorted(popped + left) == sorted(b"%d" % number for number in range(len(issued["push"])))
        blocked = [reply for reply in issued["pop"] + issued["get"] if not reply.done()]
        assert wire.engine.waiter_count == len(blocked), "what was cancelled is withdrawn at the daemon"
        length = pipeline.submit(QUEUE_LEN, (b"q",), None, 0, Reply)
        wire.settle()
        assert length.result() == len(left)
