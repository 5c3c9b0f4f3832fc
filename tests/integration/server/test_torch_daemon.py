"""Torch's protocol on the daemon's ports: recognized by its first byte, served beside native clients, told apart."""

from __future__ import annotations

import asyncio
import random
import select
import socket
import struct
from typing import Any

import pytest
from server_kit import SocketClient
from torch_wire_kit import VALIDATE, SocketTorchClient, number, query
from waiting import eventually

from asyncdist_server import ServerConfig, serve
from asyncdist_server.serving.config import ConfigError, limits_for
from asyncdist_server.torch.wire import Query
from asyncdist_server.wire import messages as m

TOKEN = "the-token-of-these-tests-and-43-characters-"
DEADLINE_S = 60.0


def config(**changes: Any) -> ServerConfig:
    return ServerConfig(**{"port": 0, "torch": True, **changes})


def closed_by_daemon(sock: socket.socket) -> bool:
    try:
        return sock.recv(1 << 16) == b""
    except ConnectionResetError:
        return True


async def test_both_protocols_on_one_port_and_native_clients_may_only_read() -> None:
    async with serve(config(token=TOKEN)) as server:

        def work() -> None:
            namespace = f"torch/{server.port}"
            with SocketTorchClient(server.port) as torch, SocketClient(server.port, TOKEN) as native:
                torch.send(Query.SET, b"/k", b"torch")
                native.ask(m.SET, b"/k", b"native")
                assert torch.get(b"/k") == b"torch"
                assert native.ask(m.GET, b"/k", 0) == b"native"
                with SocketClient(server.port, TOKEN, namespace=namespace, client_id=b"r" * 16) as reader:
                    assert reader.ask(m.GET, b"/k", 0) == b"torch"
                    assert reader.ask(m.LIST_KEYS, b"", b"")[1] == (b"/k",)
                    reader.send((m.GET, b"/later", None))
                    torch.send(Query.SET, b"/later", b"1")
                    assert reader.reply()[1:] == (m.OK, b"1")
                    for mutation in ((m.SET, b"/k", b"x"), (m.DELETE, b"/k"), (m.DELETE_NAMESPACE,)):
                        reader.send(mutation)
                        _, code, text = reader.reply()
                        assert (code, "may only read" in text) == (m.INVALID, True)
                assert torch.get(b"/k") == b"torch"

        await asyncio.to_thread(work)


async def test_keys_go_with_the_last_torch_client_whoever_reads() -> None:
    async with serve(config()) as server:

        def work() -> None:
            with SocketClient(server.port, namespace=f"torch/{server.port}") as reader:
                with SocketTorchClient(server.port) as torch:
                    torch.send(Query.SET, b"/0//cpu//0/0", b"address")
                    torch.get(b"")
                while reader.ask(m.NUM_KEYS):
                    pass
                with SocketTorchClient(server.port) as torch:
                    assert torch.get(b"/0//cpu//0/0") == b""

        await asyncio.to_thread(work)


async def test_keys_linger() -> None:
    async with serve(config(torch_linger_s=0.05)) as server:

        def work() -> None:
            for _ in range(2):
                with SocketTorchClient(server.port) as torch:
                    torch.send(Query.ADD, b"/n", 1)
                    assert torch.read(8) in (number(1), number(2))

        await asyncio.to_thread(work)
        assert server.engine.statistics()["keys"] == 1
        await eventually(lambda: server.engine.statistics()["keys"] == 0)


async def test_more_ports_have_keys_of_their_own() -> None:
    async with serve(config(torch_ports=(0, 0))) as server:
        assert len(set(server.torch_ports)) == 3
        assert server.torch_ports[0] == server.port

        def work() -> None:
            clients = [SocketTorchClient(port) for port in server.torch_ports]
            for client in clients:
                client.send(Query.ADD, b"init/", 1)
                assert client.read(8) == number(1)
            for client in clients:
                client.close()

        await asyncio.to_thread(work)
        await eventually(lambda: server.engine.statistics()["namespaces"] == 0)


async def test_only_the_ports_that_are_for_torch_serve_it(caplog: pytest.LogCaptureFixture) -> None:
    async with serve(config(torch=False, torch_ports=(0,))) as server:

        def work() -> None:
            with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as sock:
                sock.sendall(VALIDATE)
                while not closed_by_daemon(sock):
                    pass
            with SocketTorchClient(server.torch_ports[0]) as torch:
                assert torch.get(b"/k") == b""

        await asyncio.to_thread(work)
    assert "served with --torch" in caplog.text


async def test_beyond_loopback_torch_clients_are_refused_unless_forced(caplog: pytest.LogCaptureFixture) -> None:
    async with serve(config(host="0.0.0.0", token=TOKEN)) as server:
        assert server.torch_namespace(("127.0.0.1", server.port), "peer") is not None
        assert server.torch_namespace(("127.8.8.8", server.port), "peer") is not None
        assert server.torch_namespace(("10.0.0.1", server.port), "peer") is None
        assert "--torch-insecure-no-auth" in caplog.text
    async with serve(config(host="0.0.0.0", token=TOKEN, torch_insecure_no_auth=True)) as server:
        assert server.torch_namespace(("10.0.0.1", server.port), "peer") is not None


