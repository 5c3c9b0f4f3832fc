"""Items on lanes: each reaches every member that needs it, whatever the order of steps; a lying peer is found out."""

from __future__ import annotations

import random

import pytest
from lane_memory import POOL_BYTES, begun, content, make

from asyncdist.collectives.shared import layout as lane_module
from asyncdist.collectives.shared.channel import LANE_HEAD_BYTES, MAX_LANE_RANKS, SKIPPED, Differs, Lane, LaneOperation
from asyncdist.collectives.shared.layout import DESCRIPTORS, RECORDS, SLOTS
from asyncdist.errors import RemoteProtocolError


class Runner:
    """One member going through `program`: per operation, how many items of what length each member has, and which
    items are read by whom."""

    def __init__(self, lane: Lane, program: list[dict[str, object]], depth: int) -> None:
        self.lane = lane
        self.program = program
        self.depth = depth
        self.next = 0
        self.active: list[tuple[LaneOperation, dict[str, object], int]] = []
        self.read = 0

    @property
    def done(self) -> bool:
        return self.next == len(self.program) and not self.active

    def step(self, rng: random.Random) -> None:
        lane = self.lane
        if self.next < len(self.program) and len(self.active) < self.depth:
            plan = self.program[self.next]
            lengths: list[list[int]] = plan["lengths"]  # type: ignore[assignment]
            needs = {
                member: dict.fromkeys(items, 1)
                for (reader, member), items in plan["reads"].items()
                if reader == lane.rank
            }  # type: ignore[attr-defined]
            operation = lane.begin(self.next + 1, len(lengths[lane.rank]), needs)
            if operation is not None:
                self.active.append((operation, plan, 0))
                self.next += 1
        lane.retire()
        for index in rng.sample(range(len(self.active)), len(self.active)):
            operation, plan, published = self.active[index]
            lengths = plan["lengths"]  # type: ignore[assignment]
            while published < len(lengths[lane.rank]) and rng.random() < 0.8:
                data = content(lane.rank, operation.number, published, lengths[lane.rank][published])
                if not lane.publish(operation, memoryview(data)):
                    break
                published += 1
            self.active[index] = (operation, plan, published)
            for member, needs in operation.needs.items():
                for item in [item for item in needs if item < lane.available(operation, member)]:
                    if rng.random() < 0.8:
                        view = lane.item(operation, member, item)
                        assert bytes(view) == content(member, operation.number, item, lengths[member][item])
                        lane.consumed(operation, member, item)
                        self.read += 1
        for entry in list(self.active):
            operation, _plan, published = entry
            if published == operation.item_count and not any(operation.needs.values()):
                lane.end(operation)
                self.active.remove(entry)


