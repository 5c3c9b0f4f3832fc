"""The store inside TLS: who gets in, who does not and hears why, what a broken connection costs, and the files."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
from jobs import free_port
from store_proxy import cutting_proxy
from tls_daemon_kit import DEADLINE_S, TLSSocketClient, answer_to, connection, daemon, given_up, refused
from tls_kit import OPENSSL, WHY_NOT, Certificates, make_certificates
from waiting import eventually

from asyncdist.store import TCPStore, TLSConfig
from asyncdist_server import ServerConfig, serve
from asyncdist_server.serving.config import ConfigError
from asyncdist_server.wire.auth import AuthenticationError, Refusal, new_token
from asyncdist_server.wire.tls import CHUNK_BYTES

pytestmark = pytest.mark.skipif(OPENSSL is None, reason=WHY_NOT)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


# ---- who gets in


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_the_right_authority_lets_the_store_be_used(
    certificates: Certificates, host: str, version: ssl.TLSVersion
) -> None:
    token = new_token()
    context = certificates.client_config().context()
    context.minimum_version = context.maximum_version = version
    async with (
        daemon(certificates, token=token) as server,
        TCPStore(host, server.port, token=token, tls=context) as store,
    ):
        await store.set("key", "value")
        assert await store.get("key") == b"value"
        assert await store.add("n", 2) == 2


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5_000_000])
async def test_values_of_all_sizes_pass_both_ways(certificates: Certificates, size: int) -> None:
    value = bytes(range(256)) * (size // 256) + bytes(size % 256)
    async with (
        daemon(certificates) as server,
        TCPStore("127.0.0.1", server.port, tls=certificates.client_config()) as store,
    ):
        await store.set("key", value)
        assert await store.get("key") == value
        gotten = await asyncio.gather(*(store.get("key") for _ in range(5)))
        assert all(each == value for each in gotten)


async def test_many_requests_at_once_and_a_wait_that_another_client_ends(certificates: Certificates) -> None:
    tls = certificates.client_config()
    async with (
        daemon(certificates) as server,
        TCPStore("127.0.0.1", server.port, tls=tls) as one,
        TCPStore("127.0.0.1", server.port, tls=tls) as other,
    ):
        waiting = asyncio.ensure_future(one.get("late"))
        sums = await asyncio.gather(*(store.add("n", 1) for _ in range(2000) for store in (one, other)))
        assert sorted(sums) == list(range(1, 4001))
        await other.set("late", "now")
        assert await waiting == b"now"


async def test_a_name_can_be_given_where_the_certificate_has_no_address(certificates: Certificates) -> None:
    other = certificates.other_host
    async with daemon(certificates, tls_cert=other.cert, tls_key=other.key) as server:
        named = certificates.client_config(server_hostname="node0.example")
        async with TCPStore("127.0.0.1", server.port, tls=named) as store:
            assert await store.check([])


async def test_a_client_with_a_certificate_is_let_in_where_one_is_needed(certificates: Certificates) -> None:
    async with (
        daemon(certificates, tls_ca=certificates.ca) as server,
        TCPStore("127.0.0.1", server.port, tls=certificates.mutual) as store,
    ):
        assert await store.add("n", 1) == 1


# ---- who does not


async def test_the_wrong_authority_is_noticed_on_both_sides(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async with daemon(certificates) as server:
        told = await refused(server.port, TLSConfig(ca_file=certificates.other_ca))
        assert "certificate of the other side is refused: unable to get local issuer certificate" in told
        await eventually(lambda: "TLS failed: tlsv1 alert unknown ca" in caplog.text)
        assert server.connection_count == 0


async def test_an_expired_certificate_is_refused(certificates: Certificates) -> None:
    expired = certificates.expired
    async with daemon(certificates, tls_cert=expired.cert, tls_key=expired.key) as server:
        assert "certificate has expired" in await refused(server.port, certificates.client_config())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_the_certificate_of_another_host_is_refused(certificates: Certificates, host: str) -> None:
    other = certificates.other_host
    async with daemon(certificates, tls_cert=other.cert, tls_key=other.key) as server:
        told = await refused(server.port, certificates.client_config(), host)
        assert "certificate is not valid for" in told
        assert host in told


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("which", ["none", "of another authority"])
async def test_clients_need_a_certificate_where_the_daemon_says_so(
    certificates: Certificates, caplog: pytest.LogCaptureFixture, which: str, version: ssl.TLSVersion
) -> None:
    config = certificates.client_config()
    if which != "none":
        stranger = certificates.other_client
        config = dataclasses.replace(config, cert_file=stranger.cert, key_file=stranger.key)
    context = config.context()
    context.minimum_version = context.maximum_version = version
    async with daemon(certificates, tls_ca=certificates.ca) as server:
        assert "TLS failed: " in await refused(server.port, context)
        said = "peer did not return a certificate" if which == "none" else "unable to get local issuer certificate"
        await eventually(lambda: said in caplog.text)
        assert not server.engine.statistics()["keys"]


async def test_the_token_is_needed_inside_too(certificates: Certificates) -> None:
    async with daemon(certificates, token=new_token(), tls_ca=certificates.ca) as server:
        assert "requires a token" in await refused(server.port, certificates.mutual)
        assert "tokens of client and server differ" in await refused(
            server.port, certificates.mutual, token=new_token()
        )


async def test_a_client_without_tls_is_told(certificates: Certificates, caplog: pytest.LogCaptureFixture) -> None:
    async with daemon(certificates) as server:
        assert "the server requires TLS" in await refused(server.port, None)
        await eventually(lambda: "tls required" in caplog.text)


async def test_a_client_with_tls_is_told_by_a_daemon_without(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(ServerConfig(port=0)) as server:
        assert "the server has none" in await refused(server.port, certificates.client_config())
        await eventually(lambda: "the client came with TLS" in caplog.text)


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n", b"\xa1\0\0\0", b"\x16junk" * 9]
)
async def test_a_stranger_is_no_store_to_a_client_with_tls(certificates: Certificates, answer: bytes) -> None:
    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as stranger:
        port = stranger.sockets[0].getsockname()[1]
        assert "TLS" in await refused(port, certificates.client_config())


async def test_a_server_with_tls_that_is_no_store_is_named_to_a_client_without() -> None:
    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x15\x03\x03\0\x02\x02\x0a")  # the alert that OpenSSL sends for what is no TLS
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as stranger:
        assert "it speaks TLS" in await refused(stranger.sockets[0].getsockname()[1], None)


async def test_a_refusal_before_tls_has_begun_is_understood(certificates: Certificates) -> None:
    limits = ServerConfig().limits._replace(connections=1)
    tls = certificates.client_config()
    async with daemon(certificates, limits=limits) as server, TCPStore("127.0.0.1", server.port, tls=tls) as first:
        assert "limit of connections" in await given_up(server.port, tls)
        assert await first.check([])


# ---- broken connections


async def test_cut_connections_are_made_anew_and_every_change_is_made_once(certificates: Certificates) -> None:
    def plan(connection: int) -> tuple[int | None, int | None]:
        return (None, None) if connection > 8 else (2000 + 100 * connection, None) if connection % 2 else (None, 3000)

    tls = certificates.client_config()
    async with (
        daemon(certificates, token="the-token-of-these-tests-and-43-characters-") as server,
        cutting_proxy(server.port, plan) as proxy,
        TCPStore(
            "127.0.0.1", proxy.port, token="the-token-of-these-tests-and-43-characters-", tls=tls, timeout=60
        ) as store,
    ):
        for expected in range(1, 400):
            assert await store.add("n", 1) == expected
        assert proxy.cuts >= 5


async def test_a_restarted_daemon_is_found_again(certificates: Certificates) -> None:
    tls = certificates.client_config()
    async with daemon(certificates) as first:
        port = first.port
        store = await TCPStore.connect("127.0.0.1", port, tls=tls)
        await store.set("k", "1")
        waiting = asyncio.ensure_future(store.get("later", timeout=DEADLINE_S))
        assert not await store.check(["later"])
    async with daemon(certificates, port=port), store:
        assert not await store.check(["k"])
        await store.set("later", "2")
        assert await waiting == b"2"


async def test_goodbye_gets_its_answer_and_the_last_reply_is_not_lost(certificates: Certificates) -> None:
    tls = certificates.client_config()
    async with daemon(certificates) as server:
        for number in range(20):
            store = await TCPStore.connect("127.0.0.1", server.port, tls=tls)
            issued = [store.add("n", 1) for _ in range(50)]
            await store.close()
            assert [await reply for reply in issued] == list(range(50 * number + 1, 50 * number + 51))
        await eventually(lambda: not server.connection_count and not server._ending)


async def test_a_protocol_error_is_named_inside_tls(certificates: Certificates) -> None:
    """The last word before the daemon closes must arrive although more requests are under way."""
    context = certificates.client_config().context()

    def work(port: int) -> tuple[int, str]:
        with TLSSocketClient(port, context) as client:
            client.socket.sendall(b"\xff\xff\xff\xff garbage" + bytes(100_000))
            request_id, code, text = client.reply()
            assert request_id == 0
            assert client.closed_by_daemon()
            return code, text

    async with daemon(certificates) as server:
        code, text = await asyncio.to_thread(work, server.port)
        assert code != 0
        assert "allowed are 1 to" in text


# ---- torch's clients


async def test_torch_clients_are_refused_on_the_port_with_tls_and_served_on_their_own(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    validate_and_ping = b"\x00\xce\xf7\x85\x3c" + b"\x0dping"
    async with daemon(certificates, torch_ports=(0,)) as server:
        assert await answer_to(server.port, validate_and_ping) == b""
        assert "torch's store protocol, which is served with --torch-port, as torch has no TLS" in caplog.text
        (torch_port,) = server.torch_ports
        async with connection(torch_port) as (reader, writer), asyncio.timeout(DEADLINE_S):
            writer.write(validate_and_ping)
            assert await reader.readexactly(4) == b"ping"
        assert "requires TLS" in await refused(torch_port, None)


def test_torch_on_the_same_port_and_tls_exclude_each_other(certificates: Certificates) -> None:
    with pytest.raises(ConfigError, match="--torch-port"):
        ServerConfig(torch=True, tls_cert=certificates.server.cert)


# ---- certificates and settings


async def test_renewed_certificates_count_for_new_connections(certificates: Certificates, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def install(which: Any) -> None:
        cert.write_bytes(which.cert.read_bytes())
        key.write_bytes(which.key.read_bytes())

    install(certificates.expired)
    tls = certificates.client_config()
    async with daemon(certificates, tls_cert=cert, tls_key=key) as server:
        assert "expired" in await refused(server.port, tls)
        install(certificates.server)
        server.reload_certificates()
        async with TCPStore("127.0.0.1", server.port, tls=tls) as store:
            cert.write_text("not a certificate")
            with pytest.raises(ConfigError, match=str(cert)):
                server.reload_certificates()
            assert await store.check([])
            async with TCPStore("127.0.0.1", server.port, tls=tls) as another:
                assert await another.check([])


def test_files_that_do_not_fit_are_named(certificates: Certificates, tmp_path: Path) -> None:
    nothing, junk = tmp_path / "nothing.pem", tmp_path / "junk.pem"
    junk.write_text("junk")
    for wrong in (
        TLSConfig(ca_file=nothing),
        TLSConfig(ca_file=junk),
        certificates.client_config(cert_file=junk),
        certificates.client_config(cert_file=certificates.client.cert, key_file=nothing),
        certificates.client_config(cert_file=certificates.client.cert, key_file=certificates.server.key),
    ):
        with pytest.raises(ValueError, match=r"\.pem"):
            TCPStore("127.0.0.1", 1, tls=wrong)
    with pytest.raises(ValueError, match="give cert_file too"):
        TLSConfig(key_file=junk)
    with pytest.raises(ConfigError, match="give --tls-cert"):
        ServerConfig(tls_ca=junk)
    with pytest.raises(ConfigError, match=str(nothing)):
        ServerConfig(tls_cert=nothing).tls_context()


def test_the_oldest_versions_of_tls_are_not_spoken(certificates: Certificates) -> None:
    server = ServerConfig(tls_cert=certificates.server.cert, tls_key=certificates.server.key).tls_context()
    assert server is not None
    for context in (server, certificates.client_config().context()):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert certificates.client_config().context().check_hostname


def test_refusals_of_tls_are_heard_by_clients_of_the_handshake() -> None:
    assert {refusal.name for refusal in (Refusal.TLS_REQUIRED, Refusal.NO_TLS)} == {"TLS_REQUIRED", "NO_TLS"}
    assert "start the server with --tls-cert" in str(AuthenticationError(Refusal.NO_TLS))


def test_the_port_is_free_again(certificates: Certificates) -> None:
    """A daemon whose certificates are wrong leaves no socket behind."""

    async def start(port: int) -> None:
        async with daemon(certificates, port=port, tls_cert=certificates.ca, tls_key=certificates.server.key):
            raise AssertionError

    port = free_port()
    with pytest.raises(ConfigError):
        asyncio.run(start(port))
    socket.create_server(("127.0.0.1", port)).close()
