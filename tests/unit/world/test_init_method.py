"""Init methods: what the caller and the environment say, and what is refused."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from jobs import free_port

from asyncdist.concurrency import tasks as patience
from asyncdist.concurrency.deadline import Deadline
from asyncdist.errors import ClosedError, ConnectTimeoutError
from asyncdist.init import init_process_group
from asyncdist.store import HashStore, TCPStore
from asyncdist.world import init_method as init_method_module
from asyncdist.world.init_method import (
    FAILURE_LINGER_S,
    Hosting,
    InitMethod,
    StoreSource,
    open_store,
    parse_init_method,
    register_rendezvous_handler,
)
from asyncdist_server import serve_in_thread
from asyncdist_server.serving.user_token import make_user_token

ENVIRON = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_the_environment_is_the_default() -> None:
    method = parse_init_method(None, -1, -1, environ=ENVIRON)
    assert (method.rank, method.world_size, method.host, method.port) == (1, 4, "10.0.0.1", 29500)
    assert method.may_host
    assert method.namespace == ""


def test_the_address_may_have_brackets() -> None:
    method = parse_init_method(None, -1, -1, environ={**ENVIRON, "MASTER_ADDR": "[::1]"})
    assert (method.host, method.port) == ("::1", 29500)


def test_arguments_override_the_environment() -> None:
    method = parse_init_method("env://", 2, 3, environ=ENVIRON)
    assert (method.rank, method.world_size) == (2, 3)


@pytest.mark.parametrize(
    ("rank", "world_size", "name"), [("2", 3, "rank"), (2, "3", "world_size"), (2, None, "world_size")]
)
def test_texts_are_no_ranks(rank: object, world_size: object, name: str) -> None:
    """Such as `rank=os.environ["RANK"]`."""
    with pytest.raises(TypeError, match=rf"^{name} must be an int, not (str|NoneType)$"):
        parse_init_method("env://", rank, world_size, environ=ENVIRON)  # type: ignore[arg-type]


def test_ranks_out_of_arrays_become_ints() -> None:
    method = parse_init_method("env://", np.int64(2), np.int64(3), environ=ENVIRON)  # type: ignore[arg-type]
    assert [type(number) for number in (method.rank, method.world_size)] == [int, int]


def test_with_a_daemon_nobody_hosts() -> None:
    environ = {**ENVIRON, "ASYNCDIST_STORE": "[::1]:4000", "ASYNCDIST_JOB_ID": "job.0"}
    method = parse_init_method(None, -1, -1, environ=environ)
    assert (method.host, method.port, method.may_host, method.namespace) == ("::1", 4000, False, "job.0")


def test_tcp_takes_ranks_from_its_query_or_from_arguments() -> None:
    queried = parse_init_method("tcp://host:1?rank=0&world_size=2", -1, -1, environ={})
    given = parse_init_method("tcp://host:1", 0, 2, environ={})
    assert queried == given
    assert (given.host, given.port, given.may_host) == ("host", 1, True)


def test_which_server_of_torchs_is_meant_means_nothing() -> None:
    plain = parse_init_method("tcp://host:1", 0, 2, environ={})
    assert parse_init_method("tcp://host:1?use_libuv=0", 0, 2, environ={}) == plain


def test_an_init_method_is_a_text() -> None:
    with pytest.raises(TypeError, match=r"^init_method must be a str, not int$"):
        parse_init_method(29500, 0, 2, environ={})  # type: ignore[arg-type]


def test_file() -> None:
    method = parse_init_method("file:///tmp/x?rank=0", -1, 2, environ={})
    assert (method.path, method.rank, method.world_size) == ("/tmp/x", 0, 2)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(missing: str) -> None:
    environ = {name: value for name, value in ENVIRON.items() if name != missing}
    with pytest.raises(ValueError, match=rf"environment variable {missing} expected, but not set"):
        parse_init_method(None, -1, -1, environ=environ)


@pytest.mark.parametrize(
    ("init_method", "rank", "world_size", "environ", "message"),
    [
        ("env://", -1, -1, {**ENVIRON, "RANK": "one"}, "RANK is not an integer: 'one'"),
        ("env://", -1, -1, {**ENVIRON, "MASTER_PORT": "65536"}, "MASTER_PORT=65536 is not a port"),
        ("env://", -1, -1, {**ENVIRON, "ASYNCDIST_STORE": "nowhere"}, "ASYNCDIST_STORE: 'nowhere' is not host:port"),
        ("env://", 4, -1, ENVIRON, "rank 4 is not in a world of 4"),
        ("env://", -1, 0, ENVIRON, "world_size must be at least 1"),
        ("tcp://host:1?rank=0", 0, 2, {}, "rank is given in the URL and as an argument"),
        ("tcp://host:1?size=2", 0, 2, {}, "unknown parameter 'size'"),
        ("tcp://host:1?rank=x", -1, 2, {}, "not an integer"),
        ("tcp://host:1", -1, 2, {}, "rank is missing"),
        ("tcp://host:1", 0, -1, {}, "world_size is missing"),
        ("tcp://host", 0, 2, {}, "is not host:port"),
        ("tcp://host:abc", 0, 2, {}, "init_method tcp://host:abc: the port is not an integer: 'abc'"),
        ("tcp://host:70000", 0, 2, {}, "port 70000"),
        ("file://x", 0, 2, {}, "file:///absolute/path"),
        ("foo://x", 0, 2, {}, "no rendezvous for 'foo://x'"),
        ("http://x:1", -1, -1, {}, "no rendezvous for 'http://x:1'"),
    ],
)
def test_what_is_wrong_is_said(
    init_method: str, rank: int, world_size: int, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parse_init_method(init_method, rank, world_size, environ=environ)


def test_an_explicit_store_excludes_an_init_method_and_needs_ranks() -> None:
    assert parse_init_method(None, 0, 1, has_store=True).world_size == 1
    with pytest.raises(ValueError, match="not both"):
        parse_init_method("env://", 0, 1, has_store=True)
    for rank, world_size in ((-1, 2), (0, -1)):
        with pytest.raises(ValueError, match="needs rank= and world_size="):
            parse_init_method(None, rank, world_size, has_store=True)


async def hosted() -> tuple[StoreSource, TCPStore]:
    """A source that hosts its store, and the store of another rank."""
    server = await asyncio.to_thread(serve_in_thread)
    mine, other = [await TCPStore.connect("127.0.0.1", server.port) for _ in range(2)]
    hosting = Hosting.at("127.0.0.1", 0)
    hosting.server = server
    return StoreSource(mine, owned=True, hosting=hosting), other


async def test_after_a_failure_the_store_stays_until_the_others_have_heard_why() -> None:
    source, other = await hosted()
    closing = asyncio.create_task(source.close_after_failure())
    await other.set("asked", "late")
    assert await other.get("asked") == b"late"
    assert not closing.done()
    await other.close()
    async with asyncio.timeout(FAILURE_LINGER_S):
        await closing


async def test_after_a_failure_the_store_does_not_stay_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init_method_module, "FAILURE_LINGER_S", 0.05)
    source, other = await hosted()
    async with asyncio.timeout(5):
        await source.close_after_failure()
    await other.close()


async def test_a_port_that_a_stranger_has_is_not_tried_for_as_long_as_the_world_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's server closes without a word what does not speak its protocol, as a proxy does whose daemon is away."""
    monkeypatch.setattr(init_method_module, "TAKEN_PORT_TIMEOUT_S", 0.2)

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(close, "127.0.0.1", 0) as stranger:
        port = stranger.sockets[0].getsockname()[1]
        method = parse_init_method(f"tcp://127.0.0.1:{port}", rank=0, world_size=1, environ={})
        with pytest.raises(
            ConnectTimeoutError, match=rf"{port} is in use, and what answers there is not .*another port: MASTER_PORT"
        ):
            async with asyncio.timeout(5):
                await open_store(method, Deadline.after(600, asyncio.get_running_loop().time()), {})
        torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for rank in range(2):
            method = parse_init_method("env://", rank, 2, environ=torchrun)
            deadline = Deadline.after(0.2, asyncio.get_running_loop().time())
            with pytest.raises(ConnectTimeoutError, match=rf"rank {rank}: .* start the script with `asyncdist run`"):
                await open_store(method, deadline, torchrun)