@pytest.mark.parametrize("seed", range(16))
def test_random_programs(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(2, 5)
    program: list[dict[str, object]] = []
    expected = 0
    for _ in range(rng.randint(1, 50)):
        lengths = [[rng.choice((1, 8, 100, 700, 2000)) for _ in range(rng.choice((0, 1, 1, 3)))] for _ in range(size)]
        reads = {}
        for reader in range(size):
            for member in range(size):
                items = [item for item in range(len(lengths[member])) if rng.random() < 0.7]
                if items and reader != member:
                    reads[reader, member] = items
                    expected += len(items)
        program.append({"lengths": lengths, "reads": reads})
    lanes, _ = make(size)
    runners = [Runner(lane, program, rng.choice((1, 3, 100))) for lane in lanes]
    for _ in range(100_000):
        if all(runner.done for runner in runners):
            break
        rng.choice(runners).step(rng)
    assert all(runner.done for runner in runners), "stuck"
    for runner in runners:
        for other in runners:
            other.lane.retire()
        runner.lane.retire()
    assert sum(runner.read for runner in runners) == expected
    assert all(runner.lane.finished == len(program) for runner in runners)


def test_different_operations_in_one_place_are_a_mismatch() -> None:
    (one, two), _ = make(2)
    mine = one.begin(1, 0, {1: {0: 1}})
    two.begin(2, 1, {})
    assert mine is not None
    with pytest.raises(Differs) as caught:
        one.available(mine, 1)
    assert caught.value.member == 1


def test_an_operation_that_a_member_skips_is_waited_for() -> None:
    (one, two), _ = make(2)
    mine = one.begin(1, 0, {1: {0: 1}})
    two.begin(SKIPPED, 0, {})
    assert mine is not None
    assert one.available(mine, 1) == 0


def test_a_member_is_at_most_so_many_operations_ahead() -> None:
    (one, two), _ = make(2)
    begun = [one.begin(1, 0, {}) for _ in range(RECORDS)]
    assert all(begun)
    assert one.begin(1, 0, {}) is None
    assert two.wanted_by() == [0]
    theirs = two.begin(1, 0, {})
    assert theirs is not None
    two.end(theirs)
    assert one.begin(1, 0, {}) is not None


def test_room_comes_back_when_items_are_consumed() -> None:
    (one, two), _ = make(2)
    mine = one.begin(1, 3, {})
    theirs = two.begin(1, 0, {0: {0: 1, 1: 1, 2: 1}})
    assert mine is not None
    assert theirs is not None
    assert one.publish(mine, memoryview(bytes(POOL_BYTES)))
    assert not one.publish(mine, memoryview(b"x"))
    assert two.wanted_by() == [0]
    assert two.available(theirs, 0) == 1
    assert two.item(theirs, 0, 0) == bytes(POOL_BYTES)
    two.consumed(theirs, 0, 0)
    assert one.publish(mine, memoryview(b"x"))
    assert two.available(theirs, 0) == 2
    assert two.item(theirs, 0, 1) == b"x"
    with pytest.raises(ValueError, match="does not fit"):
        one.publish(mine, memoryview(bytes(POOL_BYTES + 1)))


def test_as_many_items_as_descriptors() -> None:
    (one, two), _ = make(2, 3 * DESCRIPTORS * 64 // 2)
    mine = one.begin(1, DESCRIPTORS + 1, {})
    theirs = two.begin(1, 0, {0: {0: 1}})
    assert mine is not None
    assert theirs is not None
    assert all(one.publish(mine, memoryview(b"x")) for _ in range(DESCRIPTORS))
    assert not one.publish(mine, memoryview(b"x"))
    assert two.available(theirs, 0) == DESCRIPTORS
    assert two.item(theirs, 0, 0) == b"x"
    two.consumed(theirs, 0, 0)
    two.end(theirs)
    assert one.publish(mine, memoryview(b"y"))


def test_an_operation_given_up_lets_the_next_go_on() -> None:
    (one, two), _ = make(2)
    first, second = one.begin(1, 2, {}), one.begin(2, 1, {})
    assert first is not None
    assert second is not None
    assert not one.publish(second, memoryview(b"not yet"))
    one.end(first)
    assert one.publish(second, memoryview(b"now"))
    theirs = [two.begin(1, 0, {}), two.begin(2, 0, {0: {0: 1}})]
    assert theirs[0] is not None
    assert theirs[1] is not None
    two.end(theirs[0])
    assert two.available(theirs[1], 0) == 1
    assert two.item(theirs[1], 0, 0) == b"now"


def test_sizes_of_a_lane() -> None:
    segment = memoryview(bytearray(LANE_HEAD_BYTES + 64))
    with pytest.raises(ValueError, match="2 to"):
        Lane(0, [segment])
    with pytest.raises(ValueError, match="2 to"):
        Lane(0, [segment] * (MAX_LANE_RANKS + 1))
    assert Lane(0, [segment] * MAX_LANE_RANKS).finished == 0


@pytest.mark.parametrize("seed", range(30))
def test_a_peer_that_writes_anything_is_found_out_or_harmless(seed: int) -> None:
    rng = random.Random(seed)
    (one, _), segments = make(2)
    for _ in range(60):
        for _ in range(rng.randint(1, 6)):
            at = rng.choice((0, 64, 128, 192, 256, rng.randrange(0, LANE_HEAD_BYTES - 8, 8)))
            value = rng.choice((0, 1, 2, 3, RECORDS, 1 << 63, rng.getrandbits(64)))
            segments[1][at : at + 8] = value.to_bytes(8, "little")
        try:
            operation = one.begin(1, 1, {1: {0: 1}})
            if operation is not None:
                one.publish(operation, memoryview(b"data"))
                one.retire()
                if one.available(operation, 1):
                    one.item(operation, 1, 0)
                    one.consumed(operation, 1, 0)
                one.end(operation)
        except (RemoteProtocolError, Differs):
            return


def test_limits_are_what_the_layout_has_room_for() -> None:
    words = 64 * (4 + MAX_LANE_RANKS)
    used = words + RECORDS * lane_module.RECORD_STRIDE + DESCRIPTORS * lane_module.DESCRIPTOR.size
    assert used <= LANE_HEAD_BYTES < used + 2 * 4096
    for payloads in (0, 1, 4096, 3 * 4096 - 1, 3 * 4096, 12 << 20):
        wide, pool = (part(LANE_HEAD_BYTES + payloads) for part in (lane_module.wide_bytes, lane_module.pool_bytes))
        assert wide + pool == payloads
        assert wide % 4096 == 0
        assert payloads - 3 * 4096 < 3 * wide <= payloads
    assert lane_module.pool_bytes(0) == lane_module.wide_bytes(0) == 0


@pytest.mark.parametrize("array_at", [0, 16, 64], ids=["mmap", "malloc", "torch"])
@pytest.mark.parametrize("lane_bytes", [3 << 20, 12 << 20])
def test_no_copy_between_a_payload_and_an_array_is_one_that_rep_movsb_is_slow_at(
    array_at: int, lane_bytes: int
) -> None:
    begin = LANE_HEAD_BYTES
    wide = lane_module.wide_bytes(begin + lane_bytes)
    slots = [begin + wide // SLOTS * number for number in range(SLOTS)]
    items = [begin + wide + (chunk << 15) for chunk in range(4)]
    for payload_at in slots + items:
        for distance in (array_at - payload_at, payload_at - array_at):
            assert not 0 < distance % 4096 < 32


def test_items_of_an_operation_given_up_are_absent_and_no_mismatch() -> None:
    (one, two), _ = make(2)
    theirs = begun(two, 1, 0, {0: {0: 1, 1: 1}})
    mine = begun(one, 1, 2)
    assert one.publish(mine, memoryview(b"there"))
    one.end(mine)
    assert two.available(theirs, 0) == 2
    assert two.item(theirs, 0, 0) == b"there"
    assert two.item(theirs, 0, 1) is None
    two.end(theirs)
    assert one.finished == two.finished == 1


def test_one_given_up_behind_another_is_skipped_when_that_is_through() -> None:
    (one, two), _ = make(2)
    first, second, third = begun(one, 1, 1), begun(one, 2, 1), begun(one, 3, 1)
    one.end(second)
    assert not one.publish(third, memoryview(b"3"))
    assert one.publish(first, memoryview(b"1"))
    assert one.publish(third, memoryview(b"3"))
    theirs = [begun(two, number, 0, {0: {0: 1}}) for number in (1, 2, 3)]
    assert [two.available(operation, 0) for operation in theirs] == [1, 1, 1]
    assert two.item(theirs[0], 0, 0) == b"1"
    assert two.item(theirs[1], 0, 0) is None
    assert two.item(theirs[2], 0, 0) == b"3"


@pytest.mark.parametrize("items", [DESCRIPTORS - 1, DESCRIPTORS, 3 * DESCRIPTORS])
def test_absent_items_take_no_descriptor_that_is_in_use(items: int) -> None:
    (one, two), _ = make(2)
    first, second, third = begun(one, 1, 1), begun(one, 2, items), begun(one, 3, 1)
    assert one.publish(first, memoryview(b"kept"))
    one.end(second)
    theirs = [begun(two, number, 0, {0: {0: 1}}) for number in (1, 2, 3)]
    assert two.available(theirs[0], 0) == 1
    assert two.item(theirs[0], 0, 0) == b"kept"
    two.consumed(theirs[0], 0, 0)
    two.end(theirs[0])
    one.retire()
    assert two.available(theirs[1], 0) >= 1
    assert two.item(theirs[1], 0, 0) is None
    two.end(theirs[1])
    one.retire()
    assert one.publish(third, memoryview(b"next"))
    assert two.available(theirs[2], 0) == 1
    assert two.item(theirs[2], 0, 0) == b"next"


def test_needs_that_begin_late_consume_no_more_than_there_is() -> None:
    (one, two), _ = make(2)
    mine = begun(one, 1, 0, {1: {3: 1}})
    begun(two, SKIPPED)
    one.retire()
    after = begun(two, 2, 1)
    assert two.publish(after, memoryview(b"x"))  # else it would find more consumed than there is
    assert one.available(mine, 1) == 0


def test_waiting_for_room_and_waiting_for_a_turn_are_told_apart() -> None:
    (one, two), _ = make(2)
    mine = begun(one, 1, RECORDS)
    assert one.publish(mine, memoryview(bytes(POOL_BYTES)))
    for _ in range(RECORDS - 1):
        begun(one, 2)
    assert one.begin(2, 0, {}) is None
    assert not one.publish(mine, memoryview(b"x"))
    theirs = begun(two, 1, 0, {0: {0: 1}})
    assert two.available(theirs, 0) == 1
    two.consumed(theirs, 0, 0)
    assert one.publish(mine, memoryview(b"x"))
    assert two.wanted_by() == [0], "it waits for us to finish still"
    two.end(theirs)
    assert one.begin(2, 0, {}) is not None
    assert two.wanted_by() == []


def test_whoever_begins_wakes_all_where_one_waits_for_all() -> None:
    (one, two, three), _ = make(3)
    for _ in range(RECORDS):
        begun(one, 1)
    assert one.begin(1, 0, {}) is None
    two.end(begun(two, 1))
    assert two.finished == 0, "three might have something for two"
    three.end(begun(three, 1))
    assert three.wanted_by() == [0, 1], "two has to be woken, so that one can go on"
    two.retire()
    assert one.begin(1, 0, {}) is not None


def test_a_member_that_has_left_keeps_nobody_from_publishing() -> None:
    (one, two, three), _ = make(3)
    mine = begun(one, 1, 2)
    assert one.publish(mine, memoryview(bytes(POOL_BYTES)))
    theirs = begun(two, 1, 0, {0: {0: 1, 1: 1}})
    assert two.available(theirs, 0) == 1
    two.consumed(theirs, 0, 0)
    assert not one.publish(mine, memoryview(b"x"))
    one.left(2)
    assert one.publish(mine, memoryview(b"x"))
    assert one.behind(0) == [2]
    begun(three, 1)
    assert one.behind(0) == []
