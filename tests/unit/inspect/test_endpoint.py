"""The endpoint of a process: whom it answers, and what strangers, slow askers and forks do to it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from asyncdist.inspect import endpoint as module
from asyncdist.inspect.ask import Answer, EndpointAddress, _ask, _Budget, ask_all, speed_of
from asyncdist.inspect.dumps import document
from asyncdist.inspect.endpoint import (
    ALL,
    MAX_ASKERS,
    MAX_HALF_OPEN,
    NAME,
    NETWORK,
    SAMPLE,
    SAMPLE_BYTES,
    SPEED,
    THREAD,
    Endpoint,
)
from asyncdist.inspect.recorder import RECORDER, GroupFacts
from asyncdist.transport.listening import listen_tcp, listen_unix
from asyncdist_server.wire.auth import new_token

TOKEN = new_token()
HERE = socket.gethostname()


@contextlib.contextmanager
def serving(token: str | None = TOKEN) -> Iterator[tuple[EndpointAddress, EndpointAddress]]:
    """An endpoint of this process, by Unix socket and by TCP."""
    unix, name, remove = listen_unix("", NAME)
    tcp = listen_tcp("127.0.0.1", None)
    port = tcp.getsockname()[1]
    endpoint = Endpoint([unix, tcp], token, remove)
    try:
        yield EndpointAddress(HERE, os.getpid(), name), EndpointAddress(HERE, os.getpid(), b"", (("127.0.0.1", port),))
    finally:
        endpoint.close()


async def asked(endpoint: EndpointAddress, token: str | None, question: bytes = ALL, limit_s: float = 1.5) -> Answer:
    return (await ask_all([endpoint], token, question, limit_s))[endpoint]


async def test_whoever_proves_the_token_is_answered_and_nobody_else_by_tcp() -> None:
    with serving() as (_, tcp):
        assert await asked(tcp, TOKEN) == Answer([])
        wrong = await asked(tcp, new_token())
        assert (wrong.state, "tokens" in wrong.why) == ("refused", True)
        assert (await asked(tcp, None)).state == "refused"


async def test_without_a_token_nobody_is_answered_by_tcp() -> None:
    with serving(None) as (unix, tcp):
        assert await asked(unix, None) == Answer([])
        assert (await asked(tcp, None)).state == "gone"  # it hangs up
        assert (await asked(tcp, TOKEN)).state == "gone"


async def test_this_user_needs_no_token_by_unix_socket_and_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as (unix, _):
        assert await asked(unix, None) == Answer([])
        assert await asked(unix, new_token()) == Answer([])
        monkeypatch.setattr(module, "may_ask", lambda sock: False)
        assert (await asked(unix, None)).state == "refused"
        assert (await asked(unix, new_token())).state == "refused"
        assert await asked(unix, TOKEN) == Answer([])


async def test_hostile_bytes_cost_the_sender_its_connection() -> None:
    chance = random.Random(1)
    with serving() as (unix, tcp):
        for size in (1, 7, 44, 700, 5000) * 4:
            with contextlib.suppress(OSError), socket.create_connection(tcp.tcp[0]) as stranger:
                stranger.sendall(chance.choice([b"", b"\xadDST\0\1", b"\xadDST\0\1\1\1"]) + chance.randbytes(size))
                if size == 5000:
                    stranger.settimeout(5)
                    assert len(stranger.recv(1 << 16)) < 200
        assert await asked(tcp, TOKEN) == Answer([])
        assert await asked(unix, TOKEN, b"state not a number") == Answer([])
        assert await asked(unix, TOKEN, b"") == Answer([])


async def test_strangers_that_prove_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROOF_LIMIT_S", 60)
    with serving() as (_, tcp), contextlib.ExitStack() as strangers:
        for _ in range(MAX_HALF_OPEN + 10):
            strangers.enter_context(socket.create_connection(tcp.tcp[0]))
        assert await asked(tcp, TOKEN) == Answer([])
        assert len(os.listdir("/proc/self/fd")) < 2 * (MAX_HALF_OPEN + 40)


async def test_many_ask_at_once_also_for_long_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"host": HERE, "pid": 1, "job": "", "loop_turns": True, "loop_late": 0.0, "program": ["x" * 1_000_000]}
    documents = [document(0, "") | facts | {"world": {"id": "0", "name": "default", "size": 1}}]
    monkeypatch.setattr(Endpoint, "_documents", lambda self, question, worlds: documents)
    with serving() as endpoints:
        answers = await asyncio.gather(*(asked(endpoints[i % 2], TOKEN, limit_s=20) for i in range(2 * MAX_ASKERS)))
    programs = [one["program"] for answer in answers for one in answer.documents]
    assert programs == [facts["program"]] * (2 * MAX_ASKERS)


async def test_all_answers_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"host": HERE, "pid": 1, "job": "", "loop_turns": True, "loop_late": 0.0, "program": "x" * 1_000_000}
    documents = [document(0, "") | facts | {"world": {"id": "0", "name": "default", "size": 1}}]
    monkeypatch.setattr(Endpoint, "_documents", lambda self, question, worlds: documents)
    with serving() as endpoints:
        answers = await ask_all(endpoints, TOKEN, limit_s=5, most_bytes=1_500_000)
    assert sorted(len(answer.documents) for answer in answers.values()) == [0, 1]
    assert any("too long" in answer.why for answer in answers.values())


async def test_what_cannot_be_said_does_not_end_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Endpoint, question: bytes, worlds: object) -> None:
        raise RuntimeError("planted")

    with serving() as (unix, _):
        with monkeypatch.context() as planted:
            planted.setattr(Endpoint, "_documents", fail)
            assert await asked(unix, TOKEN) == Answer([])
        assert await asked(unix, TOKEN) == Answer([])


def of_ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


async def test_nothing_is_left_behind_and_whoever_asks_is_hung_up_on() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with serving() as (unix, tcp):
        assert of_ours()
        stranger = socket.create_connection(tcp.tcp[0])
        await asked(tcp, TOKEN)
    assert not of_ours()
    with stranger:
        stranger.settimeout(5)
        assert not stranger.recv(1)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert (await asked(unix, TOKEN)).state == "gone"
    assert (await asked(tcp, TOKEN)).state == "gone"


async def test_a_forked_child_drops_it_and_the_parent_answers() -> None:
    with serving() as (unix, tcp):
        stranger = socket.create_connection(tcp.tcp[0])
        await asked(tcp, TOKEN)  # it has accepted the stranger, too
        child = os.fork()
        if not child:
            os._exit(len(_own_sockets()))
        sockets = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])  # noqa: ASYNC222 - it ends at once
        assert sockets <= len(_own_sockets()) - 5  # two that listen, one of the stranger's, and those that wake
        assert await asked(unix, TOKEN) == Answer([])
        assert await asked(tcp, TOKEN) == Answer([])
        stranger.close()


def _is_open(fd: str) -> bool:
    with contextlib.suppress(OSError):
        os.readlink(f"/proc/self/fd/{fd}")
        return True
    return False


def _own_sockets() -> list[str]:
    return [
        fd for fd in os.listdir("/proc/self/fd") if _is_open(fd) and "socket:" in os.readlink(f"/proc/self/fd/{fd}")
    ]


async def test_whoever_answers_nothing_is_silent_and_whoever_hangs_up_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = EndpointAddress("elsewhere", 1, b"", (server.getsockname(),))
        began_s = time.monotonic()
        assert (await asked(endpoint, TOKEN, limit_s=0.2)).state == "silent"
        assert time.monotonic() - began_s < 1
        hanging_up = asyncio.to_thread(lambda: [server.accept()[0].close() for _ in range(2)])
        answer, _ = await asyncio.gather(asked(endpoint, TOKEN, limit_s=2), hanging_up)
        assert answer.state == "gone"


async def test_whoever_says_what_is_no_document_has_said_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for said in [1], [[]], [{"rank": -1}], [document(0, "")], [document(0, "") | {"world": {}, "job": ""}], {"a": 1}:
        monkeypatch.setattr(Endpoint, "_documents", lambda self, question, said=said: said)
        with serving() as (unix, _):
            assert await asked(unix, TOKEN) == Answer([])


async def test_another_rank_of_its_host_tells_that_one_is_stopped() -> None:
    stopped = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220 - what it is told, it does at once
    stopped.send_signal(signal.SIGSTOP)
    with serving() as (_, tcp), socket.create_server(("127.0.0.1", 0)) as silent, stopped:
        neighbor = dataclasses.replace(tcp, host="elsewhere")
        endpoint = EndpointAddress("elsewhere", stopped.pid, b"", (silent.getsockname(),))
        alone = dataclasses.replace(endpoint, host="nowhere")
        answers = await ask_all([neighbor, endpoint, alone], TOKEN, limit_s=0.3)
        stopped.kill()
    assert [answers[one].state for one in (neighbor, endpoint, alone)] == ["", "stopped", "silent"]


async def test_an_idle_endpoint_uses_no_processor_time() -> None:
    with serving() as (unix, _):
        await asked(unix, TOKEN)
        (thread,) = of_ours()
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        await asyncio.sleep(0.1)
        before_s = time.clock_gettime(clock)
        await asyncio.sleep(0.3)
        assert time.clock_gettime(clock) == before_s


async def test_what_takes_seconds_keeps_nobody_waiting() -> None:
    """A thread finds it, which may outlive the endpoint and whoever asked."""
    begun, go_on = threading.Semaphore(0), threading.Event()

    class Group:
        loop = asyncio.get_running_loop()

        def network(self, question: bytes) -> dict[str, object]:
            begun.release()
            go_on.wait(60)
            return {"error": question.decode()}

    group = Group()
    facts = GroupFacts(0, 7, "default", (0,), cast(Any, group), {})
    RECORDER.worlds.append(facts)
    try:
        with serving() as (unix, tcp):
            first = asyncio.create_task(asked(tcp, TOKEN, SPEED + b"10.0.0.1 7", limit_s=60))
            assert await asyncio.to_thread(begun.acquire, timeout=60)
            gone = await asked(unix, TOKEN, NETWORK, limit_s=0.3)
            assert gone.state == "silent"
            assert [one["rank"] for one in (await asked(unix, TOKEN, limit_s=60)).documents] == [0]
            go_on.set()
            assert [one["network"] for one in (await first).documents] == [{"error": "speed 10.0.0.1 7"}]
            go_on.clear()
            last = asyncio.create_task(asked(tcp, TOKEN, NETWORK, limit_s=60))
            assert await asyncio.to_thread(begun.acquire, timeout=60)
            assert await asyncio.to_thread(begun.acquire, timeout=60)
        assert (await last).state == "gone"
        go_on.set()
    finally:
        go_on.set()
        RECORDER.worlds.remove(facts)


async def test_a_sample_is_bounded_and_a_number() -> None:
    with serving() as (unix, tcp):
        speed = await speed_of(tcp, TOKEN)
        assert speed["bytes_per_s"] > 0
        assert "tokens" in (await speed_of(tcp, new_token()))["error"]
        budget = _Budget(1 << 30)
        assert len(cast(bytes, await _ask(tcp, TOKEN, SAMPLE + b"1" * 20, 60, budget))) == SAMPLE_BYTES
        for odd in (b"", b"-1", b"x", b"1" * 400):
            await _ask(tcp, TOKEN, SAMPLE + odd, 60, budget)
        assert await asked(unix, TOKEN) == Answer([])
