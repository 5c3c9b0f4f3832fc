"""How long what torch clients stored lives, and whose it is."""

from __future__ import annotations

import pytest
from torch_wire_kit import WAITED, World, blob, number

from asyncdist_server.torch.namespaces import job_of
from asyncdist_server.torch.wire import Query


@pytest.mark.parametrize(
    ("key", "job"),
    [
        (b"/torch.rendezvous.a", b"/torch.rendezvous.a"),
        (b"/torch.rendezvous.a.0/MASTER_ADDR", b"/torch.rendezvous.a"),
        (b"/torch.rendezvous.a.12/x/y", b"/torch.rendezvous.a"),
        (b"/torch.rendezvous.a.0", b"/torch.rendezvous.a.0"),
        (b"/torch.rendezvous.a.0.3/x", b"/torch.rendezvous.a.0"),
        (b"/torch.rendezvous.a/x", b"/torch.rendezvous.a"),
        (b"/asyncdist.job.a/x", b"/asyncdist.job.a"),
        (b"/asyncdist.job.a.0/x", b"/asyncdist.job.a.0"),
        (b"/asyncdist.job.a", None),
        (b"/default_pg/0//cpu//0/1", None),
        (b"init/", None),
        (b"torch.rendezvous.a", None),
        (b"", None),
    ],
)
def test_keys_that_name_a_job(key: bytes, job: bytes | None) -> None:
    assert job_of(key) == job


def test_what_is_stored_goes_with_the_last_client() -> None:
    world = World()
    first, second = world.client(), world.client()
    first.ask(Query.SET, b"/0//cpu//0/0", b"address")
    first.ask(Query.QUEUE_PUSH, b"/q", b"item")
    first.leave()
    assert second.ask(Query.GET, b"/0//cpu//0/0") == blob(b"address")
    second.leave()
    assert set(world.engine.statistics().values()) == {0}
    assert world.client().ask(Query.CHECK, [b"/0//cpu//0/0"]) == b"\x01"


def test_who_comes_within_the_linger_time_finds_it() -> None:
    world = World(linger_s=10.0)
    client = world.client()
    client.ask(Query.SET, b"/k", b"1")
    client.leave()
    assert world.namespaces.next_deadline() == 10.0
    world.advance(9.0)
    client = world.client()
    assert world.namespaces.next_deadline() is None
    world.advance(9.0)
    assert client.ask(Query.GET, b"/k") == blob(b"1")
    client.leave()
    world.advance(9.0)
    world.advance(1.0)
    assert world.client().ask(Query.GETNUMKEYS) == number(0)


def test_a_daemon_that_was_stopped_hears_first_who_came_within_the_linger_time() -> None:
    world = World(linger_s=10.0)
    client = world.client()
    client.ask(Query.SET, b"/k", b"1")
    client.leave()
    for now in (300.0, 600.0):
        world.namespaces.expire(now, 200.0)
        assert world.namespaces.next_deadline() == now + 10.0
    world.now = 600.0
    assert world.client().ask(Query.GET, b"/k") == blob(b"1")


def test_ports_have_keys_of_their_own() -> None:
    world = World()
    here, there = world.client(1), world.client(2)
    here.ask(Query.SET, b"/k", b"1")
    assert there.ask(Query.WAIT, [b"/k"]) == b""
    here.ask(Query.BARRIER, b"/b", 2)
    assert there.ask(Query.BARRIER, b"/b", 2) == b""
    here.leave()
    assert there.ask(Query.GETNUMKEYS) == number(0)


@pytest.mark.parametrize(
    ("state", "detail"),
    [(b"/torch.rendezvous.a", b"/torch.rendezvous.a.0/x"), (b"/asyncdist.job.a/x", b"/asyncdist.job.a/y")],
)
def test_a_job_goes_with_the_last_client_that_named_it(state: bytes, detail: bytes) -> None:
    world = World()
    bystander, first, second = world.client(), world.client(), world.client()
    bystander.ask(Query.SET, b"/k", b"1")
    bystander.ask(Query.SET, b"/torch.rendezvous.other", b"1")
    first.ask(Query.COMPARE_SET, state, b"", b"1")
    first.ask(Query.SET, detail, b"1")
    first.ask(Query.QUEUE_PUSH, detail, b"1")
    assert second.ask(Query.WAIT, [state]) == WAITED
    first.leave()
    assert bystander.ask(Query.GETNUMKEYS) == number(4)
    second.leave()
    assert bystander.ask(Query.GETNUMKEYS) == number(2)
    assert bystander.ask(Query.QUEUE_LEN, detail) == number(0)
    assert bystander.ask(Query.GET, b"/k") == blob(b"1")


def test_a_job_lingers_too() -> None:
    world = World(linger_s=10.0)
    bystander, agent = world.client(), world.client()
    agent.ask(Query.SET, b"/torch.rendezvous.a", b"1")
    agent.leave()
    world.advance(9.0)
    agent = world.client()
    assert agent.ask(Query.WAIT, [b"/torch.rendezvous.a"]) == WAITED
    agent.leave()
    world.advance(10.0)
    assert bystander.ask(Query.GETNUMKEYS) == number(0)


def test_who_waits_while_a_job_goes_goes_on_waiting() -> None:
    world = World()
    waiting, agent = world.client(), world.client()
    agent.ask(Query.SET, b"/torch.rendezvous.a", b"1")
    assert waiting.ask(Query.WAIT, [b"/torch.rendezvous.a", b"/torch.rendezvous.b"]) == b""
    agent.leave()
    agent = world.client()
    agent.ask(Query.SET, b"/torch.rendezvous.b", b"1")
    assert waiting.heard() == WAITED, "the waiting client named the job, so it was kept"
