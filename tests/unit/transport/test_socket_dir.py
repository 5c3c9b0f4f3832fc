"""The directory that containers share: closed to others, random names, nothing left, and nothing else of it opened."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mesh_world import open_fds, received, world

from asyncdist.transport.addresses import PeerAddress, host_id
from asyncdist.transport.config import TransportConfig
from asyncdist.transport.connections.dialer import choose_targets
from asyncdist.transport.socket_dir import (
    MAX_PATH_BYTES,
    MAX_SWEPT,
    check_directory,
    directory_id,
    new_path,
    path_of,
    publish,
    sweep,
)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Pytest's own are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="ad-") as name:
        yield Path(name)


@pytest.fixture
def directory(short_path: Path) -> str:
    check_directory(str(short_path / "s"))
    return str(short_path / "s")


def bind(path: bytes | str, *, listen: bool = True) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(path)
    if listen:
        sock.listen()
    return sock


def test_it_is_made_closed_to_others(short_path: Path) -> None:
    check_directory(str(short_path / "a" / "b"))
    assert (short_path / "a" / "b").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o750, 0o777])
def test_one_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ValueError, match=rf"0700.*{mode:04o}"):
        TransportConfig.from_environ({"ASYNCDIST_SOCKET_DIR": str(tmp_path)})


def test_what_is_no_directory_or_too_long_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be used"):
        check_directory(str(tmp_path / "file"))
    room = MAX_PATH_BYTES - len("/asyncdist-") - 32 - len(".new")
    base = Path("/tmp") / f"{os.getpid()}-"
    exact = str(base) + "x" * (room - len(str(base)))
    try:
        check_directory(exact)
        bind(new_path(exact)).close()
    finally:
        for path in Path(exact).iterdir():
            path.unlink()
        Path(exact).rmdir()
    with pytest.raises(ValueError, match="too long"):
        check_directory(exact + "x")
    Path(exact + "x").rmdir()


def test_it_is_not_looked_at_where_only_tcp_is_used() -> None:
    config = TransportConfig.from_environ({"ASYNCDIST_SOCKET_DIR": "/proc/no/such", "ASYNCDIST_TRANSPORT": "tcp"})
    assert config.socket_dir == ""


def test_sockets_of_the_dead_are_removed_and_no_others(directory: str) -> None:
    live, early, dead = publish_bound(directory), bind(new_path(directory), listen=False), publish_bound(directory)
    dead.close()
    (Path(directory) / "asyncdist-file").write_text("no socket")
    (Path(directory) / "other").write_text("")
    before = set(os.listdir(directory))
    assert sweep(directory) == 1
    assert len(before - set(os.listdir(directory))) == 1
    assert sweep(directory) == 0
    live.close()
    early.close()
    assert sweep("/no/such/directory") == 0


def publish_bound(directory: str) -> socket.socket:
    path = new_path(directory)
    sock = bind(path)
    publish(path)
    return sock


def test_as_many_are_removed_as_one_start_may(directory: str) -> None:
    for _ in range(MAX_SWEPT + 1):
        publish_bound(directory).close()
    assert sweep(directory) == MAX_SWEPT
    assert sweep(directory) == 1


@given(st.binary(max_size=200))
def test_a_peers_word_names_nothing_outside(name: bytes) -> None:
    for candidate in (name, b"/" + name, b"/x/asyncdist-" + name):
        path = path_of("/dir", candidate)
        assert path is None or (path.startswith(b"/dir/asyncdist-") and path.count(b"/") == 2 and b"\0" not in path)
        assert path is None or len(path) <= MAX_PATH_BYTES


def test_paths_may_differ_between_containers() -> None:
    assert path_of("/here", b"/there/asyncdist-1234") == b"/here/asyncdist-1234"
    assert path_of("/here", b"\0asyncdist-1234") is None
    assert path_of("/here", b"/there/asyncdist-1234.new") is None
    assert path_of("/here", b"/there/docker.sock") is None
    config = TransportConfig(socket_dir="/here")
    targets, _ = choose_targets("h", PeerAddress("h", (("10.0.0.1", 5),), b"/there/asyncdist-12"), config)
    assert [target.address for target in targets] == [b"/here/asyncdist-12", ("10.0.0.1", 5)]
    targets, _ = choose_targets("other", PeerAddress("h", (("10.0.0.1", 5),), b"/there/asyncdist-12"), config)
    assert [target.address for target in targets] == [("10.0.0.1", 5)]


def test_the_directory_is_what_a_host_is_known_by(directory: str, tmp_path: Path) -> None:
    os.symlink(directory, tmp_path / "elsewhere")
    assert host_id(directory) == host_id(str(tmp_path / "elsewhere")) != host_id()
    assert directory_id(directory) != directory_id(str(tmp_path))


async def test_ranks_meet_there_share_memory_and_leave_nothing(directory: str) -> None:
    gc.collect()
    before = open_fds()
    async with world(3, "auto", socket_dir=directory) as made:
        assert len(os.listdir(directory)) == 3
        sent = [made.ranks[0].send(peer, b"x" * 100_000) for peer in (1, 2)]
        for peer in (1, 2):
            assert await received(made.ranks[peer].receive(0)) == b"x" * 100_000
        await asyncio.gather(*sent)
        assert f"shm beside unix {directory}/asyncdist-" in made.ranks[1].mesh.describe(0)
    assert os.listdir(directory) == []
    assert len(open_fds()) == len(before)


async def test_one_whose_socket_is_gone_is_reached_by_tcp(directory: str) -> None:
    async with world(2, "auto", socket_dir=directory) as made:
        for name in os.listdir(directory):
            os.unlink(os.path.join(directory, name))
        sent = made.ranks[0].send(1, b"x")
        assert await received(made.ranks[1].receive(0)) == b"x"
        await sent
        assert "tcp" in made.ranks[0].mesh.describe(1)
