"""Messages of an operation that was refused show nothing, whenever they come."""

from __future__ import annotations

from asyncdist.group.mismatch import DROPPED_KEPT, StrayMessages
from asyncdist.transport.protocol.frame import key_prefix


class Mesh:
    """It has watchers."""

    def __init__(self) -> None:
        self.watchers = {}

    def watch(self, group, watcher):
        self.watchers[group] = watcher


def test_what_comes_late_of_a_refused_operation_is_no_difference() -> None:
    mesh, found = Mesh(), []
    sequences = {0: DROPPED_KEPT + 3}
    evidence = StrayMessages(mesh, 7, set(), sequences, lambda *where: found.append(where))
    (hear,) = mesh.watchers.values()

    def comes(number: int) -> None:
        hear(1, key_prefix(7, 0, number), ())

    evidence.forget((0, 1))
    comes(1)
    assert found == []
    comes(2)
    assert found == [(0, 2, 1)], "nobody refused that one"
    for number in range(3, DROPPED_KEPT + 3):
        evidence.forget((0, number))
    comes(1)
    assert found[-1] == (0, 1, 1), "as many are remembered, and no more"
