"""What many jobs leave when they end at the same moment is found with one look at all keys, not with one for each."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from engine_user import User, pass_time
from torch_wire_kit import PORT, World

from asyncdist_server.engine.namespace import TORCH_PREFIX, Namespace, begins_with_any
from asyncdist_server.engine.state import StoreState
from asyncdist_server.torch.namespaces import MAX_JOBS
from asyncdist_server.torch.wire import Query
from asyncdist_server.wire import messages as m

JOBS = 20


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The namespaces in which all keys are looked at, in that order."""
    looked: list[str] = []
    clear = StoreState.clear

    def counted(state: StoreState, namespace: Namespace, *which: Any) -> int:
        looked.append(namespace.name)
        return clear(state, namespace, *which)

    monkeypatch.setattr(StoreState, "clear", counted)
    return looked


def test_held_prefixes(users: list[User], looks: list[str]) -> None:
    owner, other = users[0], User(users[0].engine, b"other", "elsewhere")
    for user in (owner, other):
        user.ask(m.GRANT, 1, 1000, False)
        user.ask(m.SET, b"stays", b"")
        for number in range(JOBS):
            user.ask(m.HOLD, b"job/%d/" % number, 1, 10 + number)
            user.ask(m.SET, b"job/%d/k" % number, b"")
            user.ask(m.QUEUE_PUSH, b"job/%d/q" % number, b"")
    pass_time([*users, other], 1)
    assert looks == []
    pass_time([*users, other], 1)
    assert sorted(looks) == ["elsewhere", "job"]
    for user in (owner, other):
        assert user.ask(m.LIST_KEYS, b"", b"")[1] == [b"stays"]
        assert user.ask(m.QUEUE_LEN, b"job/3/q") == 0


def test_a_namespace_of_which_nothing_is_left_goes_too(users: list[User]) -> None:
    other = User(users[0].engine, b"other", "elsewhere")
    other.ask(m.GRANT, 1, 1000, False)
    other.ask(m.HOLD, b"", 1, 0)
    other.ask(m.SET, b"k", b"")
    other.leave()
    assert "elsewhere" in other.engine.namespaces
    pass_time(users, 1)
    assert "elsewhere" not in other.engine.namespaces


def test_jobs_of_torch(looks: list[str]) -> None:
    world = World(linger_s=10.0)
    bystander, *agents = (world.client() for _ in range(JOBS + 1))
    bystander.ask(Query.SET, b"/k", b"1")
    for number, agent in enumerate(agents):
        agent.ask(Query.SET, b"/torch.rendezvous.%d" % number, b"1")
        agent.ask(Query.SET, b"/torch.rendezvous.%d.0/k" % number, b"1")
    del agents[10]  # whose keys begin like those of 1
    for agent in agents:
        agent.leave()
    world.advance(10.0)
    assert len(looks) == 1
    left = world.engine.namespaces[f"{TORCH_PREFIX}{PORT}"].values
    assert sorted(left) == [b"/k", b"/torch.rendezvous.10", b"/torch.rendezvous.10.0/k"]


def test_all_jobs_of_a_torch_client(looks: list[str]) -> None:
    world = World()
    bystander, agent = world.client(), world.client()
    bystander.ask(Query.SET, b"/k", b"1")
    for number in range(MAX_JOBS):
        agent.ask(Query.SET, b"/asyncdist.job.%d/k" % number, b"1")
    agent.leave()
    assert len(looks) == 1
    assert sorted(world.engine.namespaces[f"{TORCH_PREFIX}{PORT}"].values) == [b"/k"]
    bystander.leave()
    assert len(looks) == 2
    assert not world.engine.namespaces


def test_a_key_begins_with_one_of_several_prefixes_or_does_not() -> None:
    words = [bytes(word) for length in range(4) for word in itertools.product(b"\0a\xff", repeat=length)]
    short = [word for word in words if len(word) < 3]
    for prefixes in itertools.chain.from_iterable(itertools.combinations(short, count) for count in (1, 2, 3)):
        begins = begins_with_any(list(reversed(prefixes)))
        assert [begins(word) for word in words] == [word.startswith(prefixes) for word in words], prefixes
