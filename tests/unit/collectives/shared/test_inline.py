"""Inline operations on lanes: payloads stay until all have read them, beside items and ahead of slower members.

Pieces of lengths that only two ends know are in payloads or items as each giver likes, found by readers of both.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from lane_memory import POOL_BYTES, WIDE_BYTES, begun, content, make

from asyncdist.collectives.shared.items import BY_ITEMS, READY
from asyncdist.collectives.shared.layout import (
    INLINE_BYTES,
    PAYLOAD,
    RECORD_STRIDE,
    RECORDS,
    RECORDS_AT,
    SKIPPED,
    SLOTS,
    Differs,
    LaneFault,
    Needs,
)
from asyncdist.collectives.shared.runner import Lane


def publish(lane: Lane, fingerprint: int, *pieces: bytes, length: int = 0) -> int:
    payload = b"".join(pieces)
    length = length or len(payload)
    number = lane.inline.turn(length)
    if number >= 0:
        lane.inline.payload(number, lane.turns.rank, length)[: len(payload)] = payload
        lane.inline.publish(number, fingerprint, length)
    return number


def test_inline_operations_carry_their_payload_and_mix_with_others() -> None:
    (one, two), _ = make(2)
    for number in range(3 * RECORDS):
        generic = number % 5 == 3
        if generic:
            mine, theirs = one.items.begin(7, 0, {1: {0: 1}}), two.items.begin(7, 1, {})
            assert mine is not None
            assert theirs is not None
        before = [publish(lane, 1, bytes([number % 251, lane.turns.rank])) for lane in (one, two)]
        assert before[0] == before[1] >= number
        if generic:
            assert two.items.bcopy(theirs, memoryview(b"item"))
            two.items.end(theirs)
            assert one.items.available(mine, 1) == 1
            assert one.items.item(mine, 1, 0) == b"item"
            one.items.take(mine, 1, 0)
            one.items.end(mine)
        for lane, other in ((one, 1), (two, 0)):
            assert lane.inline.ready(before[0], 1)
            assert lane.inline.payload(before[0], other, 2) == bytes([number % 251, other])
            lane.inline.done(before[0])
    assert one.turns.finished == two.turns.finished == before[0] + 1


def test_an_inline_operation_that_differs_or_is_given_up() -> None:
    (one, two), _ = make(2)
    number = publish(one, 1, b"")
    assert not one.inline.ready(number, 1)
    one.inline.done(number)
    assert one.turns.finished == 0
    second = publish(one, 2, b"x")
    publish(two, 1, b"")
    publish(two, 3, b"y")
    with pytest.raises(Differs):
        one.inline.ready(second, 2)
    one.inline.done(second)
    one.items.retire()
    assert one.turns.finished == 2
    two.inline.done(0)
    two.inline.done(1)
    assert [publish(two, 1, b"") for _ in range(RECORDS)] == list(range(2, RECORDS + 2))
    assert publish(two, 1, b"") == -1


@pytest.mark.parametrize("generic", [False, True])
def test_who_takes_nothing_of_one_that_differs_notes_it_before_it_says_that_it_has_finished(generic: bool) -> None:
    (one, two), _ = make(2)
    for lane, fingerprint in ((one, 1), (two, 2)):
        if generic:
            operation = lane.items.begin(fingerprint, 0, {})
            assert operation is not None
            lane.items.end(operation)
        else:
            number = publish(lane, fingerprint, b"x")
            assert lane.inline.ready(number, fingerprint, ())
            lane.inline.done(number)
    assert (one.turns.differences, one.turns.finished) == ([], 0)
    assert two.turns.differences == [(0, 0)]
    for lane in (one, two):
        publish(lane, 7, b"x")
    assert one.inline.ready(1, 7)
    one.inline.done(1)
    assert (one.turns.differences, one.turns.finished) == ([(0, 1)], 2)


def test_who_was_refused_an_operation_does_not_differ() -> None:
    (one, two), _ = make(2)
    for lane, fingerprint in ((one, 1), (two, SKIPPED)):
        publish(lane, fingerprint, b"x")
        lane.inline.done(0)
        publish(lane, SKIPPED if fingerprint == 1 else 1, b"x")
        lane.inline.done(1)
    one.items.retire()
    assert one.turns.finished == 2
    assert one.turns.differences == two.turns.differences == []


@pytest.mark.parametrize(("share", "ahead"), [(SLOTS, SLOTS), (SLOTS // 2, SLOTS // 2)])
def test_wide_operations_go_as_far_ahead_as_there_are_slots(share: int, ahead: int) -> None:
    (one, two), _ = make(2, 3 * WIDE_BYTES)
    wide = bytes(WIDE_BYTES // share)
    assert [publish(one, 1, wide) for _ in range(ahead)] == list(range(ahead))
    assert publish(one, 1, wide) == -1
    assert publish(one, 1, b"x") == ahead, "small ones go further"
    assert publish(two, 1, wide) == 0
    assert two.inline.ready(0, 1)
    two.inline.done(0)
    assert publish(one, 1, wide) == -1, "our own payloads are still to be read"
    assert two.turns.wanted_by() == [0], "and we want to hear when the others have finished theirs"
    assert publish(two, 1, wide) == 1
    one.inline.done(0)
    assert publish(one, 1, wide) == -1, "one small operation further on, its place is that of the next"
    two.inline.done(1)
    one.inline.done(1)
    assert publish(one, 1, wide) == ahead + 1, "all have finished the first two"
    assert two.turns.wanted_by() == []
    assert publish(one, 1, wide) == -1
    assert two.turns.wanted_by() == [0]


def test_longer_slots_take_the_place_of_shorter_ones_once_those_were_read() -> None:
    (one, two), _ = make(2, 3 * WIDE_BYTES)
    short, long = bytes(WIDE_BYTES // SLOTS), bytes(WIDE_BYTES // SLOTS + 1)
    assert [publish(one, 1, short) for _ in range(2)] == [0, 1]
    assert publish(one, 1, b"") == 2
    assert publish(one, 1, long) == -1
    for number, data in enumerate((short, short, b"")):
        assert publish(two, 1, data) == number
        assert publish(one, 1, long) == -1, "others may still read"
        two.inline.done(number)
        assert publish(one, 1, long) == -1, "we may"
        one.inline.done(number)
        if number:
            break
    assert publish(one, 1, long) == 3, "what is short lies elsewhere"
    assert publish(one, 1, long) == 4
    assert publish(one, 1, short) == -1


def test_wide_payloads_stay_until_all_have_finished() -> None:
    """Every member's, whatever the lengths, who gives, and how far ahead: what is read is what was put out."""
    rng = random.Random(3)
    lanes, _ = make(3, 3 * WIDE_BYTES)
    sizes = [1, INLINE_BYTES, INLINE_BYTES + 1, WIDE_BYTES // SLOTS, WIDE_BYTES // SLOTS + 3, 2 * WIDE_BYTES // SLOTS]
    lengths = [rng.choice(sizes) for _ in range(600)]
    givers = [rng.choice([(0,), (2,), (0, 1, 2)]) for _ in lengths]
    begun, ended = [0, 0, 0], [0, 0, 0]
    while min(ended) < len(lengths):
        member = rng.randrange(3)
        lane, number = lanes[member], begun[member]
        if number < len(lengths) and rng.random() < 0.6:
            data = content(member, number, 0, lengths[number]) if member in givers[number] else b""
            cut = rng.randrange(len(data) + 1)
            if publish(lane, 1, data[:cut], data[cut:], length=lengths[number]) == number:
                begun[member] += 1
        lane.items.retire()
        number = ended[member]
        if number < begun[member] and lane.inline.ready(number, 1, givers[number]):
            for other in givers[number]:
                payload = lane.inline.payload(number, other, lengths[number])
                assert payload == content(other, number, 0, lengths[number]), (number, other)
            lane.inline.done(number)
            ended[member] += 1
    for lane in lanes * 2:
        lane.items.retire()
        assert lane.turns.finished == len(lengths)


def test_wide_memory_at_its_limit_and_one_past() -> None:
    (one, _), _ = make(2, 3 * WIDE_BYTES)
    assert publish(one, 1, bytes(2 * WIDE_BYTES // SLOTS)) == 0
    with pytest.raises(ValueError, match="does not fit 4 slots"):
        publish(one, 1, bytes(2 * WIDE_BYTES // SLOTS + 1))


def test_who_has_room_again_need_not_be_told_any_more() -> None:
    (one, two), _ = make(2)
    for number in range(RECORDS):
        assert publish(one, 1, b"x") == publish(two, 1, b"y") == number
        two.inline.done(number)
    one.inline.done(0)
    assert publish(one, 1, b"x") == RECORDS
    assert two.turns.wanted_by() == []
    assert publish(one, 1, b"x") == -1, "our own payloads are still to be read"
    assert two.turns.wanted_by() == [0]
    one.inline.done(1)
    assert publish(one, 1, b"x") == RECORDS + 1
    assert two.turns.wanted_by() == []


def test_own_payloads_and_items_stay_until_they_were_read_here() -> None:
    (one, two), _ = make(2)
    for number in range(RECORDS):
        assert publish(one, 1, bytes([number])) == publish(two, 1, b"?") == number
        two.inline.done(number)
    assert publish(one, 1, b"too soon") == -1
    assert one.inline.payload(0, 0, 1) == bytes([0])
    for number in range(RECORDS):
        assert one.inline.ready(number, 1)
        one.inline.done(number)
    mine, theirs = begun(one, 2, 2, {0: {0: 1}}), begun(two, 2, 0, {0: {0: 1}})
    assert one.items.bcopy(mine, memoryview(bytes(POOL_BYTES)))
    assert two.items.available(theirs, 0) == 1
    two.items.take(theirs, 0, 0)
    assert not one.items.bcopy(mine, memoryview(b"x")), "the first item is still to be read here"
    assert one.items.available(mine, 0) == 1
    one.items.take(mine, 0, 0)
    assert one.items.bcopy(mine, memoryview(b"x"))


@pytest.mark.parametrize("seed", range(8))
def test_a_member_that_writes_anything_is_a_fault_and_never_more(seed: int) -> None:
    """Bytes of a peer's segment change at random: calls give something, or raise LaneFault or Differs."""
    rng = random.Random(seed)
    faults = []
    for _ in range(60):
        (one, two), segments = make(2)
        operations = [begun(one, 1, 1, {1: {0: 1, 1: 1}}) for _ in range(3)]
        for _ in range(3):
            theirs = begun(two, 1, 2)
            two.items.bcopy(theirs, memoryview(b"first"))
            two.items.bcopy(theirs, memoryview(b"second"))
        for _ in range(rng.randint(1, 4)):
            word = rng.choice((0, 64, 128, 192, 256 + 64 * rng.randrange(4), rng.randrange(0, len(segments[1]) - 8, 8)))
            value = rng.choice((0, 1, 2, 7, 1 << 31, (1 << 62) - 1, 1 << 63, (1 << 64) - 1, rng.randrange(1 << 64)))
            segments[1][word : word + 8] = value.to_bytes(8, "little")
        try:
            for operation in operations:
                one.items.retire()
                one.turns.wanted_by()
                one.items.slowest()
                if operation.item_count:
                    one.items.bcopy(operation, memoryview(bytes(100)))
                for item in (0, 1):
                    if item < one.items.available(operation, 1):
                        view = one.items.item(operation, 1, item)
                        assert view is None or len(view) <= POOL_BYTES
                        one.items.take(operation, 1, item)
                one.items.end(operation)
            number = publish(one, 9, b"x")
            if number >= 0:
                one.inline.ready(number, 9)
                one.inline.done(number)
        except (LaneFault, Differs) as error:
            faults.append(error.member)
    assert faults
    assert set(faults) == {1}


def test_results_take_the_place_of_payloads_that_nobody_takes_any_more() -> None:
    lanes, _ = make(3)
    one, two, three = lanes
    for number in range(2 * RECORDS):
        for lane in lanes:
            assert publish(lane, 1, b"ab") == number
        assert one.inline.without_results(number) == [1, 2]
        assert not one.inline.publish_results(number), "the others' are missing"
        assert not three.inline.publish_results(number)
        assert three.inline.without_results(number) == [1]
        assert two.inline.publish_results(number), "the last one sees all"
        assert not one.inline.without_results(number)
        for lane in lanes:
            lane.inline.done(number)


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
    number = lane.inline.turn(len(payload))
    if number >= 0:
        if payload:
            lane.inline.payload(number, lane.turns.rank, len(payload))[:] = payload
        lane.inline.publish(number, 7, len(payload), needs)
    return number


def test_pieces_are_found_by_their_number_also_if_they_are_empty() -> None:
    (one, two, three), _ = make(3)
    pieces = [[b"", b"third"], [b"x" * 500, b""], [b"", b""]]
    for lane, given in zip((one, two, three), pieces, strict=True):
        assert give(lane, given, {}) == 0
    assert one.items.pieces_ready(0, 7, (1, 2)) == READY
    for member, given in ((1, pieces[1]), (2, pieces[2])):
        assert [one.items.piece(0, member, item) for item in range(2)] == given
    for lane in (one, two, three):
        lane.inline.all_begun(0)
        lane.inline.done(0, begun=True)
    assert one.turns.finished == two.turns.finished == three.turns.finished == 1


def test_whether_pieces_are_there_is_seen_of_each_giver() -> None:
    (one, two, three), _ = make(3)
    assert give(one, [b"1", b"2"], {1: {1: 1}, 2: {0: 1}}) == 0
    assert one.items.pieces_ready(0, 7, (1, 2)) not in (READY, BY_ITEMS), "nobody has begun"
    begun(three, 7, 2)
    assert one.items.pieces_ready(0, 7, (1,)) not in (READY, BY_ITEMS)
    assert one.items.pieces_ready(0, 7, (1, 2)) == BY_ITEMS, "who is late need not be waited for"
    assert give(two, [b"3", b"4"], {}) == 0
    assert one.items.pieces_ready(0, 7, (1,)) == READY
    assert one.items.pieces_ready(0, 7, ()) == READY


def test_who_runs_something_else_or_gives_nothing_is_not_taken_from() -> None:
    (one, two), _ = make(2)
    for fingerprint in (SKIPPED, 7, 8):
        begun(two, fingerprint)
    for number in range(3):
        assert give(one, [b"x"], ONE) == number
    assert one.items.pieces_ready(0, 7, (1,)) not in (READY, BY_ITEMS), "it was refused"
    assert one.items.pieces_ready(1, 7, (1,)) not in (READY, BY_ITEMS), "it was given up before its turn"
    with pytest.raises(Differs):
        one.items.pieces_ready(2, 7, (1,))
    operation = one.items.in_steps(1, 7, ONE)
    assert one.items.available(operation, 1) == 0


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
    assert one.items.pieces_ready(number, 7, (1, 2)) == BY_ITEMS
    one.items.retire()
    mine = one.items.in_steps(number, 7, needs)
    assert one.items.available(mine, 1) > 1
    assert one.items.item(mine, 1, 1) == b"four"
    one.items.take(mine, 1, 1)
    assert one.items.available(mine, 2) == 0
    assert three.items.bcopy(theirs, memoryview(bytes(POOL_BYTES - 1)))
    assert not three.items.bcopy(theirs, memoryview(b"more")), "nobody has read the first yet"
    assert one.items.available(mine, 2) == 1
    assert one.items.item(mine, 2, 0) == bytes(POOL_BYTES - 1)
    one.items.take(mine, 2, 0)
    one.items.end(mine)
    two.inline.all_begun(number)
    two.inline.done(number)
    if others_open:
        for lane in (one, two, three):
            lane.items.end(lane.turns.open[0])
    assert three.items.bcopy(theirs, memoryview(b"more")), "who has ended it in records does not need it either"
    three.items.end(theirs)
    for lane in (one, two, three) * 2:
        lane.items.retire()
        assert lane.turns.finished == number + 1


def test_items_wait_for_who_reads_them_later() -> None:
    """An operation that is in records here may still turn out to need them."""
    (one, two), _ = make(2)
    first, second = begun(one, 1, 0, ONE), begun(two, 1, 1)
    assert two.items.bcopy(second, memoryview(b"first"))
    number = give(one, [b"1"], ONE)
    theirs = begun(two, 7, 1)
    assert two.items.bcopy(theirs, memoryview(b"second"))
    assert one.items.available(first, 1) == 1
    one.items.take(first, 1, 0)
    one.items.end(first)
    one.items.retire()
    assert not two.items.bcopy(begun(two, 9, 1), memoryview(bytes(POOL_BYTES)))
    mine = one.items.in_steps(number, 7, ONE)
    assert one.items.available(mine, 1) == 1
    assert one.items.item(mine, 1, 0) == b"second"


def test_payloads_of_any_lengths_stay_until_all_have_finished() -> None:
    """Of each member its own, some as items, whoever is how far ahead: what is read is what was put out."""
    rng = random.Random(5)
    lanes, _ = make(3, WIDE)
    sizes = [0, 1, 300, INLINE_BYTES, WIDE_BYTES // SLOTS // 2, WIDE_BYTES // SLOTS - 12]
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
                operation = lane.items.begin(7, 2, needs[rank])
                if operation is not None:
                    parts[rank][number] = operation
                    started[rank] += 1
            else:
                started[rank] += give(lane, pieces, needs[rank]) == number
        lane.items.retire()
        for number, operation in parts[rank].items():
            while operation.published < operation.item_count:
                item = operation.published
                if not lane.items.bcopy(
                    operation, memoryview(content(rank, number, item, lengths[number][rank][item]))
                ):
                    break
        number = ended[rank]
        if number == started[rank]:
            continue
        if number not in parts[rank]:
            found = lane.items.pieces_ready(number, 7, needs[rank])
            if found == BY_ITEMS:
                parts[rank][number] = lane.items.in_steps(number, 7, needs[rank])
            elif found == READY:
                for member, items in needs[rank].items():
                    for item in items:
                        wanted = content(member, number, item, lengths[number][member][item])
                        assert lane.items.piece(number, member, item) == wanted
                lane.inline.done(number, begun=True)
                ended[rank] += 1
            continue
        operation = parts[rank][number]
        for member, items in list(operation.needs.items()):
            for item in list(items):
                if item < lane.items.available(operation, member):
                    wanted = content(member, number, item, lengths[number][member][item])
                    assert lane.items.item(operation, member, item) == wanted
                    lane.items.take(operation, member, item)
        if not any(operation.needs.values()) and operation.published == operation.item_count:
            lane.items.end(operation)
            del parts[rank][number]
            ended[rank] += 1
    for lane in lanes * 2:
        lane.items.retire()
        assert lane.turns.finished == rounds


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
    assert one.items.pieces_ready(0, 7, (1,)) == READY
    word = RECORDS_AT + 8 * PAYLOAD
    segments[1][word : word + 8] = length.to_bytes(8, "little")
    if length <= 2 * WIDE_BYTES // SLOTS:
        at = one.inline.place(0, length)
        segments[1][at : at + 8] = begin.to_bytes(4, "little") + end.to_bytes(4, "little")
    if not error:
        assert len(one.items.piece(0, 1, 0)) == end - begin
        return
    with pytest.raises(LaneFault, match=error) as caught:
        one.items.piece(0, 1, 0)
    assert caught.value.member == 1


@pytest.mark.parametrize("seed", range(8))
def test_pieces_of_a_member_that_writes_anything_are_a_fault_and_never_more(seed: int) -> None:
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
                found = one.items.pieces_ready(number, 7, (1,))
                if found == READY:
                    assert len(one.items.piece(number, 1, 0)) <= WIDE_BYTES
                    one.inline.done(number, begun=True)
                    continue
                operation = one.items.in_steps(number, 7, ONE)
                if one.items.available(operation, 1):
                    one.items.item(operation, 1, 0)
                    one.items.take(operation, 1, 0)
                one.items.end(operation)
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
    assert [one.items.piece(number, 1, 0) for number in (0, RECORDS - 1)] == [b"y"] * 2
    assert two.items.piece(SLOTS - 1, 0, 0) == wide
