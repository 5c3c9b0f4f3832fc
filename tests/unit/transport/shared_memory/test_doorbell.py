"""The doorbell is rung if its owner sleeps, not otherwise, and a ring that got lost is made up for."""

from __future__ import annotations

import asyncio
import gc
import os
import warnings
import weakref
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop
from mesh_world import open_fds
from waiting import eventually

from asyncdist.transport.fork import SocketSet
from asyncdist.transport.shared_memory import doorbell as doorbell_module
from asyncdist.transport.shared_memory.doorbell import Doorbell, Ringer
from asyncdist.transport.shared_memory.fence import RECHECK_S, fence
from asyncdist.transport.shared_memory.segment import AttachedSegment


class Bell:
    """A doorbell, a peer of its own, and how often it looked."""

    def __init__(self) -> None:
        self.fds = SocketSet(lambda: None)
        self.doorbell = Doorbell(asyncio.get_running_loop(), self.fds, lambda: None)
        page = AttachedSegment(os.dup(self.doorbell.page.fd), self.doorbell.page.size)
        self.ringer = Ringer(self.fds, os.dup(self.doorbell.eventfd), page)
        self.looks = 0
        self.there = False
        self.doorbell.add(self.look)

    def look(self) -> bool:
        self.looks += 1
        return self.there


@pytest.fixture
async def bell() -> AsyncIterator[Bell]:
    made = Bell()
    yield made
    made.ringer.close()
    made.ringer.close()
    made.doorbell.close()
    made.doorbell.close()
    made.ringer.ring()  # nobody is there any more


async def test_without_an_eventfd_nothing_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    before = len(open_fds())
    monkeypatch.setattr(os, "eventfd", refuse)
    for _ in range(3):
        with pytest.raises(OSError, match="Too many"):
            Doorbell(asyncio.get_running_loop(), SocketSet(lambda: None), lambda: None)
    assert len(open_fds()) == before


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("end", ["the loop is closed", "the doorbell is closed", "all is garbage"])
def test_its_owner_is_told_when_nobody_hears_it_any_more(
    end: str, factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    told: list[str] = []
    loop = factory()
    doorbell = Doorbell(loop, SocketSet(lambda: None), lambda: told.append(end))
    gone = weakref.ref(loop)
    assert not told
    if end == "the loop is closed":
        loop.close()
    elif end == "the doorbell is closed":
        doorbell.close()
    else:
        del loop, doorbell
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # of the loop that was not closed, rightly
            gc.collect()
        assert gone() is None
    assert told == [end]
    if end == "the doorbell is closed":
        loop.close()
    assert told == [end]


async def test_a_sleeper_is_woken(bell: Bell) -> None:
    bell.ringer.ring()
    await eventually(lambda: bell.doorbell.rings == 1)
    assert bell.looks == 1


async def test_many_rings_are_one(bell: Bell) -> None:
    for _ in range(1000):
        bell.ringer.ring()
    await eventually(lambda: bell.doorbell.rings)
    await asyncio.sleep(0)
    assert bell.doorbell.rings == 1


async def test_who_is_awake_is_not_rung_for_and_looks_before_it_sleeps(bell: Bell) -> None:
    bell.doorbell.stay_awake()
    bell.doorbell.stay_awake()
    bell.ringer.ring()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(bell.doorbell.eventfd)
    assert not bell.looks
    await asyncio.sleep(0)
    assert bell.looks == 1, "what came meanwhile is not slept upon"
    bell.ringer.ring()
    await eventually(lambda: bell.doorbell.rings == 1)


async def test_a_ring_that_got_lost_costs_a_recheck(bell: Bell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RECHECK_S <= 0.25
    monkeypatch.setattr(doorbell_module, "RECHECK_S", 0.001)
    bell.there = True
    await eventually(lambda: bell.looks)
    looks = bell.looks
    await eventually(lambda: bell.looks > looks)
    assert bell.doorbell.rings == 0


async def test_a_counter_at_its_limit_is_ring_enough(bell: Bell) -> None:
    os.eventfd_write(bell.doorbell.eventfd, (1 << 64) - 2)
    bell.ringer.ring()
    await eventually(lambda: bell.doorbell.rings == 1)


async def test_pollers_may_go_while_others_are_asked(bell: Bell) -> None:
    def leave() -> bool:
        bell.doorbell.silence()
        return False

    bell.doorbell.silence()
    bell.doorbell.add(leave)
    bell.doorbell.add(bell.look)
    bell.doorbell.poll()
    looks = bell.looks
    bell.doorbell.poll()
    assert bell.looks == looks, "nobody is asked any more"


async def test_who_has_a_look_is_asked_first_and_may_end_the_round(bell: Bell) -> None:
    class Work:
        _done = False

    asked: list[str] = []

    def serve() -> bool:
        asked.append("served")
        return True

    def look() -> bool:
        asked.append("first")
        Work._done = len(asked) > 3
        return Work._done

    def others() -> bool:
        asked.append("other")
        return False

    bell.doorbell.silence()
    bell.doorbell.add(others)
    bell.doorbell.add(serve, look)
    bell.doorbell.poll_for(Work())
    assert asked == ["first", "other"]
    bell.doorbell.poll_for(Work())
    assert asked == ["first", "other", "first", "other"]
    bell.doorbell.poll_for(Work())
    assert asked[4:] == ["first"], "the work is done, so nobody else need be asked now"
    bell.doorbell.poll()
    assert asked[5:] == ["served", "other"], "who does not come again soon does all there is to do"
    bell.doorbell.remove(serve)
    bell.doorbell.poll()
    bell.doorbell.poll_for(Work())
    assert asked[7:] == ["other", "other"]


async def test_a_peer_that_writes_into_the_page_reaches_nothing(bell: Bell) -> None:
    page = AttachedSegment(os.dup(bell.doorbell.page.fd), bell.doorbell.page.size)
    with pytest.raises(TypeError):
        page.view[0] = 0
    page.release()


def test_the_fence_can_be_taken_again_and_again() -> None:
    for _ in range(10):
        fence()
