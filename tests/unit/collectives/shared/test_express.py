"""Express operations on lanes: payloads stay until all have read them, beside items and ahead of slower members."""

from __future__ import annotations

import random

import pytest
from lane_memory import POOL_BYTES, WIDE_BYTES, begun, content, make

from asyncdist.collectives.shared.channel import Differs, Lane, LaneFault
from asyncdist.collectives.shared.layout import EXPRESS_BYTES, RECORDS, SKIPPED, SLOTS


def express(lane: Lane, fingerprint: int, *pieces: bytes, length: int = 0) -> int:
    payload = b"".join(pieces)
    length = length or len(payload)
    number = lane.express_turn(length)
    if number >= 0:
        lane.express_payload(number, lane.rank, length)[: len(payload)] = payload
        lane.express(number, fingerprint, length)
    return number


def test_express_operations_carry_their_payload_and_mix_with_others() -> None:
    (one, two), _ = make(2)
    for number in range(3 * RECORDS):
        generic = number % 5 == 3
        if generic:
            mine, theirs = one.begin(7, 0, {1: {0: 1}}), two.begin(7, 1, {})
            assert mine is not None
            assert theirs is not None
        before = [express(lane, 1, bytes([number % 251, lane.rank])) for lane in (one, two)]
        assert before[0] == before[1] >= number
        if generic:
            assert two.publish(theirs, memoryview(b"item"))
            two.end(theirs)
            assert one.available(mine, 1) == 1
            assert one.item(mine, 1, 0) == b"item"
            one.consumed(mine, 1, 0)
            one.end(mine)
        for lane, other in ((one, 1), (two, 0)):
            assert lane.express_ready(before[0], 1)
            assert lane.express_payload(before[0], other, 2) == bytes([number % 251, other])
            lane.express_done(before[0])
    assert one.finished == two.finished == before[0] + 1


def test_an_express_operation_that_differs_or_is_given_up() -> None:
    (one, two), _ = make(2)
    number = express(one, 1, b"")
    assert not one.express_ready(number, 1)
    one.express_done(number)
    assert one.finished == 0
    second = express(one, 2, b"x")
    express(two, 1, b"")
    express(two, 3, b"y")
    with pytest.raises(Differs):
        one.express_ready(second, 2)
    one.express_done(second)
    one.retire()
    assert one.finished == 2
    two.express_done(0)
    two.express_done(1)
    assert [express(two, 1, b"") for _ in range(RECORDS)] == list(range(2, RECORDS + 2))
    assert express(two, 1, b"") == -1


@pytest.mark.parametrize("generic", [False, True])
def test_who_takes_nothing_of_one_that_differs_notes_it_before_it_says_that_it_has_finished(generic: bool) -> None:
    (one, two), _ = make(2)
    for lane, fingerprint in ((one, 1), (two, 2)):
        if generic:
            operation = lane.begin(fingerprint, 0, {})
            assert operation is not None
            lane.end(operation)
        else:
            number = express(lane, fingerprint, b"x")
            assert lane.express_ready(number, fingerprint, ())
            lane.express_done(number)
    assert (one.differences, one.finished) == ([], 0)
    assert two.differences == [(0, 0)]
    for lane in (one, two):
        express(lane, 7, b"x")
    assert one.express_ready(1, 7)
    one.express_done(1)
    assert (one.differences, one.finished) == ([(0, 1)], 2)


def test_who_was_refused_an_operation_does_not_differ() -> None:
    (one, two), _ = make(2)
    for lane, fingerprint in ((one, 1), (two, SKIPPED)):
        express(lane, fingerprint, b"x")
        lane.express_done(0)
        express(lane, SKIPPED if fingerprint == 1 else 1, b"x")
        lane.express_done(1)
    one.retire()
    assert one.finished == 2
    assert one.differences == two.differences == []