async def test_rank_0_joins_the_store_on_its_port_for_as_long_as_the_world_takes() -> None:
    with serve_in_thread(token=make_user_token()) as server:
        method = parse_init_method(f"tcp://127.0.0.1:{server.port}", rank=0, world_size=1, environ={})
        deadline = Deadline.after(600, asyncio.get_running_loop().time())
        source = await open_store(method, deadline, {})
        assert source.server is None
        assert source.store.timeout is not None
        assert 590 < source.store.timeout <= 600
        await source.store.close()


async def test_the_time_out_that_was_given_is_said_and_not_what_was_left_of_it() -> None:
    method = parse_init_method(f"tcp://127.0.0.1:{free_port()}", rank=1, world_size=2, environ={})
    deadline = Deadline.after(7, asyncio.get_running_loop().time() - 6.5)
    with pytest.raises(ConnectTimeoutError, match=r"rank 1: store .* could not connect within 7 s: nothing listens"):
        await open_store(method, deadline, {})


@pytest.mark.parametrize("text", ["5m", "-1", "0", "nan"])
def test_a_time_out_of_the_environment_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ASYNCDIST_TIMEOUT", text)
    with pytest.raises(ValueError, match=rf"ASYNCDIST_TIMEOUT='{text}' is not a number of seconds above 0"):
        init_process_group("aio", "tcp://127.0.0.1:1", rank=0, world_size=1)


