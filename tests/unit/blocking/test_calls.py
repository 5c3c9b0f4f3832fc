"""Calls, waits and errors of asyncdist.blocking, in one process."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextvars import Context
from typing import Any

import numpy as np
import pytest
from launching import until
from socket_world import LIMIT_S
from thread_worlds import nothing_left

import asyncdist
import asyncdist.blocking as dist
import asyncdist.group.core
from asyncdist.threads.bridge import Call
from asyncdist.threads.thread import Reply


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No event loop runs here; threads, sessions and the switch interval are looked after instead."""
    with nothing_left():
        yield
        assert not dist.is_initialized()


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A world of one."""
    with dist.HashStore() as store:
        group = dist.init_process_group(store=store, rank=0, world_size=1, timeout=LIMIT_S)
        yield group
        if dist.is_initialized():
            dist.destroy_process_group()


def test_torchs_calling_conventions(alone: dist.ProcessGroup) -> None:
    x, y = np.ones(3), np.zeros(3)
    assert dist.all_reduce(x) is None
    assert dist.all_reduce(x, dist.ReduceOp.SUM, None, False) is None
    for work in (dist.all_reduce(x, dist.ReduceOp.SUM, alone, True), dist.all_reduce(x, async_op=True)):
        assert isinstance(work, dist.Work)
        assert work.wait() is True
        assert work.wait(timeout=1) is True
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.result() is x
    sent = dist.isend(x, 0, tag=1)
    assert dist.recv(y, tag=1) == 0
    assert y.tolist() == [1, 1, 1]
    assert sent.wait()
    received = dist.irecv(y, 0)
    assert not received.is_completed()
    assert dist.send(x, 0) is None
    assert received.wait()
    assert received.source_rank() == 0
    sent = dist.isend(np.arange(4), 0)
    assert dist.recv_array().tolist() == [0, 1, 2, 3]
    works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, y, 0), dist.P2POp(dist.isend, np.full(3, 7.0), 0)])
    assert [work.result() for work in works] == [0, None]
    assert y.tolist() == [7, 7, 7]
    outputs = [np.zeros(3)]
    assert dist.all_gather(outputs, y) is None
    assert outputs[0].tolist() == [7, 7, 7]
    assert dist.barrier(device_ids=[0]) is None
    assert dist.all_reduce(x, op=dist.reduce_op.SUM) is None
    objects = [None]
    dist.all_gather_object(objects, {"list": [1]})
    assert objects == [{"list": [1]}]


def test_what_is_over_at_once_takes_no_detour(alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.barrier()
    monkeypatch.setattr("asyncdist.blocking.group.Call", None)
    dist.barrier()
    dist.all_reduce(np.ones(1))
    alone.all_reduce(np.ones(1))
    assert alone.all_reduce is alone.all_reduce


def test_groups_are_handles(alone: dist.ProcessGroup) -> None:
    assert dist.get_default_group() == alone
    assert hash(dist.get_default_group()) == hash(alone)
    sub = dist.new_group([0], group_desc="mine")
    assert isinstance(sub, dist.ProcessGroup)
    assert sub != alone
    assert "mine" in repr(sub)
    assert (sub.rank, sub.size, sub.ranks, sub.name) == (0, 1, (0,), "mine")
    assert dist.get_rank(sub) == dist.get_group_rank(sub, 0) == 0
    x = np.ones(2)
    assert sub.all_reduce(x) is x
    assert sub.all_reduce(x, async_op=True).wait()
    assert sub.isend(x, 0).wait()
    assert sub.recv(x, 0) == 0
    dist.barrier(sub)
    mine, every = dist.new_subgroups(1)
    assert every == [mine]
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    assert mesh["tp", "dp"].flatten("both").get_group().all_reduce(x) is x
    dist.destroy_process_group(sub)
    with pytest.raises(asyncdist.ClosedError, match="is closed"):
        dist.barrier(group=sub)
    with pytest.raises(AttributeError):
        alone.no_such_thing  # noqa: B018
    with pytest.raises(TypeError, match="must be a ProcessGroup"):
        dist.barrier(group=3)


def test_without_a_world() -> None:
    for call in (dist.barrier, dist.get_rank, dist.destroy_process_group, dist.get_default_group):
        with pytest.raises(ValueError, match="has not been initialized"):
            call()
    assert not dist.is_initialized()
    assert dist.is_available()
    assert threading.active_count() == 1 or not any("communication" in t.name for t in threading.enumerate())


def test_wrong_arguments_raise_at_the_call(alone: dist.ProcessGroup) -> None:
    for options in ({}, {"async_op": True}):
        with pytest.raises(TypeError, match="numpy array"):
            dist.all_reduce("text", **options)
        with pytest.raises(ValueError, match="src=7"):
            dist.broadcast(np.ones(1), 7, **options)
    with pytest.raises(TypeError):
        dist.all_reduce()
    with pytest.raises(TypeError):
        dist.all_reduce(np.ones(1), dist.ReduceOp.SUM, None, True, 5)
    with pytest.raises(ValueError, match="op must be"):
        dist.P2POp(dist.broadcast, np.ones(1), 0)
    with pytest.raises(ValueError, match="initialized already"):
        dist.init_process_group(store=asyncdist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ValueError, match="store= needs rank="):
        dist.init_process_group(store=asyncdist.HashStore(), group_name="other")
    with pytest.raises(TypeError, match="progress="):
        dist.init_process_group(progress="thread")
    dist.barrier()


def test_callbacks_are_called_in_the_communication_thread_where_nothing_waits(alone: dist.ProcessGroup) -> None:
    told: queue.Queue[tuple[object, str, BaseException | None]] = queue.Queue()

    def callback(work: dist.Work[int]) -> None:
        error = None
        try:
            dist.barrier()
        except RuntimeError as refused:
            error = refused
        told.put((work, threading.current_thread().name, error))

    y = np.zeros(1)
    work = dist.irecv(y, 0)
    for _ in range(2):
        work.add_done_callback(callback)
    assert told.empty()
    dist.send(np.ones(1), 0)
    for _ in range(2):
        found, thread, error = told.get(timeout=LIMIT_S)
        assert found is work
        assert thread != threading.current_thread().name
        assert "running event loop" in str(error)
    work.add_done_callback(callback)  # has ended: called here, where waiting is allowed
    assert told.get_nowait() == (work, threading.current_thread().name, None)


def test_a_callback_that_exits_ends_nothing(alone: dist.ProcessGroup, caplog: pytest.LogCaptureFixture) -> None:
    work = dist.irecv(np.zeros(1), 0)
    work.add_done_callback(lambda _work: sys.exit(3))
    dist.send(np.ones(1), 0)
    work.wait()
    dist.barrier()
    assert "in a callback of <Work irecv 8 B done>" in caplog.text
    assert "SystemExit: 3" in caplog.text


def test_what_is_asked_for_its_bytes_may_ask_who_we_are(alone: dist.ProcessGroup) -> None:
    class Mine:
        @property
        def __array_interface__(self) -> Any:
            assert dist.get_rank() == 0
            return np.ones(3).__array_interface__

    dist.send(Mine(), 0)
    assert dist.recv(np.zeros(3), 0) == 0


def test_errors_keep_their_type_and_are_raised_in_every_waiting_thread(alone: dist.ProcessGroup) -> None:
    work = dist.irecv(np.zeros(1), 0)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            work.wait()
        except asyncdist.CollectiveMismatchError as error:
            raised.append(error)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    dist.send(np.zeros(5), 0)
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(raised) == 4
    assert isinstance(work.exception(), asyncdist.CollectiveMismatchError)
    with pytest.raises(asyncdist.CollectiveMismatchError, match="receive buffer"):
        work.result()
    assert not work.is_success()


def test_after_the_end_the_group_is_named_and_not_the_thread(alone: dist.ProcessGroup) -> None:
    dist.destroy_process_group()
    for call in (
        lambda: dist.all_reduce(np.ones(1), group=alone),
        lambda: dist.all_reduce(np.ones(1), group=alone, async_op=True),
        lambda: alone.all_reduce(np.ones(1)),
    ):
        with pytest.raises(
            asyncdist.ClosedError, match=r"^group default, rank 0, all_reduce: the group is closed$"
        ) as closed:
            call()
        assert closed.value.__suppress_context__


def test_tracebacks_show_the_calls_of_this_thread(alone: dist.ProcessGroup) -> None:
    alone.abort("enough")
    with pytest.raises(asyncdist.GroupAbortedError, match="enough") as aborted:
        dist.barrier()
    assert not {frame.name for frame in aborted.traceback} & {"run", "begin", "_collective"}


def test_a_wait_may_expire_and_the_operation_goes_on(alone: dist.ProcessGroup) -> None:
    x = np.zeros(1)
    work = dist.irecv(x, 0)
    for timeout in (0, 0.01):
        with pytest.raises(
            asyncdist.WaitTimeoutError, match=r"^group default, rank 0, irecv \(rank 0\): .*the operation goes on"
        ):
            work.wait(timeout)
    with pytest.raises(ValueError, match="negative"):
        work.wait(-1)
    dist.send(np.ones(1), 0)
    assert work.wait(LIMIT_S)
    with pytest.raises(asyncdist.CollectiveTimeoutError):
        dist.recv(x, 0, timeout=0.01)
    work = dist.irecv(x, 0)
    assert work.cancel()
    assert not work.cancel()
    with pytest.raises(asyncdist.ClosedError, match="withdrawn"):
        work.wait()


def test_a_failure_nobody_asked_about_is_raised_at_the_end(alone: dist.ProcessGroup) -> None:
    work = dist.irecv(np.zeros(1), 0)
    dist.send(np.zeros(5), 0)
    until(work.is_completed, "the receive to fail")
    with pytest.raises(asyncdist.CollectiveMismatchError):
        dist.destroy_process_group()
    assert not dist.is_initialized()


def test_leaving_twice_and_joining_again() -> None:
    for _ in range(3):
        with dist.HashStore() as store:
            with dist.init_process_group(store=store, rank=0, world_size=1) as group:
                dist.barrier()
            group.close()
            assert not dist.is_initialized()
            with pytest.raises(asyncdist.ClosedError):
                group.barrier()
            with pytest.raises(KeyError), dist.init_process_group(store=store, rank=0, world_size=1):
                raise KeyError


def test_several_threads_issue_in_the_order_of_their_calls(alone: dist.ProcessGroup) -> None:
    def issue(tag: int) -> None:
        for number in range(50):
            x = np.full(3, number)
            dist.all_reduce(x, tag=tag)
            work = dist.all_reduce(x, tag=tag, async_op=True)
            work.wait(LIMIT_S)
            assert repr(work) == f"<Work all_reduce #{2 * number + 1} 24 B done>"

    failures: list[BaseException] = []

    def guarded(tag: int) -> None:
        try:
            issue(tag)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not failures


def test_another_thread_finds_the_only_world_and_refuses_to_guess(alone: dist.ProcessGroup) -> None:
    def in_a_thread(function: Any) -> Any:
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append(function())
            except ValueError as error:
                outcome.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(LIMIT_S)
        return outcome[0]

    assert in_a_thread(dist.get_world_size) == 1
    with dist.HashStore() as store, dist.init_process_group(store=store, rank=0, world_size=1, group_name="b") as other:
        assert dist.get_default_group() == other
        assert "several worlds are open (default, b)" in in_a_thread(dist.get_world_size)
        assert in_a_thread(lambda: dist.get_world_size(alone)) == 1
        ends = ((dist.isend, np.ones(1)), (dist.irecv, np.zeros(1)))
        works = in_a_thread(lambda: dist.batch_isend_irecv([dist.P2POp(op, x, 0, other) for op, x in ends]))
        assert [work.result() for work in works] == [None, 0]
    assert dist.get_default_group() == alone


def test_a_running_loop_waits_for_nothing_that_was_issued_outside(alone: dist.ProcessGroup) -> None:
    """Nor does the communication thread, where it would be for ever."""
    pending, ended = dist.irecv(np.zeros(1), 0), dist.isend(np.ones(1), 0, tag=1)
    assert dist.recv(np.zeros(1), 0, tag=1) == 0
    stream = dist.broadcast_stream(np.ones(3), 0)

    def refused() -> None:
        for wait in (pending.wait, lambda: pending.wait(0.01), pending.result, pending.exception, stream.close):
            with pytest.raises(RuntimeError, match="inside a running event loop"):
                wait()
        with pytest.raises(RuntimeError, match="inside a running event loop"):
            next(stream)
        assert ended.wait()

    async def main() -> None:
        refused()

    asyncio.run(main())
    alone._session.thread.call(refused)
    assert [chunk.data.tolist() for chunk in stream] == [[1, 1, 1]]
    assert pending.cancel()


async def test_inside_a_running_loop_it_is_refused() -> None:
    for call in (
        lambda: dist.all_reduce(np.ones(1)),
        dist.barrier,
        dist.destroy_process_group,
        dist.HashStore,
        lambda: dist.init_process_group(store=asyncdist.HashStore(), rank=0, world_size=1),
    ):
        with pytest.raises(RuntimeError, match="inside a running event loop"):
            call()


def test_in_the_communication_thread_it_is_refused(alone: dist.ProcessGroup) -> None:
    with pytest.raises(RuntimeError, match="inside a running event loop"):
        alone._session.thread.call(dist.barrier)


def interrupt_soon() -> threading.Timer:
    """Simulate Ctrl-C while the main thread waits."""
    timer = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    return timer


def test_an_interrupted_recv_is_withdrawn_and_loses_no_message(alone: dist.ProcessGroup) -> None:
    x = np.zeros(2)
    timer = interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        dist.recv(x, 0)
    timer.join()
    dist.send(np.ones(2), 0)
    assert dist.recv(x, 0) == 0
    assert x.tolist() == [1, 1]


def test_an_interrupted_send_is_withdrawn(alone: dist.ProcessGroup) -> None:
    timer = interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        dist.send(np.zeros(1 << 20), 0)
    timer.join()
    dist.send(np.ones(2), 0)
    x = np.zeros(2)
    assert dist.recv(x, 0) == 0
    assert x.tolist() == [1, 1]


def test_an_interrupted_recv_gives_back_a_message_that_came_at_that_moment(alone: dist.ProcessGroup) -> None:
    x = np.zeros(2)
    session = alone._session
    receive = functools.partial(session.core.pairs.receive, abandon=True)
    reply: Reply[int] = Reply(session.thread)
    call = Call(session.thread, reply, Context(), receive, (x, 0, 0, None))
    session.thread.call(call.begin)
    dist.send(np.ones(2), 0)
    reply.wait()  # the message is here, but the one who waited is told of Ctrl-C instead
    session.thread.call(call.give_up)
    second = np.zeros(2)
    assert dist.recv(second, 0, timeout=LIMIT_S) == 0
    assert second.tolist() == [1, 1]


def test_destroying_aborts_rather_than_waits_for_what_was_interrupted(alone: dist.ProcessGroup) -> None:
    x = np.zeros(1)
    work = dist.irecv(x, 0)
    timer = interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    timer.join()
    started_s = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - started_s < 5
    with pytest.raises((asyncdist.GroupAbortedError, asyncdist.ClosedError)):
        work.wait()


def test_a_failure_after_an_interrupted_wait_is_raised_at_the_end(alone: dist.ProcessGroup) -> None:
    work = dist.irecv(np.zeros(1), 0)
    timer = interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    timer.join()
    dist.send(np.zeros(5), 0)
    until(work.is_completed, "the receive to fail")
    with pytest.raises(asyncdist.CollectiveMismatchError):
        dist.destroy_process_group()


def test_what_was_interrupted_keeps_its_arrays_until_its_end_only(alone: dist.ProcessGroup) -> None:
    x = np.zeros(1)
    array = weakref.ref(x)
    work = dist.irecv(x, 0)
    timer = interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    timer.join()
    dist.send(np.ones(1), 0)
    work.wait()
    del x, work
    deadline_s = time.monotonic() + LIMIT_S
    while array() is not None:  # the loop holds what its last turn has called
        dist.barrier()
        gc.collect()
        assert time.monotonic() < deadline_s


def test_leaving_that_was_interrupted_ends_by_itself(alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncdist.group.core, "CLOSE_SENDS_S", 0.3)
    dist.isend(np.zeros(1_000_000), 0)
    timer = interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        dist.destroy_process_group()
    timer.join()
    until(lambda: not dist.is_initialized(), "the world to end")
    with dist.HashStore() as store, dist.init_process_group(store=store, rank=0, world_size=1):
        dist.barrier()


def test_joining_interrupted_before_the_thread_begins_leaves_nothing_open() -> None:
    with dist.HashStore() as store:
        assert store._thread is not None
        busy = threading.Event()
        store._thread.submit(lambda: (busy.set(), time.sleep(0.2)))
        assert busy.wait(LIMIT_S)
        timer = interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            dist.init_process_group(store=store, rank=0, world_size=1)
        timer.join()
        until(lambda: not store._thread._tasks, "the tasks of the store to end")
        assert store.num_keys() == 0


def test_joining_can_be_interrupted() -> None:
    with dist.HashStore() as store:
        timer = interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            dist.init_process_group(store=store, rank=0, world_size=2)
        timer.join()
        with pytest.raises(asyncdist.ConnectTimeoutError, match="missing: rank 1"):
            dist.init_process_group(store=store, rank=0, world_size=2, timeout=0.05, group_name="again")


def test_stores_wait_too() -> None:
    with dist.HashStore(timeout=5) as store, dist.PrefixStore("part", store) as part:
        assert part.set("key", "value") is None
        assert part.get("key") == b"value"
        assert store.get("part/key") == b"value"
        assert store.add("n", 2) == 2
        assert store.check(["n"])
        with pytest.raises(asyncdist.StoreTimeoutError):
            store.get("none", timeout=0.01)
        assert store.timeout == 5
        with pytest.raises(TypeError, match="must be str, not int"):  # found at the call, which is in the other thread
            store.get(3)
        with pytest.raises(TypeError, match="missing 1 required"):
            store.set("key")
    with pytest.raises(asyncdist.ClosedError):
        store.get("n")
    store.close()
    assert {name for name in asyncdist.Store.__abstractmethods__ if not hasattr(dist.Store, name)} == set()
    assert not inspect.iscoroutinefunction(dist.Store.get)


def test_an_interrupted_pop_takes_no_item() -> None:
    with dist.HashStore() as store:
        timer = interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            store.queue_pop("queue")
        timer.join()
        store.queue_push("queue", "item")
        assert store.queue_pop("queue", timeout=LIMIT_S) == b"item"


def test_opening_a_store_can_be_interrupted() -> None:
    with dist.HashStore() as other:  # so that the thread goes on
        assert other._thread is not None
        timer = interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            dist.TCPStore("127.0.0.1", 0, 2, is_master=True)  # waits for another
        timer.join()
        until(lambda: not (other._thread._tasks or other._thread.users > 1), "the other store to end")


def test_a_forgotten_store_is_closed_but_not_under_a_world() -> None:
    group = dist.init_process_group(store=dist.PrefixStore("part", dist.HashStore()), rank=0, world_size=1)
    gc.collect()
    dist.barrier()
    group.world.store.set  # noqa: B018 - still there
    dist.destroy_process_group()
    gc.collect()  # the fixture waits for the thread's end


def test_a_stream_becomes_an_iterator(alone: dist.ProcessGroup) -> None:
    async def chunks() -> Any:
        for number in range(3):
            yield await asyncio.sleep(0, number)

    stream = alone._session.call(chunks)
    assert list(stream) == [0, 1, 2]
    stream = alone._session.call(chunks)
    assert next(stream) == 0
    stream.close()
    assert list(stream) == []


def test_a_stream_may_be_closed_after_its_world() -> None:
    dist.init_process_group(init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    with dist.broadcast_stream(np.zeros(3), 0):
        dist.destroy_process_group()
