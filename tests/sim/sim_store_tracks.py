"""What simulated clients do: each track uses some of the store's verbs and notes what they promise."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from linearizability import REFUSED, UNKNOWN, Operation
from sim_store_client import Asked, SimulatedClient
from sim_store_ledger import Round, Watched

from asyncdist.errors import DistError, LeaseLostError, WatchCompactedError
from asyncdist.store.lease import Lease
from asyncdist.store.watch import Watch

__all__ = ["run_track"]

REGISTERS: Final = ("r0", "r1")
WATCHED: Final = "watched/"


async def run_track(client: SimulatedClient, kind: str) -> None:
    """Do things of one kind until the time of the scenario is over."""
    track = TRACKS[kind]
    while client.now() < client.scenario.duration_s and not client.store._closed:
        await client.pause()
        await track(client)


# ---- keys


async def registers(client: SimulatedClient) -> None:
    """One verb on one of few keys, for the judgement of the whole history of the key."""
    store, dice = client.store, client.dice
    key = dice.choice(REGISTERS)
    value = client.fresh()
    issue: Callable[[], Awaitable[Any]]
    name = dice.choice(("set", "set", "get", "get", "get", "compare_set", "compare_set", "delete", "append", "check"))
    arguments: tuple[bytes, ...] = ()
    if name == "set":
        arguments, issue = (value.encode(),), lambda: store.set(key, value)
    elif name == "get":
        issue = lambda: store.get(key, timeout=0)  # noqa: E731
    elif name == "compare_set":
        expected = dice.choice((client.last_read, b""))
        arguments, issue = (expected, value.encode()), lambda: store.compare_set(key, expected, value)
    elif name == "delete":
        issue = lambda: store.delete_key(key)  # noqa: E731
    elif name == "append":
        arguments, issue = (b"+" + value.encode(),), lambda: store.append(key, b"+" + value.encode())
    else:
        issue = lambda: store.check([key])  # noqa: E731
    operation = client.ledger.history.call(client.name, key, name, *arguments)
    operation.key = (client.incarnation, key)
    asked = await client.ask(
        {"delete": "delete_key"}.get(name, name), issue, limit_s=0.0 if name == "get" else -1.0, cancel=0.03
    )
    end(client, operation, asked)
    if name == "get" and asked.ok:
        client.last_read = asked.value


def end(client: SimulatedClient, operation: Operation, asked: Asked) -> None:
    """Say in the history what an operation was told, and by which incarnation."""
    if asked.ok:
        operation.result = asked.value
    elif operation.name == "get" and asked.outcome == "timeout" and not asked.unanswered:
        operation.result = None
    elif operation.name in ("get", "check") or asked.outcome == "limit":
        client.ledger.history.operations.remove(operation)  # it had no effect, and nothing was told
        return
    else:
        operation.result = UNKNOWN
    if operation.name in ("get", "check"):
        operation.key = (client.incarnation, operation.key[1])  # type: ignore[index]
        told = operation.result
        if isinstance(told, bytes):
            foreign = [part for part in told.decode().split("+") if part and part.split(".")[2] != client.incarnation]
            if foreign:
                client.ledger.problem(f"{client.incarnation} holds {foreign}, meant for another incarnation")
    client.ledger.history.returned(operation)
    assert operation.result is not REFUSED


async def counters(client: SimulatedClient) -> None:
    """Add one."""
    key = client.dice.choice(("n0", "n1"))
    sums = client.ledger.adds[client.incarnation, key]
    sums.append(None)
    place = len(sums) - 1
    asked = await client.ask("add", lambda: client.store.add(key, 1))
    if asked.ok:
        sums[place] = asked.value


async def logs(client: SimulatedClient) -> None:
    """Append some entries at once."""
    key = "log"
    asked_for = []
    for _ in range(client.dice.choice((1, 1, 3))):
        entry = client.fresh()
        entries = client.ledger.appends[client.incarnation, key]
        entries[entry] = False
        asked_for.append((entries, entry, asyncio.ensure_future(append(client, key, entry))))
    for entries, entry, asking in asked_for:
        entries[entry] = (await asking).ok


async def append(client: SimulatedClient, key: str, entry: str) -> Asked:
    return await client.ask("append", lambda: client.store.append(key, entry + ","))


async def pairs(client: SimulatedClient) -> None:
    """Two keys that are always written together are always read together."""
    if client.dice.random() < 0.5:
        value = client.fresh()
        await client.ask("multi_set", lambda: client.store.multi_set(["pair/a", "pair/b"], [value, value]))
        return
    wait_s = client.dice.choice((0.0, 0.2))
    asked = await client.ask(
        "multi_get", lambda: client.store.multi_get(["pair/b", "pair/a"], timeout=wait_s), limit_s=wait_s
    )
    if asked.ok and asked.value[0] != asked.value[1]:
        client.ledger.problem(f"{client.name}: half of a multi_set was read: {asked.value}")


async def flags(client: SimulatedClient) -> None:
    """Wait for keys that somebody sets some time, and set them."""
    number = int(client.now() / max(client.scenario.pace_s * 4, 1.0))
    wanted = [f"flag/{number}", f"flag/{number + 1}"]
    choice = client.dice.random()
    wait_s = client.dice.choice((0.0, 1.0, 8.0))
    if choice < 0.4:
        asked = await client.ask("set", lambda: client.store.set(wanted[0], client.fresh()))
        if asked.ok:
            client.ledger.flags.setdefault((client.incarnation, wanted[0]), client.now())
        return
    called = client.now()
    if choice < 0.7:
        asked = await client.ask("wait", lambda: client.store.wait(wanted, timeout=wait_s), limit_s=wait_s)
        incarnation = client.incarnation
        if asked.ok:
            there = await client.ask("check", lambda: client.store.check(wanted), cancel=0)
            if there.ok and not there.value and client.incarnation == incarnation:
                client.ledger.problem(f"{client.name} waited for {wanted}, and they are not there")
    else:
        wanted = wanted[:1]
        asked = await client.ask("get", lambda: client.store.get(wanted[0], timeout=wait_s), limit_s=wait_s)
    if asked.outcome == "timeout" and asked.refused:
        there_at = max(client.ledger.flags.get((client.incarnation, key), math.inf) for key in wanted)
        if there_at < called + wait_s:
            client.ledger.problem(f"{client.name} was not woken for {wanted}, there since {there_at:.6f} s")


async def queue(client: SimulatedClient) -> None:
    """Push items nobody else pushes, and pop them, waiting, not waiting, or no longer wanting them."""
    ledger, incarnation = client.ledger, client.incarnation
    choice = client.dice.random()
    if choice < 0.45:
        item = client.fresh()
        ledger.pushed[incarnation][item] = False
        asked = await client.ask("queue_push", lambda: client.store.queue_push("queue", item))
        ledger.pushed[incarnation][item] = asked.ok
        return
    if choice < 0.5:
        await client.ask("queue_len", lambda: client.store.queue_len("queue"))
        return
    wait_s = client.dice.choice((0.0, 0.5, 5.0))
    ledger.lost_pops[incarnation] += 1  # as long as nobody knows; a process that is killed takes its item along
    asked = await client.ask(
        "queue_pop",
        lambda: client.store.queue_pop("queue", block=bool(wait_s), timeout=wait_s),
        limit_s=wait_s,
        cancel=0.2,
    )
    if asked.ok:
        ledger.popped[client.incarnation].append((asked.value.decode(), client.now(), client.name))
    if asked.ok or asked.refused:
        ledger.lost_pops[incarnation] -= 1
    else:
        client.unsure_pops.append(incarnation)


# ---- coordination


async def leases(client: SimulatedClient) -> None:
    """Bind keys to leases; keep them for a while."""
    store, dice = client.store, client.dice
    bound = dice.random() < 0.5
    ttl_s = dice.choice((0.5, 4.0, 20.0))
    asked = await client.ask("lease", lambda: store.lease(ttl_s, bound=bound))
    if not asked.ok:
        return
    lease: Lease = asked.value
    client.leases.append((lease, client.incarnation, bound))
    await client.ask("set_leased", lambda: store.set(f"leased/{client.fresh()}", "x", lease=lease))
    if dice.random() < 0.3:
        linger_s = dice.choice((0.0, 5.0))
        await client.ask("hold", lambda: store.hold(f"held/{client.name}/", lease, linger=linger_s))
        await client.ask("set", lambda: store.set(f"held/{client.name}/x", "x"))
    await client.pause(dice.choice((0.1, 1.0, 5.0)))
    if dice.random() < 0.7 and not lease.lost:
        await client.ask("revoke", lease.revoke, limit_s=None)
        client.ledger.outcomes["leases revoked"] += 1
    elif lease.lost:
        client.ledger.outcomes["leases lost"] += 1


async def locks(client: SimulatedClient) -> None:
    """Take a lock, hold it for a while, give it back."""
    name = client.dice.choice(("one", "two"))
    wait_s = client.dice.choice((0.5, 10.0))
    lock = client.store.lock(name, grace=client.dice.choice((0.5, 5.0)), timeout=wait_s)
    called = client.now()
    asked = await client.ask("lock", lock.acquire, limit_s=wait_s)
    if not asked.ok:
        return
    client.ledger.tokens[name].append((called, client.now(), asked.value, client.name))
    client.on_locked(client, name)
    client.locks[name] = (lock, client.incarnation)
    await client.pause(client.dice.choice((0.0, 0.3, 1.0)))
    client.locks.pop(name, None)
    asked = await client.ask("release", lock.release, limit_s=None, cancel=0)
    client.ledger.outcomes["locks lost"] += asked.outcome == "lease lost"


async def watch(client: SimulatedClient) -> None:
    """Watch a prefix for a while; set keys of it; see every change."""
    if client.dice.random() < 0.6:
        await asyncio.gather(*(set_watched(client) for _ in range(client.dice.choice((1, 1, 6)))))
        return
    watching = client.store.watch(WATCHED)
    entered = await client.ask("watch", watching.__aenter__, limit_s=None, cancel=0)
    if not entered.ok:
        await watching.close()
        return
    seen = Watched(client.name, client.incarnation, first=watching.revision, began_at=client.now())
    client.ledger.watched.append(seen)
    reading = asyncio.ensure_future(read_watch(client, watching, seen))
    await client.pause(5)
    called = client.now()
    marker = await set_watched(client)
    until = client.now() + 30
    while marker and not reading.done() and client.now() < until:
        if any(event.value.decode() == marker for event in seen.events):
            seen.caught_up_at = called
            client.ledger.outcomes["watches caught up"] += 1
            break
        await asyncio.sleep(0.2)
    else:
        if marker and not reading.done() and not client.was_blind_since(called):
            client.ledger.problem(f"{client.name} watched and did not see its own {marker} within 30 s")
    await watching.close()
    await reading


async def read_watch(client: SimulatedClient, watching: Watch, seen: Watched) -> None:
    """Note all events, until the watch is closed or ends."""
    try:
        async for event in watching:
            if client.incarnation != seen.incarnation:
                client.ledger.problem(f"{client.name}: a watch went on in another incarnation of the store")
            seen.events.append(event)
            seen.last = event.revision
    except WatchCompactedError:
        client.ledger.outcomes["compacted"] += 1
    except DistError:
        client.ledger.outcomes["watch failed"] += 1


async def set_watched(client: SimulatedClient) -> str:
    """Change a key that may be watched; return the new value if the store has it."""
    value = client.fresh()
    key = WATCHED + client.dice.choice("abc")
    if client.dice.random() < 0.15:
        await client.ask("delete_key", lambda: client.store.delete_key(key))
    incarnation, called = client.incarnation, client.now()
    asked = await client.ask("set", lambda: client.store.set(key, value), cancel=0)
    if asked.ok:
        client.ledger.watched_sets.append((incarnation, value, called, client.now()))
    return value if asked.ok else ""


async def membership(client: SimulatedClient) -> None:
    """Join a job, meet again when somebody comes or goes, leave."""
    job, least, most = client.dice.choice((("one", 1, 3), ("two", 2, 4)))
    name = client.dice.choice((client.fresh(), "trainer"))  # the latter is started again and again, or twice
    wait_s = client.dice.choice((2.0, 20.0))
    asked = await client.ask(
        "join",
        lambda: client.store.join(job, least, most, wait_s, name=name, settle=0.2, grace=1.0),
        limit_s=wait_s + client.scenario.timeout_s,
    )
    if not asked.ok:
        return
    member = asked.value
    last = 0
    for _ in range(client.dice.randrange(4)):
        incarnation = client.incarnation
        told = Round(member.name, member.epoch, member.rank, tuple(member.members), least, most)
        client.ledger.rounds[incarnation, job, member._watch.revision].append(told)
        if member.epoch <= last:
            client.ledger.problem(f"{member.name}: epoch {member.epoch} came after {last}")
        last = member.epoch
        news = asyncio.ensure_future(anext(member))
        await asyncio.wait([news], timeout=client.dice.choice((0.1, 3.0)))
        client.ledger.outcomes["members' news"] += news.done() and not news.exception()
        if not news.done():
            news.cancel()
        await asyncio.wait([news])
        if not news.cancelled() and isinstance(news.exception(), (WatchCompactedError, LeaseLostError, DistError)):
            break
        again = await client.ask("join", lambda: member.rejoin(wait_s), limit_s=wait_s, cancel=0.02)
        if not again.ok:
            break
    await client.ask("leave", member.leave, limit_s=None, cancel=0)


async def questions(client: SimulatedClient) -> None:
    """Verbs that only look."""
    store = client.store
    verbs: list[tuple[str, Callable[[], Awaitable[Any]]]] = [
        ("num_keys", store.num_keys),
        ("list_keys", lambda: store.list_keys("r")),
        ("status", store.status),
        ("waits", store.waits),
    ]
    await client.ask(*client.dice.choice(verbs))


TRACKS: Final[Mapping[str, Callable[[SimulatedClient], Awaitable[None]]]] = {
    "registers": registers,
    "counters": counters,
    "logs": logs,
    "queue": queue,
    "pairs": pairs,
    "flags": flags,
    "leases": leases,
    "locks": locks,
    "watch": watch,
    "membership": membership,
    "questions": questions,
}
