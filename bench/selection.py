"""Which subjects, candidates, sizes and operations a command line asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench import (
    all_reduce,
    collectives,
    concurrency,
    durable,
    loop_stall,
    many_connections,
    objects,
    overlap,
    p2p,
    rendezvous,
    store,
    stress,
    torch_store,
)
from bench.candidates import PEERS
from bench.cases import Case
from bench.model import Candidate, Profile, Subject
from bench.operations import OPERATIONS

SUBJECTS: Mapping[str, Subject] = {
    subject.name: subject
    for subject in (
        p2p.SUBJECT,
        all_reduce.SUBJECT,
        collectives.SUBJECT,
        objects.SUBJECT,
        concurrency.SUBJECT,
        loop_stall.SUBJECT,
        store.SUBJECT,
        torch_store.SUBJECT,
        many_connections.SUBJECT,
        durable.SUBJECT,
        rendezvous.SUBJECT,
        overlap.SUBJECT,
        stress.SUBJECT,
    )
}
FLOORS = "floors"
ANY_RANKS = frozenset({"all_reduce", "collectives", "concurrency", "objects", "stall"})
"""Subjects whose number of ranks may be chosen."""
TRANSPORT_NAMES = ("shm", "unix", "tcp")


@dataclass(frozen=True)
class Selection:
    """What is asked for; None means everything."""

    only: frozenset[str] | None = None
    transports: frozenset[str] | None = None
    peers: frozenset[str] | None = None
    sizes: tuple[int, ...] | None = None
    operations: tuple[str, ...] | None = None

    def keeps(self, candidate: Candidate) -> bool:
        if self.only is not None and candidate.name not in self.only:
            return False
        transport = candidate.environment.get("ASYNCDIST_TRANSPORT")
        if candidate.own:
            named = "shm" if transport == "auto" else transport
            return self.transports is None or named is None or named in self.transports
        group = next((name for name, members in PEERS.items() if candidate in members), None)
        return self.peers is None or group is None or group in self.peers

    def narrow(self, subject: Subject) -> Subject:
        """Return the subject with no more candidates and cases than asked for."""
        kept = tuple(candidate for candidate in subject.candidates if self.keeps(candidate))
        narrowed = dataclasses.replace(subject, candidates=kept)
        if self.sizes is None and self.operations is None:
            return narrowed
        if subject is collectives.SUBJECT:
            return dataclasses.replace(narrowed, cases=self._collectives)
        if subject is p2p.SUBJECT:
            return dataclasses.replace(narrowed, cases=self._messages)
        if subject is all_reduce.SUBJECT and self.sizes is not None:
            sizes = self.sizes
            return dataclasses.replace(narrowed, cases=lambda profile: all_reduce.cases(profile, sizes))
        return narrowed

    def _collectives(self, profile: Profile) -> Sequence[Case]:
        chosen = [name for name in OPERATIONS if self.operations is None or name in self.operations]
        return collectives.cases(profile, chosen, self.sizes or collectives.SIZES)

    def _messages(self, profile: Profile) -> Sequence[Case]:
        chosen = [name for name in p2p.SIZES if self.operations is None or name in self.operations]
        return [p2p.case(name, nbytes, profile) for name in chosen for nbytes in self.sizes or p2p.SIZES[name]]


def subjects(names: Sequence[str], selection: Selection) -> list[Subject]:
    """Return the subjects named (all by default; ``floors``: the bare sockets of two), narrowed."""
    found = []
    for name in names or tuple(SUBJECTS):
        if name == FLOORS:
            bare = Selection(only=frozenset({"floor", "floor unix"}), sizes=selection.sizes)
            found += [bare.narrow(SUBJECTS[other]) for other in ("p2p", "all_reduce")]
        else:
            found.append(selection.narrow(SUBJECTS[name]))
    return found
