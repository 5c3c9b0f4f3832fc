"""What `doctor --network` says of documents made by hand: who cannot reach whom, why, and what to change."""

from __future__ import annotations

from typing import Any

import pytest

from asyncdist.inspect.dumps import FORMAT, VERSION
from asyncdist.inspect.job import Job, checked
from asyncdist.inspect.network import Network

ETH = "10.0.0."


def rank(number: int, *peers: dict[str, Any], host: int | None = None, **more: Any) -> dict[str, Any]:
    """A rank on a host of its own, `node<number>`, or on that host."""
    host = number if host is None else host
    look = {"host_id": f"id{host}", "transport": "auto", "ports": "", "peers": list(peers)}
    look["listens"] = [{"ip": f"{ETH}{host}", "port": 4000 + number}]
    look["interfaces"] = [{"name": "lo", "ip": "127.0.0.1"}, {"name": "eth0", "ip": f"{ETH}{host}"}]
    found = {"format": FORMAT, "version": VERSION, "rank": number, "time": 1.0, "host": f"node{host}"}
    return dict(checked({**found, "network": look | more}))


def peer(number: int, *dials: float | str, host: int | None = None, why: str = "", over: str = "") -> dict[str, Any]:
    """What a rank has found of another one: a time, or an error, by address."""
    host = number if host is None else host
    to = [f"tcp {ip}{host}:{4000 + number}" for ip in (ETH, "10.1.0.")]
    told = [
        {"to": to[place], **({"error": dial} if isinstance(dial, str) else {"rtt_s": dial})}
        for place, dial in enumerate(dials)
    ]
    link = {"state": "open", "over": over, "sent": 0, "received": 0, "last_error": ""}
    return {"rank": number, "why": why, "dials": told, **link}


def network(*documents: dict[str, Any], size: int = 0) -> Network:
    return Network(Job(documents, size))


def sentences(*documents: dict[str, Any], size: int = 0) -> list[tuple[str, str]]:
    return [(one.kind, one.sentence) for one in network(*documents, size=size).problems()]


def test_where_all_reach_each_other_nothing_is_wrong() -> None:
    found = network(rank(0, peer(1, 2e-5, over="tcp 10.0.0.1:4001")), rank(1, peer(0, 4e-3)))
    assert found.problems() == []
    assert found.summary() == (
        "2 of 2 pairs of ranks that were tried reach each other; a round trip takes 2.01 ms (median), at most 4 ms, "
        "rank 1 to rank 0."
    )
    assert found.cell([0], [1]) == "20 us, tcp"
    assert found.cell([0], [0]) == ""


FIREWALL = (
    "Rank 0 (node0 10.0.0.0) cannot reach rank 1 (node1 10.0.0.1) at tcp 10.0.0.1:4001: nothing answers, as where a "
    "firewall drops what comes, or the address is of another network. Rank 1 reaches rank 0, so only one direction is "
    "closed. "
)


@pytest.mark.parametrize(
    ("more", "advice"),
    [
        ({}, "Let TCP ports of any number (ASYNCDIST_PORT_RANGE sets a range) through to rank 1's host."),
        ({"ports": "4000-4010"}, "Let TCP ports 4000-4010 through to rank 1's host."),
    ],
)
def test_one_direction_that_is_closed_is_named_with_the_ports(more: dict[str, Any], advice: str) -> None:
    ((kind, said),) = sentences(rank(0, peer(1, "ETIMEDOUT")), rank(1, peer(0, 1e-4), **more))
    assert kind == "unreachable"
    assert said.startswith(FIREWALL + advice)
    assert said.endswith("Where others reach rank 1 by another address (NAT), ASYNCDIST_ADVERTISE names it.")


def test_an_interface_that_might_do_is_named() -> None:
    other = [{"name": "docker0", "ip": f"{ETH}1"}, {"name": "eth1", "ip": "192.168.0.7"}]
    ((_, said),) = sentences(rank(0, peer(1, "EHOSTUNREACH")), rank(1, peer(0, 1e-4), interfaces=other))
    assert "no route leads to it" in said
    assert "another interface, by ASYNCDIST_SOCKET_IFNAME: it has eth1 (192.168.0.7)." in said


def test_an_address_that_is_the_dialers_own_is_told_as_that() -> None:
    bridge = [{"name": "docker0", "ip": f"{ETH}1"}]
    ((_, said),) = sentences(rank(0, peer(1, "ECONNREFUSED"), interfaces=bridge), rank(1, peer(0, 1e-4)))
    assert "That is an address of rank 0's own host, too (docker0)" in said
    assert "through to" not in said


def test_a_rank_that_advertises_loopback_only_is_told_in_its_own_words() -> None:
    ((_, said),) = sentences(rank(0, peer(1, why="it is on another host and advertises only loopback")), rank(1))[:1]
    assert said.startswith("Rank 0 (node0 10.0.0.0) cannot reach rank 1 (node1 10.0.0.1): it is on another host")


