"""A store on loopback, which every process of the host can reach, is its user's alone."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator

import forked
import pytest
from daemon_kit import Daemon, environment
from jobs import free_port

import asyncdist as dist
from asyncdist.store import TCPStore
from asyncdist_server import serve_in_thread
from asyncdist_server.serving.user_token import make_user_token
from asyncdist_server.wire.auth import new_token

NOBODY = 65534
LIMIT_S = 20

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


def as_nobody(what: str) -> str:
    """What became of a coroutine of this text in a process of another user: the error's text, or `done`."""
    code = f"""
import asyncio, os
import asyncdist as dist
from asyncdist.store import TCPStore

async def write(port, token=None):
    async with TCPStore("127.0.0.1", port, timeout={LIMIT_S}, token=token) as store:
        await store.set("victim-job.0", "theirs")

async def main():
    await {what}

os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})
try:
    asyncio.run(main())
    print("done")
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""
    ended = forked.run([sys.executable, "-c", code], LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    daemon = Daemon("--log-format", "json", env=environment())
    yield daemon
    daemon.end()


async def write(port: int, token: str | None = None) -> None:
    async with TCPStore("127.0.0.1", port, timeout=LIMIT_S, token=token) as store:
        await store.set("victim-job.0", "theirs")


@needs_root
def test_a_daemon_that_was_given_no_token_is_closed_to_other_users(daemon: Daemon) -> None:
    said = as_nobody(f"write({daemon.port})")
    assert said.startswith(f"DistStoreError: store 127.0.0.1:{daemon.port}: the server requires a token")
    assert "it belongs to another user of this host" in said
    assert "set ASYNCDIST_TOKEN or ASYNCDIST_TOKEN_FILE" in said
    guessed = as_nobody(f"write({daemon.port}, {new_token()!r})")
    assert "the tokens of client and server differ" in guessed


def test_it_is_open_to_its_user_without_a_word(daemon: Daemon) -> None:
    asyncio.run(write(daemon.port))
    _, _, errors = daemon.end()
    assert "connection_refused" not in errors
    assert "no_token" not in errors


@needs_root
def test_without_authentication_it_is_open_to_all() -> None:
    daemon = Daemon("--insecure-no-auth", env=environment())
    try:
        asyncio.run(write(daemon.port))
        assert as_nobody(f"write({daemon.port})") == "done\n"
    finally:
        assert "no_token" in daemon.end()[2]


def test_a_given_token_counts_alone(daemon: Daemon) -> None:
    with pytest.raises(dist.DistStoreError, match="the tokens of client and server differ"):
        asyncio.run(write(daemon.port, new_token()))
    other = Daemon(env=environment(ASYNCDIST_TOKEN=(token := new_token())))
    try:
        asyncio.run(write(other.port, token))
        with pytest.raises(dist.DistStoreError, match="or it was started with a token"):
            asyncio.run(write(other.port))
    finally:
        other.end()


@needs_root
async def test_the_store_that_rank_0_hosts_is_closed_to_other_users() -> None:
    port = free_port()
    method = f"tcp://127.0.0.1:{port}"
    first = asyncio.ensure_future(dist.init_process_group(init_method=method, rank=0, world_size=2, timeout=LIMIT_S))
    try:
        said = ""
        while "belongs to another user" not in said:  # it may not listen yet
            said = await asyncio.to_thread(as_nobody, f"write({port})")
        joined = await asyncio.to_thread(
            as_nobody, f"dist.init_process_group(init_method={method!r}, rank=1, world_size=2, timeout=5)"
        )
        assert "belongs to another user" in joined
        assert not first.done()
    finally:
        first.cancel()
        await asyncio.wait([first])


async def test_a_store_without_a_token_does_not_pass_for_the_one_that_rank_0_hosts() -> None:
    """It may be another user's, who was faster."""
    with serve_in_thread() as squatter:
        for rank in (0, 1):
            with pytest.raises(dist.DistError, match="it may belong to another user"):
                await dist.init_process_group(
                    init_method=f"tcp://127.0.0.1:{squatter.port}", rank=rank, world_size=2, timeout=LIMIT_S
                )
        assert squatter.connection_count == 0


async def test_a_daemon_that_comes_back_without_a_token_is_not_believed() -> None:
    with serve_in_thread(token=make_user_token()) as server:
        async with TCPStore("127.0.0.1", server.port, timeout=LIMIT_S) as store:
            await store.set("key", "value")
            await asyncio.to_thread(server.close)
            with serve_in_thread(port=server.port), pytest.raises(dist.DistStoreError, match="started without one"):
                await store.set("key", "secret")
