"""torch.distributed.TCPStore, unmodified, as a client of the daemon: every method, and what it raises."""

from __future__ import annotations

import datetime
import threading
from typing import Any

import pytest
from daemon_kit import Daemon
from torch_kit import until_nothing_is_left

pytestmark = pytest.mark.peers

SOON = datetime.timedelta(milliseconds=50)
LONG = datetime.timedelta(seconds=20)


def connect(port: int, **options: Any) -> Any:
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LONG, **options)


@pytest.fixture
def store(daemon: Daemon) -> Any:
    until_nothing_is_left(daemon)
    return connect(daemon.port)


@pytest.fixture
def errors() -> Any:
    import torch.distributed as dist

    return dist


class Blocked:
    """A call in a thread of its own; `result` waits for it."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(call, arguments), daemon=True)
        self._thread.start()

    def _run(self, call: Any, arguments: tuple[Any, ...]) -> None:
        try:
            self._outcome.append(call(*arguments))
        except BaseException as error:
            self._outcome.append(error)

    def result(self) -> Any:
        self._thread.join(20.0)
        assert self._outcome, "it is still blocked"
        if isinstance(self._outcome[0], BaseException):
            raise self._outcome[0]
        return self._outcome[0]


def test_values(store: Any) -> None:
    store.set("k", "v1")
    assert store.get("k") == b"v1"
    store.set("", "")
    assert store.get("") == b""
    store.set("clé", "é")
    assert store.get("clé") == "é".encode()
    store.set("bin", b"\x00\xff")
    assert store.get("bin") == b"\x00\xff"
    store.append("ap", "po")
    store.append("ap", "tato")
    assert store.get("ap") == b"potato"
    assert store.num_keys() == 5
    assert sorted(store.list_keys()) == ["", "ap", "bin", "clé", "k"]
    assert store.delete_key("k")
    assert not store.delete_key("k")
    assert store.check(["", "ap"])
    assert not store.check(["", "k"])
    assert store.check([])


def test_numbers(store: Any, errors: Any) -> None:
    assert [store.add("n", amount) for amount in (5, -7, 0, 2**62)] == [5, -2, -2, 2**62 - 2]
    assert store.get("n") == b"%d" % (2**62 - 2)
    store.set("text", "abc")
    with pytest.raises(errors.DistNetworkError):
        store.add("text", 1)


def test_compare_set(store: Any) -> None:
    assert store.compare_set("c", "no", "a") == b"no"
    assert store.compare_set("c", "", "a") == b"a"
    assert store.compare_set("c", "", "b") == b"a"
    assert store.compare_set("c", "a", "b") == b"b"


def test_many_keys_at_once(store: Any) -> None:
    names = [f"key-{i}" for i in range(5000)]  # hundreds of segments of torch's
    store.multi_set(names, [name * 3 for name in names])
    assert store.multi_get(names) == [(name * 3).encode() for name in names]
    store.wait(names)
    assert store.multi_get([]) == []


@pytest.mark.slow("moves many mebibytes through torch")
def test_values_of_many_mebibytes(store: Any, errors: Any) -> None:
    for size in (8 << 20, 64 << 20):  # the most that torch's server takes, and the most that this one does
        store.set("large", bytes(size))
        assert len(store.get("large")) == size
    store.delete_key("large")
    with pytest.raises(errors.DistNetworkError):  # noqa: PT012  which of them notices depends on the kernel's buffers
        store.set("large", bytes((64 << 20) + 1))
        store.num_keys()


def test_waiting(store: Any) -> None:
    other = store.clone()
    waiting = Blocked(store.wait, ["a", "b"])
    other.set("a", "1")
    other.set("b", "2")
    assert waiting.result() is None
    getting = Blocked(store.multi_get, ["c", "a"])
    other.set("c", "3")
    assert getting.result() == [b"3", b"1"]


def test_time_outs_leave_the_connection_in_order(store: Any, errors: Any) -> None:
    other = store.clone()
    store.set_timeout(SOON)
    for call in (
        lambda: store.wait(["nope", "neither"]),
        lambda: store.get("nope"),
        lambda: store.queue_pop("nope"),
        lambda: store.barrier("nope", 2),
    ):
        for _ in range(3):
            with pytest.raises(errors.DistStoreError, match="timeout after 50ms"):
                call()
            store.set("k", "v")
            assert store.get("k") == b"v"
    assert store.get("nope") == b"3"  # as torch's server counts; but the next barrier begins anew
    store.set_timeout(LONG)
    first = Blocked(store.barrier, "nope", 2)
    other.barrier("nope", 2)
    first.result()


def test_queues(store: Any, errors: Any) -> None:
    assert store.queue_len("q") == 0
    for item in ("j1", "j2"):
        store.queue_push("q", item)
    assert store.queue_len("q") == 2
    assert store.check(["q"])
    assert store.queue_pop("q") == b"j1"
    assert store.queue_pop("q", block=False) == b"j2"
    with pytest.raises(errors.QueueEmptyError):
        store.queue_pop("q", block=False)
    other = store.clone()
    popping = Blocked(store.queue_pop, "q")
    other.queue_push("q", "j3")
    assert popping.result() == b"j3"


def test_prefixes(store: Any, errors: Any) -> None:
    inner = errors.PrefixStore("a", store)
    nested = errors.PrefixStore("b", inner)
    nested.set("k", "1")
    assert nested.get("k") == store.get("a/b/k") == b"1"
    assert nested.add("n", 2) == 2
    assert nested.compare_set("c", "", "x") == b"x"
    nested.barrier("bar", 1)
    nested.queue_push("q", "i")
    assert nested.queue_pop("q") == b"i"


def test_the_number_of_workers_is_a_counter(daemon: Daemon) -> None:
    until_nothing_is_left(daemon)
    stores = [connect(daemon.port, world_size=2, wait_for_workers=True) for _ in range(3)]
    assert stores[0].num_keys() == 1
    assert stores[0].list_keys() == []


def test_keys_go_with_the_last_client(daemon: Daemon) -> None:
    first = connect(daemon.port)
    first.set("k", "1")
    second = first.clone()
    del first
    assert second.get("k") == b"1"
    del second
    until_nothing_is_left(daemon)
