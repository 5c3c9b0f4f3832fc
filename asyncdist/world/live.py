"""Running jobs, asked from outside: one document of each rank, as a dump has it, or why there is none.

What a live document has besides `inspect.dumps.document`: `loop_turns`, whether its event loop turned when it was
asked; `loop_late`, the seconds that this took, or takes since it was asked first; `loop_cpu`, of a loop that does not
turn, the seconds that its thread computed meanwhile; `job`; and `world` (id, name and size). That of a rank which
says nothing has `state` (`joining`, `absent`, `leaving`, `left`, `gone`, `stopped`, `silent`, `refused`) and `why`, and
no entries.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from asyncdist.concurrency.trace import info
from asyncdist.inspect.ask import MAX_ANSWERS_BYTES, Answer, EndpointAddress, ask_all, endpoints_here, silent_rank
from asyncdist.inspect.endpoint import ALL, NETWORK, SPEED, SPEEDS, WAITS, name_of
from asyncdist.inspect.job import Document, Job
from asyncdist.inspect.why import AFTER_S, Why
from asyncdist.launch.rendezvous.job_store import LAUNCHERS_NAMESPACE
from asyncdist.store import TCPStore
from asyncdist.world.inspection import FoundWorld, endpoint_of, worlds_of
from asyncdist.world.network import advertised

MAX_JOBS: Final = 64
"""Namespaces of a store that are looked at where none is named."""
MOST_RANKS: Final = 16
"""Ranks that a rank asks, about one operation: all may ask at that moment."""
ROUNDS: Final = 32
"""Of measuring: some seconds on a network of 100 Mbit/s."""
NOBODY: Final = EndpointAddress("", 0)


@dataclass
class LiveWorld:
    """One world of a job, as it was when it was asked."""

    job: str
    """ASYNCDIST_JOB_ID of its ranks, which is the namespace of its keys; empty for none."""
    name: str
    """The `group_name` of its `init_process_group`."""
    size: int
    documents: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By rank. From a store all ranks are there, from a host those that run on it."""


def title(job: str, world: str) -> str:
    """`job train.0, group default`, or `group default`."""
    return f"job {job}, group {world}" if job else f"group {world}"


async def jobs_of(observer: TCPStore) -> list[str]:
    """The namespaces of a store that are jobs'. Raises DistError."""
    named = [one.name for one in await observer.namespaces() if one.keys]
    return [name for name in named if name != LAUNCHERS_NAMESPACE][:MAX_JOBS]


async def asked_by_store(
    store: TCPStore, job: str, group: str, question: bytes = ALL, most_bytes: int = MAX_ANSWERS_BYTES
) -> list[LiveWorld]:
    """Ask the ranks of a job's worlds, whose keys are in `store`; `group` names one of them. Raises DistError."""
    known = [world for world in await worlds_of(store) if group in ("", world.name)]
    endpoints = [endpoint for world in known for endpoint in world.endpoints.values()]
    answers = await ask_all(endpoints, store.dialer.token, question, most_bytes=most_bytes)
    found = [_world(job, world, answers) for world in known]
    for world, live in zip(known, found, strict=True):
        for rank, address in world.addresses.items() if question in (NETWORK, SPEEDS) else ():
            live.documents[rank].setdefault("network", advertised(address))
        if question == SPEEDS:
            await measure_speeds(live, world.endpoints, store.dialer.token)
    return found


async def measure_speeds(world: LiveWorld, endpoints: Mapping[int, EndpointAddress], token: str | None) -> None:
    """Have a rank of each host fetch a sample from one of each other host: `speeds` of its `network`, by that rank.

    In each of the `ROUNDS` a host sends to one other, and receives from one. Of many hosts not all pairs have theirs.
    """
    hosts: dict[str, int] = {}
    for rank, document in world.documents.items():
        look = document.get("network", {})
        if "peers" in look and rank in endpoints and endpoints[rank].tcp:
            hosts.setdefault(look.get("host_id", ""), rank)
    ranks = list(hosts.values())
    for shift in range(1, min(len(ranks), ROUNDS + 1)):
        pairs = list(zip(ranks, ranks[shift:] + ranks[:shift], strict=True))
        questions = [SPEED + b"%s %d" % (ip.encode(), port) for _, r in pairs for ip, port in endpoints[r].tcp[:1]]
        asked = (ask_all([endpoints[rank]], token, text) for (rank, _), text in zip(pairs, questions, strict=True))
        for (rank, other), answers in zip(pairs, await asyncio.gather(*asked), strict=True):
            for one in answers[endpoints[rank]].documents:
                if one["rank"] == rank and one["world"]["name"] == world.name:
                    world.documents[rank]["network"].setdefault("speeds", {})[other] = one.get("network", {})


