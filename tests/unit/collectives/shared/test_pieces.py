"""Pieces of lengths that only two ends know: in payloads or items as each giver likes, found by readers of both."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from lane_memory import POOL_BYTES, WIDE_BYTES, begun, content, make

from asyncdist.collectives.shared.channel import BY_ITEMS, READY, Differs, Lane, LaneFault, Needs
from asyncdist.collectives.shared.layout import (
    EXPRESS_BYTES,
    PAYLOAD,
    RECORD_STRIDE,
    RECORDS,
    RECORDS_AT,
    SKIPPED,
    SLOTS,
)

WIDE = 3 * WIDE_BYTES
ONE: Needs = {1: {0: 1}}


def give(lane: Lane, pieces: Sequence[bytes], needs: Needs) -> int:
    """Begin an operation with pieces in our payload; -1 if it is not our turn."""
    at = 4 * (len(pieces) + 1)
    table, data = at.to_bytes(4, "little"), b""
    for piece in pieces:
        data += piece
        table += (at + len(data)).to_bytes(4, "little")
    payload = table + data if pieces else b""
    number = lane.express_turn(len(payload))
    if number >= 0:
        if payload:
            lane.express_payload(number, lane.rank, len(payload))[:] = payload
        lane.express(number, 7, len(payload), needs)
    return number


def test_pieces_are_found_by_their_number_also_if_they_are_empty() -> None:
    (one, two, three), _ = make(3)
    pieces = [[b"", b"third"], [b"x" * 500, b""], [b"", b""]]
    for lane, given in zip((one, two, three), pieces, strict=True):
        assert give(lane, given, {}) == 0
    assert one.express_pieces(0, 7, (1, 2)) == READY
    for member, given in ((1, pieces[1]), (2, pieces[2])):
        assert [one.piece(0, member, item) for item in range(2)] == given
    for lane in (one, two, three):
        lane.express_begun(0)
        lane.express_done(0, begun=True)
    assert one.finished == two.finished == three.finished == 1


def test_whether_pieces_are_there_is_seen_of_each_giver() -> None:
    (one, two, three), _ = make(3)
    assert give(one, [b"1", b"2"], {1: {1: 1}, 2: {0: 1}}) == 0
    assert one.express_pieces(0, 7, (1, 2)) not in (READY, BY_ITEMS), "nobody has begun"
    begun(three, 7, 2)
    assert one.express_pieces(0, 7, (1,)) not in (READY, BY_ITEMS)
    assert one.express_pieces(0, 7, (1, 2)) == BY_ITEMS, "who is late need not be waited for"
    assert give(two, [b"3", b"4"], {}) == 0
    assert one.express_pieces(0, 7, (1,)) == READY
    assert one.express_pieces(0, 7, ()) == READY


def test_who_runs_something_else_or_gives_nothing_is_not_taken_from() -> None:
    (one, two), _ = make(2)
    for fingerprint in (SKIPPED, 7, 8):
        begun(two, fingerprint)
    for number in range(3):
        assert give(one, [b"x"], ONE) == number
    assert one.express_pieces(0, 7, (1,)) not in (READY, BY_ITEMS), "it was refused"
    assert one.express_pieces(1, 7, (1,)) not in (READY, BY_ITEMS), "it was given up before its turn"
    with pytest.raises(Differs):
        one.express_pieces(2, 7, (1,))
    operation = one.by_items(1, 7, ONE)
    assert one.available(operation, 1) == 0


@pytest.mark.parametrize("others_open", [False, True])
def test_steps_find_pieces_in_payloads_and_as_items(others_open: bool) -> None:
    (one, two, three), _ = make(3)
    if others_open:
        for lane in (one, two, three):
            begun(lane, 1)
    needs: Needs = {1: {1: 1}, 2: {0: 1}}
    number = give(one, [b"1", b"2"], needs)
    give(two, [b"3", b"four"], {})
    theirs = begun(three, 7, 2)
    assert one.express_pieces(number, 7, (1, 2)) == BY_ITEMS
    one.retire()
    mine = one.by_items(number, 7, needs)
    assert one.available(mine, 1) > 1
    assert one.item(mine, 1, 1) == b"four"
    one.consumed(mine, 1, 1)
    assert one.available(mine, 2) == 0
    assert three.publish(theirs, memoryview(bytes(POOL_BYTES - 1)))
    assert not three.publish(theirs, memoryview(b"more")), "nobody has read the first yet"
    assert one.available(mine, 2) == 1
    assert one.item(mine, 2, 0) == bytes(POOL_BYTES - 1)
    one.consumed(mine, 2, 0)
    one.end(mine)
    two.express_begun(number)
    two.express_done(number)
    if others_open:
        for lane in (one, two, three):
            lane.end(lane.open[0])
    assert three.publish(theirs, memoryview(b"more")), "who has ended it in records does not need it either"
    three.end(theirs)
    for lane in (one, two, three) * 2:
        lane.retire()
        assert lane.finished == number + 1


def test_items_wait_for_who_reads_them_later() -> None:
    """An operation that is in records here may still turn out to need them."""
    (one, two), _ = make(2)
    first, second = begun(one, 1, 0, ONE), begun(two, 1, 1)
    assert two.publish(second, memoryview(b"first"))
    number = give(one, [b"1"], ONE)
    theirs = begun(two, 7, 1)
    assert two.publish(theirs, memoryview(b"second"))
    assert one.available(first, 1) == 1
    one.consumed(first, 1, 0)
    one.end(first)
    one.retire()
    assert not two.publish(begun(two, 9, 1), memoryview(bytes(POOL_BYTES)))
    mine = one.by_items(number, 7, ONE)
    assert one.available(mine, 1) == 1
    assert one.item(mine, 1, 0) == b"second"


def test_payloads_of_any_lengths_stay_until_all_have_finished() -> None:
    """Of each member its own, some as items, whoever is how far ahead: what is read is what was put out."""
    rng = random.Random(5)
    lanes, _ = make(3, WIDE)
    sizes = [0, 1, 300, EXPRESS_BYTES, WIDE_BYTES // SLOTS // 2, WIDE_BYTES // SLOTS - 12]
    rounds = 600
    lengths = [
        [[rng.choice(sizes[: rng.choice((2, 3, 6))]) for _ in range(2)] for _ in range(3)] for _ in range(rounds)
    ]
    itemized = [[rng.random() < 0.1 for _ in range(3)] for _ in range(rounds)]
    needs: list[Needs] = [{(rank - distance) % 3: {distance - 1: 1} for distance in (1, 2)} for rank in range(3)]
    started, ended, parts = [0, 0, 0], [0, 0, 0], [{}, {}, {}]  # type: ignore[var-annotated]
    while min(ended) < rounds:
        rank = rng.randrange(3)
        lane, number = lanes[rank], started[rank]
        if number < rounds and rng.random() < 0.6:
            pieces = [content(rank, number, item, length) for item, length in enumerate(lengths[number][rank])]
            if itemized[number][rank]:
                operation = lane.begin(7, 2, needs[rank])
                if operation is not None:
                    parts[rank][number] = operation
                    started[rank] += 1
            else:
                started[rank] += give(lane, pieces, needs[rank]) == number
        lane.retire()
        for number, operation in parts[rank].items():
            while operation.published < operation.item_count:
                item = operation.published
                if not lane.publish(operation, memoryview(content(rank, number, item, lengths[number][rank][item]))):
                    break
        number = ended[rank]
        if number == started[rank]:
            continue
        if number not in parts[rank]:
            found = lane.express_pieces(number, 7, needs[rank])
            if found == BY_ITEMS:
                parts[rank][number] = lane.by_items(number, 7, needs[rank])
            elif found == READY:
                for member, items in needs[rank].items():
                    for item in items:
                        wanted = content(member, number, item, lengths[number][member][item])
                        assert lane.piece(number, member, item) == wanted
                lane.express_done(number, begun=True)
                ended[rank] += 1
            continue
        operation = parts[rank][number]
        for member, items in list(operation.needs.items()):
            for item in list(items):
                if item < lane.available(operation, member):
                    wanted = content(member, number, item, lengths[number][member][item])
                    assert lane.item(operation, member, item) == wanted
                    lane.consumed(operation, member, item)
        if not any(operation.needs.values()) and operation.published == operation.item_count:
            lane.end(operation)
            del parts[rank][number]
            ended[rank] += 1
    for lane in lanes * 2:
        lane.retire()
        assert lane.finished == rounds


@pytest.mark.parametrize(
    ("length", "begin", "end", "error"),
    [
        (16, 8, 16, ""),
        (16, 16, 16, ""),
        (16, 0, 16, ""),
        (16, 8, 17, "from 8 to 17 of 16 bytes"),
        (16, 9, 8, "from 9 to 8 of 16 bytes"),
        (16, 1 << 31, (1 << 32) - 1, "of 16 bytes"),
        (8, 8, 8, ""),
        (7, 8, 8, "7 bytes are in place of 1 pieces"),
        (0, 8, 8, "0 bytes are in place of 1 pieces"),
        (2 * WIDE_BYTES // SLOTS, 8, 2 * WIDE_BYTES // SLOTS, ""),
        (2 * WIDE_BYTES // SLOTS + 1, 8, 9, "bytes are in place of 1 pieces"),
        (1 << 63, 8, 9, "bytes are in place of 1 pieces"),
    ],
)
def test_bounds_at_their_limits_and_one_past(length: int, begin: int, end: int, error: str) -> None:
    (one, two), segments = make(2, WIDE)
    give(one, [b"x"], ONE)
    give(two, [b"y"], ONE)
    assert one.express_pieces(0, 7, (1,)) == READY
    word = RECORDS_AT + 8 * PAYLOAD
    segments[1][word : word + 8] = length.to_bytes(8, "little")
    if length <= 2 * WIDE_BYTES // SLOTS:
        at = one._express_place(0, length)
        segments[1][at : at + 8] = begin.to_bytes(4, "little") + end.to_bytes(4, "little")
    if not error:
        assert len(one.piece(0, 1, 0)) == end - begin
        return
    with pytest.raises(LaneFault, match=error) as caught:
        one.piece(0, 1, 0)
    assert caught.value.member == 1


@pytest.mark.parametrize("seed", range(8))
def test_a_member_that_writes_anything_is_a_fault_and_never_more(seed: int) -> None:
    rng = random.Random(seed)
    faults = []
    for _ in range(200):
        (one, two), segments = make(2, WIDE)
        for _ in range(3):
            give(one, [b"some"], ONE)
            give(two, [b"thing", b"else"], ONE)
        for _ in range(rng.randint(1, 4)):
            word = RECORDS_AT + RECORD_STRIDE * rng.randrange(3) + 8 * rng.choice((0, 1, 3, 4, 8, 9))
            value = rng.choice((0, 1, 7, 8, 1 << 31, (1 << 62) - 1, (1 << 64) - 1, rng.randrange(1 << 64)))
            segments[1][word : word + 8] = value.to_bytes(8, "little")
        try:
            for number in range(3):
                found = one.express_pieces(number, 7, (1,))
                if found == READY:
                    assert len(one.piece(number, 1, 0)) <= WIDE_BYTES
                    one.express_done(number, begun=True)
                    continue
                operation = one.by_items(number, 7, ONE)
                if one.available(operation, 1):
                    one.item(operation, 1, 0)
                    one.consumed(operation, 1, 0)
                one.end(operation)
        except (LaneFault, Differs) as error:
            faults.append(error.member)
    assert set(faults) == {1}


def test_who_is_as_far_ahead_as_may_be_waits_by_what_it_gives_itself() -> None:
    (one, two), _ = make(2, WIDE)
    wide = bytes(WIDE_BYTES // SLOTS - 8)
    assert [give(one, [wide], {}) for _ in range(SLOTS)] == list(range(SLOTS))
    assert give(one, [wide], {}) == -1
    assert [give(one, [b"x"], {}) for _ in range(RECORDS - SLOTS)] == list(range(SLOTS, RECORDS))
    assert give(one, [b"x"], {}) == -1
    assert [give(two, [b"y"], {}) for _ in range(RECORDS)] == list(range(RECORDS)), "it gives little"
    assert [one.piece(number, 1, 0) for number in (0, RECORDS - 1)] == [b"y"] * 2
    assert two.piece(SLOTS - 1, 0, 0) == wide