@pytest.mark.parametrize(("share", "ahead"), [(SLOTS, SLOTS), (SLOTS // 2, SLOTS // 2)])
def test_wide_operations_go_as_far_ahead_as_there_are_slots(share: int, ahead: int) -> None:
    (one, two), _ = make(2, 3 * WIDE_BYTES)
    wide = bytes(WIDE_BYTES // share)
    assert [express(one, 1, wide) for _ in range(ahead)] == list(range(ahead))
    assert express(one, 1, wide) == -1
    assert express(one, 1, b"x") == ahead, "small ones go further"
    assert express(two, 1, wide) == 0
    assert two.express_ready(0, 1)
    two.express_done(0)
    assert express(one, 1, wide) == -1, "our own payloads are still to be read"
    assert two.wanted_by() == [0], "and we want to hear when the others have finished theirs"
    assert express(two, 1, wide) == 1
    one.express_done(0)
    assert express(one, 1, wide) == -1, "one small operation further on, its place is that of the next"
    two.express_done(1)
    one.express_done(1)
    assert express(one, 1, wide) == ahead + 1, "all have finished the first two"
    assert two.wanted_by() == []
    assert express(one, 1, wide) == -1
    assert two.wanted_by() == [0]


def test_longer_slots_take_the_place_of_shorter_ones_once_those_were_read() -> None:
    (one, two), _ = make(2, 3 * WIDE_BYTES)
    short, long = bytes(WIDE_BYTES // SLOTS), bytes(WIDE_BYTES // SLOTS + 1)
    assert [express(one, 1, short) for _ in range(2)] == [0, 1]
    assert express(one, 1, b"") == 2
    assert express(one, 1, long) == -1
    for number, data in enumerate((short, short, b"")):
        assert express(two, 1, data) == number
        assert express(one, 1, long) == -1, "others may still read"
        two.express_done(number)
        assert express(one, 1, long) == -1, "we may"
        one.express_done(number)
        if number:
            break
    assert express(one, 1, long) == 3, "what is short lies elsewhere"
    assert express(one, 1, long) == 4
    assert express(one, 1, short) == -1


def test_wide_payloads_stay_until_all_have_finished() -> None:
    """Every member's, whatever the lengths, who gives, and how far ahead: what is read is what was put out."""
    rng = random.Random(3)
    lanes, _ = make(3, 3 * WIDE_BYTES)
    sizes = [1, EXPRESS_BYTES, EXPRESS_BYTES + 1, WIDE_BYTES // SLOTS, WIDE_BYTES // SLOTS + 3, 2 * WIDE_BYTES // SLOTS]
    lengths = [rng.choice(sizes) for _ in range(600)]
    givers = [rng.choice([(0,), (2,), (0, 1, 2)]) for _ in lengths]
    begun, ended = [0, 0, 0], [0, 0, 0]
    while min(ended) < len(lengths):
        member = rng.randrange(3)
        lane, number = lanes[member], begun[member]
        if number < len(lengths) and rng.random() < 0.6:
            data = content(member, number, 0, lengths[number]) if member in givers[number] else b""
            cut = rng.randrange(len(data) + 1)
            if express(lane, 1, data[:cut], data[cut:], length=lengths[number]) == number:
                begun[member] += 1
        lane.retire()
        number = ended[member]
        if number < begun[member] and lane.express_ready(number, 1, givers[number]):
            for other in givers[number]:
                payload = lane.express_payload(number, other, lengths[number])
                assert payload == content(other, number, 0, lengths[number]), (number, other)
            lane.express_done(number)
            ended[member] += 1
    for lane in lanes * 2:
        lane.retire()
        assert lane.finished == len(lengths)


def test_wide_memory_at_its_limit_and_one_past() -> None:
    (one, _), _ = make(2, 3 * WIDE_BYTES)
    assert express(one, 1, bytes(2 * WIDE_BYTES // SLOTS)) == 0
    with pytest.raises(ValueError, match="does not fit 4 slots"):
        express(one, 1, bytes(2 * WIDE_BYTES // SLOTS + 1))


def test_who_has_room_again_need_not_be_told_any_more() -> None:
    (one, two), _ = make(2)
    for number in range(RECORDS):
        assert express(one, 1, b"x") == express(two, 1, b"y") == number
        two.express_done(number)
    one.express_done(0)
    assert express(one, 1, b"x") == RECORDS
    assert two.wanted_by() == []
    assert express(one, 1, b"x") == -1, "our own payloads are still to be read"
    assert two.wanted_by() == [0]
    one.express_done(1)
    assert express(one, 1, b"x") == RECORDS + 1
    assert two.wanted_by() == []


def test_own_payloads_and_items_stay_until_they_were_read_here() -> None:
    (one, two), _ = make(2)
    for number in range(RECORDS):
        assert express(one, 1, bytes([number])) == express(two, 1, b"?") == number
        two.express_done(number)
    assert express(one, 1, b"too soon") == -1
    assert one.express_payload(0, 0, 1) == bytes([0])
    for number in range(RECORDS):
        assert one.express_ready(number, 1)
        one.express_done(number)
    mine, theirs = begun(one, 2, 2, {0: {0: 1}}), begun(two, 2, 0, {0: {0: 1}})
    assert one.publish(mine, memoryview(bytes(POOL_BYTES)))
    assert two.available(theirs, 0) == 1
    two.consumed(theirs, 0, 0)
    assert not one.publish(mine, memoryview(b"x")), "the first item is still to be read here"
    assert one.available(mine, 0) == 1
    one.consumed(mine, 0, 0)
    assert one.publish(mine, memoryview(b"x"))


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
            two.publish(theirs, memoryview(b"first"))
            two.publish(theirs, memoryview(b"second"))
        for _ in range(rng.randint(1, 4)):
            word = rng.choice((0, 64, 128, 192, 256 + 64 * rng.randrange(4), rng.randrange(0, len(segments[1]) - 8, 8)))
            value = rng.choice((0, 1, 2, 7, 1 << 31, (1 << 62) - 1, 1 << 63, (1 << 64) - 1, rng.randrange(1 << 64)))
            segments[1][word : word + 8] = value.to_bytes(8, "little")
        try:
            for operation in operations:
                one.retire()
                one.wanted_by()
                one.slowest()
                if operation.item_count:
                    one.publish(operation, memoryview(bytes(100)))
                for item in (0, 1):
                    if item < one.available(operation, 1):
                        view = one.item(operation, 1, item)
                        assert view is None or len(view) <= POOL_BYTES
                        one.consumed(operation, 1, item)
                one.end(operation)
            number = express(one, 9, b"x")
            if number >= 0:
                one.express_ready(number, 9)
                one.express_done(number)
        except (LaneFault, Differs) as error:
            faults.append(error.member)
    assert faults
    assert set(faults) == {1}


def test_results_take_the_place_of_payloads_that_nobody_takes_any_more() -> None:
    lanes, _ = make(3)
    one, two, three = lanes
    for number in range(2 * RECORDS):
        for lane in lanes:
            assert express(lane, 1, b"ab") == number
        assert one.without_results(number) == [1, 2]
        assert not one.express_results(number), "the others' are missing"
        assert not three.express_results(number)
        assert three.without_results(number) == [1]
        assert two.express_results(number), "the last one sees all"
        assert not one.without_results(number)
        for lane in lanes:
            lane.express_done(number)
