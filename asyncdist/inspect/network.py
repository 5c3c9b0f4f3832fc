"""Which ranks reach which, and what to change where they do not: of documents with `network` (see `world.network`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from asyncdist.arrays.host import human_bytes
from asyncdist.concurrency.integers import spell_ranks
from asyncdist.inspect.job import Document, Job

SLOW: Final = 10
"""A link that carries so many times less than others is not as it was meant to be."""
NAMED: Final = 4
"""Slow links that the sentence names."""
_MEANINGS: Final = {
    "ETIMEDOUT": "nothing answers, as where a firewall drops what comes, or the address is of another network",
    "ECONNREFUSED": "it is refused: nothing listens at that address, which may be another host's, or a firewall "
    "refuses it",
    "EHOSTUNREACH": "no host has that address there, no route leads to it, or a firewall refuses it",
    "ENETUNREACH": "no route leads to that network",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """`kind` is `unreachable`, `partly`, `slow`, `absent` or `unknown`; `ranks` are those it is about."""

    kind: str
    sentence: str
    ranks: tuple[int, ...]


class Network:
    """See the module. Pairs are of the rank that has dialed, and the rank that it has dialed."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.looks: dict[int, Document] = {}
        self.hosts: dict[str, list[int]] = defaultdict(list)
        """The ranks of each host, by its name and the first address that they advertise."""
        self.pairs: dict[tuple[int, int], Document] = {}
        self.rtts: dict[tuple[int, int], float] = {}
        """Seconds, of those that reach each other."""
        self.speeds: dict[tuple[int, int], float] = {}
        """Bytes a second from one rank to another."""
        self.places: dict[int, str] = {}
        for rank, document in job.documents.items():
            look = self.looks[rank] = document.get("network", {})
            ips = [each["ip"] for each in look.get("listens", ())]
            self.places[rank] = " ".join(filter(None, (str(document.get("host") or ""), *ips[:1])))
            self.hosts[self.places[rank]].append(rank)
            for peer in look.get("peers", ()):
                if (other := peer["rank"]) in job.documents:
                    self.pairs[rank, other] = peer
                    if rtts := [dial["rtt_s"] for dial in peer["dials"] if "rtt_s" in dial]:
                        self.rtts[rank, other] = min(rtts)
            rates = look.get("speeds", {}).items()
            self.speeds |= {(other, rank): rate["bytes_per_s"] for other, rate in rates if "bytes_per_s" in rate}

    def problems(self) -> list[Problem]:
        """The worst first; empty where all is well."""
        return [*self._unreachable(), *self._slow(), *self._unheard()]

    def summary(self) -> str:
        """One sentence of what is well."""
        text = f"{len(self.rtts)} of {len(self.pairs)} pairs of ranks that were tried reach each other"
        if self.rtts:
            one, other = max(self.rtts, key=self.rtts.__getitem__)
            text += f"; a round trip takes {_time(median(self.rtts.values()))} (median), at most "
            text += f"{_time(self.rtts[one, other])}, rank {one} to rank {other}"
        return f"{text}."

    def _unreachable(self) -> Iterator[Problem]:
        """A sentence for each host that is not reached, and each way in which that fails."""
        alike: dict[Any, list[tuple[int, int]]] = defaultdict(list)
        for (one, other), peer in self.pairs.items():
            wholly = (one, other) not in self.rtts
            errors = tuple(sorted({dial["error"] for dial in peer["dials"] if "error" in dial}))
            together = self.looks[one].get("host_id") == self.looks[other].get("host_id")  # one way suffices there
            ended = self._job.missing.get(other) in ("gone", "left", "leaving")
            if (errors or peer["why"]) and (wholly or not together) and not ended:
                alike[not wholly, errors, self.places[other]].append((one, other))
        for (partly, errors, _), pairs in sorted(alike.items(), key=lambda each: each[0][0]):
            one, other = pairs[0]
            text = f"Rank {one} ({self.places[one]}) {'reaches in part only' if partly else 'cannot reach'} "
            text += f"rank {other} ({self.places[other]})"
            if why := self.pairs[pairs[0]]["why"]:
                text += f": {why}."
            else:
                failed = [dial["to"] for dial in self.pairs[pairs[0]]["dials"] if "error" in dial]
                meaning = "; ".join(_MEANINGS.get(error, error) for error in errors)
                text += f" at {' and '.join(failed)}: {meaning}."
                if not partly and (other, one) in self.rtts:
                    text += f" Rank {other} reaches rank {one}, so only one direction is closed."
                text += self._advice(one, other)
            if len(pairs) > 1:
                text += f" Pairs of ranks that fail so, to that host: {len(pairs)}."
            ranks = tuple(sorted({rank for pair in pairs for rank in pair}))
            yield Problem("partly" if partly else "unreachable", text, ranks)

    def _advice(self, one: int, other: int) -> str:
        here, there = self.looks[one], self.looks[other]
        listens = {each["ip"] for each in there.get("listens", ())}
        own = [each["name"] for each in here.get("interfaces", ()) if each["ip"] in listens]
        spare = [f"{each['name']} ({each['ip']})" for each in there.get("interfaces", ()) if each["ip"] not in listens]
        if own and here.get("host_id") != there.get("host_id"):
            text = f" That is an address of rank {one}'s own host, too ({own[0]}), as of bridges and containers."
        else:
            ports = there.get("ports") or "of any number (ASYNCDIST_PORT_RANGE sets a range)"
            text = f" Let TCP ports {ports} through to rank {other}'s host."
        if spare := [each for each in spare if not each.startswith("lo ")]:
            text += f" Or have rank {other} listen on another interface, by ASYNCDIST_SOCKET_IFNAME: it has "
            text += f"{' and '.join(spare)}."
        return f"{text} Where others reach rank {other} by another address (NAT), ASYNCDIST_ADVERTISE names it."

    def _slow(self) -> Iterator[Problem]:
        """One host with a bad cable has most links of a small job: so it is no median that tells what is usual."""
        speeds = sorted((speed, pair) for pair, speed in self.speeds.items())
        usual = speeds[-1 - (len(speeds) - 1) // 4][0] if speeds else 0
        slow = [(speed, pair) for speed, pair in speeds if speed * SLOW < usual]
        if slow:
            hosts = [(speed, self.places[one], self.places[other]) for speed, (one, other) in slow]
            told = [f"{one} to {other} ({human_bytes(int(speed))}/s)" for speed, one, other in hosts]
            more = [f"{len(told) - NAMED} more"] if len(told) > NAMED else []
            text = f"A quarter of the links carry {human_bytes(int(usual))}/s or more, but slow are "
            text += f"{'; '.join(told[:NAMED] + more)}. Look at cables, negotiated speeds and what else uses them, or "
            text += "name other interfaces by ASYNCDIST_SOCKET_IFNAME."
            yield Problem("slow", text, tuple(sorted({rank for _, pair in slow for rank in pair})))

    def _unheard(self) -> Iterator[Problem]:
        """Who has not joined, and who does not say whom it reaches."""
        alike: dict[str, list[int]] = defaultdict(list)
        for rank, document in self._job.documents.items():
            state = document.get("state", "")
            if "peers" not in self.looks[rank] and state not in ("left", "gone", "leaving"):
                why = str(document.get("why", "its messages go by MPI, or its asyncdist is an older one"))
                alike["absent" if state == "absent" else why].append(rank)
        for why, ranks in alike.items():
            who = f"Rank{'s' if ranks[1:] else ''} {spell_ranks(ranks)}"
            if why == "absent":
                text = f"{who} did not join: if started, they do not reach this store. Look at their output, at "
                text += "MASTER_ADDR or ASYNCDIST_STORE, at the store's port and at firewalls."
                yield Problem("absent", text, tuple(ranks))
            else:
                text = f"{who} did not say whom they reach: {why}. Once all have joined, ask on their host, too, where "
                text += "no firewall is between."
                yield Problem("unknown", text, tuple(ranks))

    def cell(self, ones: Sequence[int], others: Sequence[int]) -> str:
        """How ranks of one place reach those of another one, in a few words; empty if none has tried."""
        pairs = [(one, other) for one in ones for other in others if (one, other) in self.pairs]
        if failed := [pair for pair in pairs if pair not in self.rtts]:
            errors = {dial["error"] for pair in failed for dial in self.pairs[pair]["dials"] if "error" in dial}
            text = ", ".join(sorted(errors)) or "no way"
            return text if len(pairs) == 1 else f"{len(failed)} of {len(pairs)}: {text}"
        said = [_time(median(self.rtts[pair] for pair in pairs))] if pairs else []
        said += sorted({self.pairs[pair]["over"].partition(" ")[0] for pair in pairs} - {""})
        speeds = [self.speeds[one, other] for one in ones for other in others if (one, other) in self.speeds]
        return ", ".join([*said, *(f"{human_bytes(int(speed))}/s" for speed in speeds)])

    def report(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {
            "problems": [asdict(problem) for problem in self.problems()],
            "summary": self.summary(),
            "ranks": [{"rank": rank, **look} for rank, look in self.looks.items()],
            "speeds": [{"from": a, "to": b, "bytes_per_s": speed} for (a, b), speed in self.speeds.items()],
        }


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
