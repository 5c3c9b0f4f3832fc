"""Tables of receives: first in, first out, and removable from anywhere."""

from __future__ import annotations

from transport_pair import GROUP_BYTES, Recorder, p2p

from asyncdist.transport.protocol import matching
from asyncdist.transport.protocol.matching import AnySourceTable, DroppedGroups, ReceiveTable
from asyncdist.transport.protocol.operations import Receive, ReceiveState


def receives(count: int, tag: int = 0, sink: Recorder | None = None) -> list[Receive]:
    return [Receive(p2p(tag), None, sink or Recorder(), index) for index in range(count)]


def filled(posted: list[Receive]) -> ReceiveTable:
    table = ReceiveTable()
    for receive in posted:
        table.add(receive)
    return table


def test_first_in_first_out() -> None:
    posted = receives(4)
    table = filled(posted)
    assert table.head(p2p(0)) is posted[0]
    assert table.count(p2p(0)) == 4
    assert [table.pop(p2p(0)) for _ in range(5)] == [*posted, None]
    assert not table.entries


def test_removal_anywhere() -> None:
    for removed in range(3):
        posted = receives(3)
        table = filled(posted)
        assert table.remove(posted[removed])
        assert not table.remove(posted[removed])
        del posted[removed]
        assert list(table) == posted
        assert [table.pop(p2p(0)) for _ in range(2)] == posted
    assert not filled([]).remove(posted[0])
    assert not filled(receives(1)).remove(posted[0])


def test_a_group_is_dropped_whole() -> None:
    mine, other = receives(2), Receive(p2p(0, group=8), None, Recorder(), None)
    table = filled([*mine, other])
    table.drop_group(GROUP_BYTES)
    assert [receive.state for receive in mine] == 2 * [ReceiveState.DROPPED]
    assert list(table) == [other]
    assert table.take_all() == [other]
    assert not list(table)


def test_thousands_of_one_key_are_linear() -> None:
    posted = receives(20_000)
    table = filled(posted)
    for receive in reversed(posted[1:]):
        assert table.remove(receive)
    assert table.pop(p2p(0)) is posted[0]


def test_dropped_groups_and_operations() -> None:
    dropped = DroppedGroups()
    dropped.add(p2p(1)[:16])
    assert p2p(1) in dropped
    assert p2p(2) not in dropped
    dropped.add(GROUP_BYTES)
    assert p2p(2) in dropped


def test_who_wants_to_know_what_is_thrown_away() -> None:
    dropped, heard = DroppedGroups(), list[tuple[int, bytes]]()
    dropped.add(GROUP_BYTES)
    dropped.discard(p2p(2), 3, b"nobody asked")
    dropped.add(GROUP_BYTES, lambda source, meta: heard.append((source, meta)))
    dropped.discard(p2p(2), 3, b"meta")
    dropped.discard(p2p(2, 5), 3, b"of another group")
    assert heard == [(3, b"meta")]


def test_the_oldest_dropped_group_is_forgotten() -> None:
    dropped = DroppedGroups()
    for group in range(matching.MAX_DROPPED_GROUPS):
        dropped.add(p2p(0, group)[:8])
    assert p2p(0, 0) in dropped
    dropped.add(p2p(0, 0)[:8])  # named again: the newest now
    dropped.add(p2p(0, 1 << 40)[:8])
    assert p2p(0, 0) in dropped
    assert p2p(0, 1) not in dropped


def test_a_lost_rank_fails_only_receives_it_could_serve() -> None:
    sink = Recorder()
    table = AnySourceTable()
    for receive, ranks in zip(receives(3, sink=sink), ((0, 1), (1, 2), (0, 2)), strict=True):
        assert not table.post(receive, ranks)
    error = RuntimeError("lost")
    table.fail_source(1, error)
    assert sink.failed == {0: error, 1: error}
    table.fail(error)
    assert set(sink.failed) == {0, 1, 2}
