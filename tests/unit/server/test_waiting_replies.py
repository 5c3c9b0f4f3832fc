"""Replies that wait for clients who read slowly: each is bounded, and all together, where every value counts once."""

from __future__ import annotations

from typing import Any

import pytest

from asyncdist_server.engine.replies import FREED_PART, Unsaid

EACH = 4000
LIMIT = 8 * FREED_PART * 100


class Client:
    def __init__(self, unsaid: Unsaid) -> None:
        self.unsaid = unsaid
        self.values: list[Any] = []
        self.reply_bytes = 0
        self.reason = ""

    def waiting_values(self) -> list[Any]:
        return self.values

    def drop(self, reason: str) -> None:
        self.reason = reason

    def holds(self, value: Any, size: int) -> None:
        self.values.append(value)
        self.reply_bytes += size
        if not self.reason:
            self.unsaid.note(self, self)


def test_one_may_have_so_much_and_no_more() -> None:
    client = Client(Unsaid(EACH, LIMIT))
    client.holds(bytes(EACH), EACH)
    assert not client.reason
    client.holds(b"1", 1)
    assert "it alone" in client.reason


def test_all_may_have_so_much_and_beyond_it_who_has_most_is_cut_off() -> None:
    unsaid = Unsaid(EACH, LIMIT)
    clients = [Client(unsaid) for _ in range(LIMIT // 100)]
    for number, client in enumerate(clients):
        client.holds(b"%099d " % number, 100)
    assert unsaid.count() == LIMIT
    assert not any(client.reason for client in clients)
    clients[3].holds(bytes(200), 200)
    assert "all clients" in clients[3].reason
    assert unsaid.count() <= LIMIT - LIMIT // FREED_PART
    cut = sum(bool(client.reason) for client in clients)
    assert cut == LIMIT // FREED_PART // 100
    clients[4 + cut].holds(b"1", 1)
    assert sum(bool(client.reason) for client in clients) == cut  # there is room again


def test_many_are_cut_off_without_counting_after_each(monkeypatch: pytest.MonkeyPatch) -> None:
    unsaid = Unsaid(EACH, LIMIT)
    clients = [Client(unsaid) for _ in range(LIMIT // 100 + 1)]
    counted: list[int] = []
    count = Unsaid.count
    monkeypatch.setattr(Unsaid, "count", lambda self: counted.append(count(self)) or counted[-1])
    for number, client in enumerate(clients):
        client.holds(b"%099d " % number, 100)
    assert sum(bool(client.reason) for client in clients) == LIMIT // FREED_PART // 100 + 1
    assert len(counted) == 2


def test_values_of_who_is_cut_off_are_not_free_while_others_wait_for_them() -> None:
    unsaid = Unsaid(EACH, LIMIT)
    shared = [bytes(EACH // 4) for _ in range(3)]
    heavy = [Client(unsaid) for _ in range(5)]
    for client in heavy:
        for value in shared:
            client.holds(value, len(value))
    light = [Client(unsaid) for _ in range(LIMIT // 100)]
    for number, client in enumerate(light):
        client.holds(b"%099d " % number, 100)
    assert all(client.reason for client in heavy)
    assert LIMIT - LIMIT // FREED_PART - EACH <= unsaid.count() <= LIMIT


def test_a_value_that_many_wait_for_counts_once() -> None:
    unsaid = Unsaid(EACH, LIMIT)
    value, other = bytes(EACH // 2), bytes(10)
    clients = [Client(unsaid) for _ in range(1000)]
    for client in clients:
        client.holds((1, [value, (2, other)]), EACH // 2)
    assert unsaid.count() == EACH // 2 + 10
    assert not any(client.reason for client in clients)


def test_a_value_that_one_waits_for_many_times_counts_once() -> None:
    client = Client(Unsaid(EACH, LIMIT))
    value = bytes(EACH)
    for _ in range(10):
        client.holds(value, EACH)
    assert not client.reason
    client.holds(b"1", 1)
    assert "it alone" in client.reason


def test_who_is_gone_or_has_been_told_counts_no_more() -> None:
    unsaid = Unsaid(EACH, LIMIT)
    for _ in range(100):
        client = Client(unsaid)
        client.holds(bytes(EACH), EACH)
        unsaid.forget(client)
        assert not client.reason
    assert unsaid.count() == 0