def test_the_configuration_is_checked() -> None:
    for wrong in ({"torch_ports": (70_000,)}, {"torch_linger_s": -1.0}, {"torch_linger_s": float("inf")}):
        with pytest.raises(ConfigError):
            config(**wrong)


async def test_a_blocked_client_hears_at_once_that_the_daemon_stops() -> None:
    async with serve(config()) as server:
        torch = await asyncio.to_thread(SocketTorchClient, server.port)
        torch.send(Query.WAIT, [b"/k"])
        await eventually(lambda: server.engine.waiter_count == 1)
        await server.stop()
        assert await asyncio.to_thread(closed_by_daemon, torch.socket)
        torch.close()


async def test_the_largest_value_and_one_byte_more() -> None:
    async with serve(config(limits=limits_for(1 << 20))) as server:

        def work() -> None:
            with SocketTorchClient(server.port) as torch:
                torch.send(Query.SET, b"/k", bytes(1 << 20))
                assert len(torch.get(b"/k")) == 1 << 20
                torch.socket.sendall(b"\x01" + struct.pack("<Q", 1) + b"k" + struct.pack("<Q", (1 << 20) + 1))
                assert closed_by_daemon(torch.socket)

        await asyncio.to_thread(work)
        await eventually(lambda: server.connection_count == 0 and server.inbound_bytes == 0)


async def test_a_silent_client_is_closed_and_a_validated_one_may_idle() -> None:
    async with serve(config(handshake_timeout_s=0.1)) as server:

        def work() -> None:
            with SocketTorchClient(server.port) as idle:
                with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as sock:
                    sock.sendall(VALIDATE[:3])
                    assert closed_by_daemon(sock)
                assert idle.get(b"/k") == b""

        await asyncio.to_thread(work)


async def test_a_client_is_heard_again_after_a_long_turn() -> None:
    async with serve(config()) as server:

        def work() -> None:
            with SocketTorchClient(server.port) as torch:
                for _ in range(3):
                    torch.socket.sendall(query(Query.GETNUMKEYS) * 3000)
                    assert torch.read(8 * 3000) == number(0) * 3000

        await asyncio.to_thread(work)


async def test_clients_that_do_not_read_are_cut_off() -> None:
    async with serve(config(stall_timeout_s=0.2)) as server:

        def work() -> None:
            with SocketTorchClient(server.port) as torch, SocketTorchClient(server.port) as other:
                other.send(Query.SET, b"/k", bytes(1 << 20))
                assert len(other.get(b"/k")) == 1 << 20
                torch.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                torch.socket.sendall(query(Query.GET, b"/k") * 100)
                while server.connection_count == 2:
                    assert len(other.get(b"/k")) == 1 << 20

        await asyncio.to_thread(work)


async def test_garbage_costs_only_its_own_connection() -> None:
    """A seeded flood of spoiled conversations; the client beside it is served all along and memory stays flat."""
    generator = random.Random(7)
    async with serve(config()) as server:

        def work() -> None:
            with SocketTorchClient(server.port) as witness:
                witness.send(Query.SET, b"/w", b"1")
                for _ in range(300):
                    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as sock:
                        start = VALIDATE if generator.random() < 0.8 else b""
                        sock.sendall(start + bytes([generator.randrange(20)]) + generator.randbytes(200))
                assert witness.get(b"/w") == b"1"

        await asyncio.to_thread(work)
        await eventually(lambda: server.connection_count == 0 and server.inbound_bytes == 0)
        assert set(server.engine.statistics().values()) == {0}


@pytest.mark.parametrize("size", [10, 1_000_000])
@pytest.mark.parametrize("reads", ["nothing", "a part", "all", "all, and asks for more"])
async def test_an_item_that_its_client_did_not_read_goes_to_another(size: int, reads: str) -> None:
    """The kernel resets a connection whose process ends with something unread, long after the daemon has sent it."""
    async with serve(config()) as server:

        def pop_and_close() -> None:
            with SocketTorchClient(server.port) as lost:
                lost.send(Query.QUEUE_POP, b"/q")
                select.select([lost.socket], [], [], DEADLINE_S)
                if reads != "nothing":
                    lost.read(16)
                if reads.startswith("all"):
                    lost.read(size)
                if reads.endswith("more"):
                    lost.send(Query.GET, b"/q/none")
                    select.select([lost.socket], [], [], DEADLINE_S)

        def work() -> int:
            with SocketTorchClient(server.port) as other:
                other.send(Query.QUEUE_PUSH, b"/q", bytes(size))
                other.get(b"")
                pop_and_close()
                while server.connection_count > 1:
                    other.get(b"")
                other.send(Query.QUEUE_LEN, b"/q")
                return struct.unpack("<q", other.read(8))[0]

        assert await asyncio.to_thread(work) == (0 if reads.startswith("all") else 1)