def _world(job: str, known: FoundWorld, answers: Mapping[EndpointAddress, Answer]) -> LiveWorld:
    found = LiveWorld(job, known.name, known.size)
    for rank in range(known.size):
        endpoint = known.endpoints.get(rank)
        if endpoint is None:
            found.documents[rank] = silent_rank(rank, NOBODY, Answer((), "absent", "it has not joined"))
            continue
        answer, ended = answers[endpoint], known.ended.get(rank, "")
        own = [one for one in answer.documents if one.get("rank") == rank and one["world"]["name"] == known.name]
        if own:
            found.documents[rank] = own[0]
            continue
        if ended == "left":
            answer = Answer((), "left", "it has closed its group")
        elif ended and answer.state in ("gone", "silent"):
            answer = Answer((), "gone", "its connection to the store has ended")
        elif not answer.state and known.formed:
            answer = Answer((), "leaving", "it closes its group")
        elif not answer.state:
            answer = Answer((), "joining", "it waits for other ranks to join")
        found.documents[rank] = silent_rank(rank, endpoint, answer)
    return found


async def asked_on_this_host(question: bytes = ALL) -> list[LiveWorld]:
    """Ask the ranks of this user's processes on this host."""
    endpoints = endpoints_here(os.environ.get("ASYNCDIST_SOCKET_DIR", "").strip())
    answers = await ask_all(endpoints, None, question)
    worlds: dict[str, LiveWorld] = {}
    for document in (document for answer in answers.values() for document in answer.documents):
        world = document["world"]
        found = worlds.setdefault(world["id"], LiveWorld(document["job"], world["name"], world["size"]))
        found.documents[document["rank"]] = document
    for endpoint, answer in answers.items():
        if answer.state not in ("", "gone"):
            for world in worlds.values():
                rank = _rank_of(endpoint, world)
                if rank is not None and rank not in world.documents:
                    world.documents[rank] = silent_rank(rank, endpoint, answer)
    return list(worlds.values())


def _rank_of(endpoint: EndpointAddress, world: LiveWorld) -> int | None:
    """The rank of that world which is to be asked there, by the name of its socket; None if there is none."""
    for rank in range(world.size):
        if name_of(world.job, world.name, rank).encode() in endpoint.unix:
            return rank
    return None


async def look(
    infos: Callable[[Sequence[int]], Awaitable[list[dict[str, Any]]]],
    token: str | None,
    ranks: Collection[int],
    limit_s: float,
    about: Document | None = None,
) -> Why | None:
    """Ask these ranks of one world what they do; with `about`, an operation, also all whom they wait for in turn.

    It ends within `limit_s`, with what is known by then; None for nothing. `infos` are what ranks have told the store.
    """
    found: Why | None = None
    said: dict[int, Document] = {}
    try:
        async with asyncio.timeout(limit_s):
            while ranks and len(said) < MOST_RANKS:
                some = sorted(ranks)[:MOST_RANKS]
                endpoints = dict(zip(some, map(endpoint_of, await infos(some)), strict=True))
                answers = await ask_all(endpoints.values(), token, WAITS, limit_s / 2)
                for rank, endpoint in endpoints.items():
                    answer = answers[endpoint]
                    own = [one for one in answer.documents if one["rank"] == rank]
                    silent = answer if answer.state else Answer((), "leaving")
                    said[rank] = own[0] if own else silent_rank(rank, endpoint, silent)
                found = Why(Job(said.values()), AFTER_S if about is None else 0.0, about)
                ranks = () if about is None else found.waits.needed() - said.keys()
    except Exception as error:  # who asks has other worries
        info("cannot ask what ranks %s do: %r", sorted(ranks), error)
    return found