def test_pairs_of_the_same_hosts_have_one_sentence() -> None:
    across = [peer(2, "ETIMEDOUT", host=1), peer(3, "ETIMEDOUT", host=1)]
    back = [peer(0, 1e-4, host=0), peer(1, 1e-4, host=0)]
    looks = [rank(0, *across, host=0), rank(1, *across, host=0), rank(2, *back, host=1), rank(3, *back, host=1)]
    ((_, said),) = sentences(*looks)
    assert said.endswith("Pairs of ranks that fail so, to that host: 4.")
    assert network(*looks).problems()[0].ranks == (0, 1, 2, 3)
    assert network(*looks).cell([0, 1], [2, 3]) == "4 of 4: ETIMEDOUT"


def test_some_of_several_addresses_are_another_problem() -> None:
    ((kind, said),) = sentences(rank(0, peer(1, 1e-4, "ETIMEDOUT")), rank(1, peer(0, 1e-4)))
    assert kind == "partly"
    assert said.startswith(
        "Rank 0 (node0 10.0.0.0) reaches in part only rank 1 (node1 10.0.0.1) at tcp 10.1.0.1:4001: "
    )


def test_ranks_of_one_host_need_no_tcp() -> None:
    assert sentences(rank(0, peer(1, 1e-6, "ETIMEDOUT"), host=0), rank(1, peer(0, 1e-6), host=0)) == []


def test_who_has_ended_is_no_matter_of_the_network() -> None:
    gone = {"rank": 1, "state": "gone", "host": "node1"}
    assert sentences(rank(0, peer(1, "ECONNREFUSED")), gone) == []


def test_who_has_not_joined_or_does_not_answer_is_named() -> None:
    absent, silent = {"rank": 1, "state": "absent"}, {"rank": 2, "state": "silent", "why": "no answer within 3.5 s"}
    found = sentences(rank(0), absent, silent)
    assert [kind for kind, _ in found] == ["absent", "unknown"]
    assert found[0][1].startswith("Rank 1 did not join: ")
    assert found[1][1].startswith("Rank 2 did not say whom they reach: no answer within 3.5 s. Once all")
    joining = {"rank": 0, "state": "joining", "why": "it waits for other ranks to join"}
    assert sentences(joining, absent)[0][1].startswith("Rank 0 did not say whom they reach: it waits for other ranks")


@pytest.mark.parametrize("rate", [9e6, 11e6])
def test_a_slow_link_is_named(rate: float) -> None:
    """Of three hosts one has two thirds of all links."""
    speeds = {(0, 1): 1e8, (1, 0): 1e8, (0, 2): rate, (2, 0): rate, (1, 2): rate, (2, 1): rate}
    looks = [rank(number, *(peer(each, 1e-4) for each in range(3) if each != number)) for number in range(3)]
    for (one, other), speed in speeds.items():
        looks[other]["network"].setdefault("speeds", {})[one] = {"bytes_per_s": speed}
    found = network(*looks)
    if rate > 1e7:
        assert found.problems() == []
        return
    (problem,) = found.problems()
    assert (problem.kind, problem.ranks) == ("slow", (0, 1, 2))
    assert (
        "carry 95.37 MiB/s or more, but slow are node0 10.0.0.0 to node2 10.0.0.2 (8.583 MiB/s); " in problem.sentence
    )
    assert found.cell([0], [1]) == "100 us, 95.37 MiB/s"


def test_hosts_of_one_name_are_told_by_address() -> None:
    looks = [rank(number, peer(1 - number, "ETIMEDOUT")) | {"host": "vm"} for number in (0, 1)]
    assert sentences(*looks)[0][1].startswith("Rank 0 (vm 10.0.0.0) cannot reach rank 1 (vm 10.0.0.1) at ")


@pytest.mark.parametrize(
    "odd",
    [
        7,
        [],
        {"peers": 1},
        {"peers": [1]},
        {"peers": [{"rank": 1}]},
        {"peers": [peer(1, 1e-4) | {"dials": [{"to": 1}]}]},
        {"peers": [peer(1, 1e-4) | {"dials": [{"to": "x", "rtt_s": float("inf")}]}]},
        {"peers": [peer(1, 1e-4) | {"rank": "1"}]},
        {"interfaces": [{"name": "x"}]},
        {"listens": [{"ip": 1, "port": 2}]},
        {"bytes_per_s": "fast"},
    ],
)
def test_a_hostile_look_is_left_out(odd: Any) -> None:
    document = checked({"format": FORMAT, "version": VERSION, "rank": 0, "time": 1.0, "network": odd})
    assert "network" not in document


def test_speeds_are_no_words_of_ranks() -> None:
    document = checked({"format": FORMAT, "version": VERSION, "rank": 0, "time": 1.0, "network": {"speeds": 7}})
    assert document["network"] == {}


def test_what_is_no_rank_or_says_nothing_breaks_nothing() -> None:
    odd = [peer(99, 1e-4), peer(-1, "E"), peer(0, "E"), peer(1), peer(1, "", why="\x1b[31m")]
    found = network(rank(0, *odd), {"rank": 1, "state": "silent"}, dict(rank(2)) | {"network": {"peers": odd}})
    assert found.problems()
    assert found.summary()
    assert found.report()
    assert [found.cell([one], [other]) for one in range(3) for other in range(3)]