@pytest.mark.parametrize(("text", "timeout_s"), [("", 1800), ("2.5", 2.5), ("inf", None)])
async def test_the_time_out_of_the_environment_is_the_default(
    monkeypatch: pytest.MonkeyPatch, text: str, timeout_s: float | None
) -> None:
    monkeypatch.setenv("ASYNCDIST_TIMEOUT", text)
    async with init_process_group(store=HashStore(), rank=0, world_size=1) as group:
        assert group.timeout_s == timeout_s


async def test_waiting_for_rank_0_to_come_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patience, "PATIENCE_S", 0.05)
    method = parse_init_method(f"tcp://127.0.0.1:{free_port()}", rank=1, world_size=2, environ={})
    with pytest.raises(ConnectTimeoutError):
        await open_store(method, Deadline.after(0.5, asyncio.get_running_loop().time()), {})
    assert caplog.messages == [
        f"rank 1: waiting for the store at 127.0.0.1:{method.port}, which rank 0 hosts, for up to 0.5 s"
    ]


async def test_the_last_world_of_a_process_stops_the_store_that_it_hosts() -> None:
    method = InitMethod(0, 1, "127.0.0.1", free_port(), may_host=True)
    one, two = await asyncio.gather(*(open_store(method, Deadline.after(None, 0)) for _ in range(2)))
    assert one.server is two.server is not None
    await one.close()
    await two.store.set("key", b"value")
    assert await two.store.get("key") == b"value"
    await two.close()
    again = await open_store(method, Deadline.after(None, 0))
    assert again.server is not None
    assert not await again.store.check(["key"])
    await again.close()


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(init_method_module, "_handlers", {})


@pytest.mark.usefixtures("handlers")
async def test_a_handler_says_where_to_meet() -> None:
    first = HashStore()
    asked, stores = [], []

    async def meet(url: str, rank: int, world_size: int, timeout: float | None) -> tuple[HashStore, int, int]:
        asked.append((url, rank, world_size, timeout is not None and 0 < timeout <= 30))
        stores.append(first.clone())
        return stores[-1], len(stores) - 1, 2

    async def join() -> int:
        async with init_process_group("aio", "etcd://host:1/job", timeout=30) as group:
            total = np.ones(1)
            await group.all_reduce(total)
            return group.rank + 10 * int(total[0])

    register_rendezvous_handler("etcd", meet)
    assert sorted(await asyncio.gather(asyncio.create_task(join()), asyncio.create_task(join()))) == [20, 21]
    assert asked == [("etcd://host:1/job", -1, -1, True)] * 2
    for store in stores:
        with pytest.raises(ClosedError):
            await store.set("k", "v")


@pytest.mark.usefixtures("handlers")
async def test_what_a_handler_answers_is_checked() -> None:
    store = HashStore()
    answer: object = None

    async def meet(url: str, rank: int, world_size: int, timeout: float | None) -> object:
        return answer

    register_rendezvous_handler("a+b", meet)
    for answer, kind, said in [  # noqa: B007 - `meet` returns it
        (None, TypeError, r"the handler of a\+b:///x must return \(store, rank, world_size\), not None"),
        ((store, "0", 1), TypeError, "must return"),
        ((store, 1, 1), ValueError, "rank 1 is not in a world of 1"),
    ]:
        with pytest.raises(kind, match=said):
            await init_process_group(None, "a+b:///x")
    with pytest.raises(ClosedError):
        await store.set("k", "v")


@pytest.mark.usefixtures("handlers")
async def test_a_handler_has_its_time() -> None:
    async def meet(url: str, rank: int, world_size: int, timeout: float | None) -> object:
        await asyncio.sleep(60)

    register_rendezvous_handler("slow", meet)
    with pytest.raises(ConnectTimeoutError, match=r"the handler of slow://x returned no store within 0\.\d+ s"):
        await init_process_group(None, "slow://x", timeout=0.05)


@pytest.mark.usefixtures("handlers")
def test_handlers_that_are_refused() -> None:
    async def meet(url: str, rank: int, world_size: int, timeout: float | None) -> object:
        return None

    for scheme in ("", "Etcd", "a b", "1", None):
        with pytest.raises(ValueError, match="scheme must be the beginning of URLs"):
            register_rendezvous_handler(scheme, meet)
    with pytest.raises(TypeError, match="handler must be an async function, not NoneType"):
        register_rendezvous_handler("etcd", None)
    register_rendezvous_handler("etcd", meet)
    for scheme in ("etcd", "env", "tcp"):
        with pytest.raises(RuntimeError, match=f"{scheme}:// has a rendezvous handler already"):
            register_rendezvous_handler(scheme, meet)
    with pytest.raises(ValueError, match="register_rendezvous_handler"):
        parse_init_method("zk://x", 0, 1)
