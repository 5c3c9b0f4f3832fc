"""What strangers, the slow and the broken can do to a daemon with TLS: lose their own connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

import pytest
from fuzz_frames import HandshakeFrames
from store_proxy import cutting_proxy
from tls_daemon_kit import DEADLINE_S, TLSSocketClient, answer_to, connection, daemon
from tls_kit import OPENSSL, WHY_NOT, Certificates, make_certificates
from waiting import eventually

from asyncdist.store import TCPStore
from asyncdist_server.wire import messages as m
from asyncdist_server.wire.auth import ClientHandshake, Refusal, refusal_message
from asyncdist_server.wire.tls import MAX_TLS_HANDSHAKE_BYTES, TLSStream

pytestmark = pytest.mark.skipif(OPENSSL is None, reason=WHY_NOT)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


async def test_who_dawdles_in_the_tls_handshake_is_cut_off_in_time(certificates: Certificates) -> None:
    async with daemon(certificates, handshake_timeout_s=0.1) as server:
        for beginning in (b"", b"\x16\x03\x01\x02\x00\x01"):
            assert await answer_to(server.port, beginning) in (b"", refusal_message(Refusal.TIMEOUT))
        await eventually(lambda: server.connection_count == 0)


async def test_connections_in_the_tls_handshake_count_as_half_open(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncdist_server.serving.daemon.MAX_HALF_OPEN", 3)
    async with daemon(certificates) as server:
        tls = certificates.client_config()
        async with connection(server.port) as (oldest, _), connection(server.port), connection(server.port):
            await eventually(lambda: server.half_open_count == 3)
            async with TCPStore("127.0.0.1", server.port, tls=tls) as store:
                assert await store.check([])
            assert await oldest.read() == refusal_message(Refusal.TOO_MANY_CONNECTIONS)


def hello_of(size: int) -> bytes:
    """The first bytes of a TLS handshake that is longer: one long message, cut into records, `size` bytes in all."""
    body = b"\x01" + (100_000).to_bytes(3, "big") + b"\x03\x03" + bytes(100_000)
    stream = b"".join(
        b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part
        for part in (body[start : start + 1000] for start in range(0, len(body), 1000))
    )
    return stream[:size]


@pytest.mark.parametrize(("size", "kept"), [(MAX_TLS_HANDSHAKE_BYTES, True), (MAX_TLS_HANDSHAKE_BYTES + 1, False)])
async def test_a_tls_handshake_may_have_64_kib_and_not_one_byte_more(
    certificates: Certificates, caplog: pytest.LogCaptureFixture, size: int, kept: bool
) -> None:
    async with daemon(certificates) as server:
        async with connection(server.port) as (reader, writer):
            writer.write(hello_of(size))
            if kept:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await reader.read()
                assert "TLS failed" not in caplog.text
            else:
                await eventually(lambda: "more than 65536 bytes" in caplog.text)
        await eventually(lambda: server.connection_count == 0)


@pytest.mark.parametrize("junk", [b"\x16" + b"\xff" * 3000, b"GET / HTTP/1.1\r\n\r\n", b"\x15\x03\x03\0\x02\x02\x28"])
async def test_garbage_costs_only_its_connection(certificates: Certificates, junk: bytes) -> None:
    tls = certificates.client_config()
    async with daemon(certificates) as server, TCPStore("127.0.0.1", server.port, tls=tls) as witness:
        await answer_to(server.port, junk)
        assert await witness.add("n", 1) == 1


@pytest.mark.parametrize("flight", ["hello", "finished", "request"])
async def test_spoiled_tls_costs_only_its_connection(certificates: Certificates, flight: str) -> None:
    """Wrong bytes instead of the first or second flight of the handshake, or behind it: closed, never served."""
    config = certificates.client_config()
    spoiler = HandshakeFrames(5)

    async def attack() -> None:
        async with connection(server.port) as (reader, writer), asyncio.timeout(DEADLINE_S):
            tls = TLSStream(config.context(), server_side=False, server_hostname="localhost")
            hello = tls.start()
            writer.write(spoiler.spoil(hello) if flight == "hello" else hello)
            if flight != "hello":
                while not tls.established:
                    tls.receive(await reader.read(65536))
                records = tls.take_records()
                writer.write(spoiler.spoil(records) if flight == "finished" else records)
            if flight == "request":
                writer.write(spoiler.spoil(tls.encrypt(ClientHandshake(None, b"/").start())))
            writer.write_eof()
            with contextlib.suppress(ConnectionResetError):
                await reader.read()

    async with daemon(certificates) as server, TCPStore("127.0.0.1", server.port, tls=config) as witness:
        for _ in range(5):
            await asyncio.gather(*(attack() for _ in range(20)))
            assert await witness.check([])
        await eventually(lambda: server.connection_count == 1)


async def test_a_slow_client_gets_everything(certificates: Certificates) -> None:
    """Replies pile up until the client reads: reading from it pauses, and goes on."""
    context = certificates.client_config().context()
    value = bytes(range(256)) * 4096

    def work(port: int) -> None:
        with TLSSocketClient(port, context) as client:
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 * 1024)
            assert client.ask(m.SET, b"k", value) is None
            client.send(*[(m.GET, b"k", None)] * 30, (m.PING,))
            for number in range(30):
                assert client.reply() == (2 + number, m.OK, value)
            assert client.reply()[1] == m.OK

    async with daemon(certificates) as server:
        await asyncio.to_thread(work, server.port)


async def test_a_client_that_never_reads_is_cut_off_with_bounded_memory(certificates: Certificates) -> None:
    context = certificates.client_config().context()

    def work(port: int) -> None:
        with TLSSocketClient(port, context) as lazy:
            assert lazy.ask(m.SET, b"k", bytes(1 << 20)) is None
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                while True:
                    lazy.send(*[(m.GET, b"k", None)] * 1000)
                    assert server.inbound_bytes < 1 << 20

    async with daemon(certificates, stall_timeout_s=0.3) as server:
        await asyncio.to_thread(work, server.port)
        await eventually(lambda: server.connection_count == 0)


async def test_a_changed_byte_inside_tls_ends_the_connection_and_nothing_is_run(certificates: Certificates) -> None:
    """What TLS is for: the client loses its connection, makes it anew, and the change is made once."""

    def plan(connection: int) -> tuple[int | None, int | None]:
        return None, None

    tls = certificates.client_config()
    async with daemon(certificates) as server, cutting_proxy(server.port, plan) as proxy:
        async with TCPStore("127.0.0.1", proxy.port, tls=tls) as store:
            assert await store.add("n", 1) == 1
            proxy.spoil_next_chunk_to_server()
            assert await store.add("n", 1) == 2
        assert proxy.connections == 2
