"""What a client measures: its lease never ended before its time."""

from __future__ import annotations

import time

from server_kit import SocketClient

from asyncdist_server.serving.threaded import serve_in_thread
from asyncdist_server.wire import messages as m

TTL_MS = 20


def test_no_lease_ends_before_its_time() -> None:
    early = 0
    with serve_in_thread() as server, SocketClient(server.port) as client:
        start, _ = client.ask(m.WATCH, b"k", None, None)
        for number in range(1, 26):
            began_s = time.monotonic()
            client.send((m.GRANT, number, TTL_MS, False), (m.SET_LEASED, b"k", b"", number))
            kind = m.EVENT_SET
            while kind != m.EVENT_EXPIRE:
                client.send((m.WATCH, b"k", start, None))
                while not isinstance(answer := client.reply()[2], tuple):
                    pass
                start, events = answer
                kind = events[-1][1]
            early += time.monotonic() - began_s < TTL_MS / 1000
            time.sleep(0.0003)  # begin at another place within a millisecond
    assert not early
