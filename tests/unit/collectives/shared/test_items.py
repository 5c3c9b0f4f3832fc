"""Items on lanes: each reaches every member that needs it, whatever the order of steps; a lying peer is found out."""

from __future__ import annotations

import random

import pytest
from lane_memory import POOL_BYTES, begun, content, make

from asyncdist.collectives.shared import layout as lane_module
from asyncdist.collectives.shared.layout import (
    ABSENT,
    CONSUMED,
    DESCRIPTOR_BYTES,
    DESCRIPTORS,
    DESCRIPTORS_AT,
    LANE_HEAD_BYTES,
    MAX_LANE_RANKS,
    RECORDS,
    SKIPPED,
    SLOTS,
    Differs,
    LaneFault,
    LaneOperation,
)
from asyncdist.collectives.shared.runner import Lane
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
                if reader == lane.turns.rank
            }  # type: ignore[attr-defined]
            operation = lane.items.begin(self.next + 1, len(lengths[lane.turns.rank]), needs)
            if operation is not None:
                self.active.append((operation, plan, 0))
                self.next += 1
        lane.items.retire()
        for index in rng.sample(range(len(self.active)), len(self.active)):
            operation, plan, published = self.active[index]
            lengths = plan["lengths"]  # type: ignore[assignment]
            while published < len(lengths[lane.turns.rank]) and rng.random() < 0.8:
                data = content(lane.turns.rank, operation.number, published, lengths[lane.turns.rank][published])
                if not lane.items.bcopy(operation, memoryview(data)):
                    break
                published += 1
            self.active[index] = (operation, plan, published)
            for member, needs in operation.needs.items():
                for item in [item for item in needs if item < lane.items.available(operation, member)]:
                    if rng.random() < 0.8:
                        view = lane.items.item(operation, member, item)
                        assert bytes(view) == content(member, operation.number, item, lengths[member][item])
                        lane.items.take(operation, member, item)
                        self.read += 1
        for entry in list(self.active):
            operation, _plan, published = entry
            if published == operation.item_count and not any(operation.needs.values()):
                lane.items.end(operation)
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
            other.lane.items.retire()
        runner.lane.items.retire()
    assert sum(runner.read for runner in runners) == expected
    assert all(runner.lane.turns.finished == len(program) for runner in runners)


def test_different_operations_in_one_place_are_a_mismatch() -> None:
    (one, two), _ = make(2)
    mine = one.items.begin(1, 0, {1: {0: 1}})
    two.items.begin(2, 1, {})
    assert mine is not None
    with pytest.raises(Differs) as caught:
        one.items.available(mine, 1)
    assert caught.value.member == 1


def test_an_operation_that_a_member_skips_is_waited_for() -> None:
    (one, two), _ = make(2)
    mine = one.items.begin(1, 0, {1: {0: 1}})
    two.items.begin(SKIPPED, 0, {})
    assert mine is not None
    assert one.items.available(mine, 1) == 0


def test_a_member_is_at_most_so_many_operations_ahead() -> None:
    (one, two), _ = make(2)
    begun = [one.items.begin(1, 0, {}) for _ in range(RECORDS)]
    assert all(begun)
    assert one.items.begin(1, 0, {}) is None
    assert two.turns.wanted_by() == [0]
    theirs = two.items.begin(1, 0, {})
    assert theirs is not None
    two.items.end(theirs)
    assert one.items.begin(1, 0, {}) is not None


def test_room_comes_back_when_items_are_consumed() -> None:
    (one, two), _ = make(2)
    mine = one.items.begin(1, 3, {})
    theirs = two.items.begin(1, 0, {0: {0: 1, 1: 1, 2: 1}})
    assert mine is not None
    assert theirs is not None
    assert one.items.bcopy(mine, memoryview(bytes(POOL_BYTES)))
    assert not one.items.bcopy(mine, memoryview(b"x"))
    assert two.turns.wanted_by() == [0]
    assert two.items.available(theirs, 0) == 1
    assert two.items.item(theirs, 0, 0) == bytes(POOL_BYTES)
    two.items.take(theirs, 0, 0)
    assert one.items.bcopy(mine, memoryview(b"x"))
    assert two.items.available(theirs, 0) == 2
    assert two.items.item(theirs, 0, 1) == b"x"
    with pytest.raises(ValueError, match="does not fit"):
        one.items.bcopy(mine, memoryview(bytes(POOL_BYTES + 1)))


def test_as_many_items_as_descriptors() -> None:
    (one, two), _ = make(2, 3 * DESCRIPTORS * 64 // 2)
    mine = one.items.begin(1, DESCRIPTORS + 1, {})
    theirs = two.items.begin(1, 0, {0: {0: 1}})
    assert mine is not None
    assert theirs is not None
    assert all(one.items.bcopy(mine, memoryview(b"x")) for _ in range(DESCRIPTORS))
    assert not one.items.bcopy(mine, memoryview(b"x"))
    assert two.items.available(theirs, 0) == DESCRIPTORS
    assert two.items.item(theirs, 0, 0) == b"x"
    two.items.take(theirs, 0, 0)
    two.items.end(theirs)
    assert one.items.bcopy(mine, memoryview(b"y"))


def test_an_operation_given_up_lets_the_next_go_on() -> None:
    (one, two), _ = make(2)
    first, second = one.items.begin(1, 2, {}), one.items.begin(2, 1, {})
    assert first is not None
    assert second is not None
    assert not one.items.bcopy(second, memoryview(b"not yet"))
    one.items.end(first)
    assert one.items.bcopy(second, memoryview(b"now"))
    theirs = [two.items.begin(1, 0, {}), two.items.begin(2, 0, {0: {0: 1}})]
    assert theirs[0] is not None
    assert theirs[1] is not None
    two.items.end(theirs[0])
    assert two.items.available(theirs[1], 0) == 1
    assert two.items.item(theirs[1], 0, 0) == b"now"


def test_sizes_of_a_lane() -> None:
    segment = memoryview(bytearray(LANE_HEAD_BYTES + 64))
    with pytest.raises(ValueError, match="2 to"):
        Lane(0, [segment])
    with pytest.raises(ValueError, match="2 to"):
        Lane(0, [segment] * (MAX_LANE_RANKS + 1))
    assert Lane(0, [segment] * MAX_LANE_RANKS).turns.finished == 0


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
            operation = one.items.begin(1, 1, {1: {0: 1}})
            if operation is not None:
                one.items.bcopy(operation, memoryview(b"data"))
                one.items.retire()
                if one.items.available(operation, 1):
                    one.items.item(operation, 1, 0)
                    one.items.take(operation, 1, 0)
                one.items.end(operation)
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
    assert one.items.bcopy(mine, memoryview(b"there"))
    one.items.end(mine)
    assert two.items.available(theirs, 0) == 2
    assert two.items.item(theirs, 0, 0) == b"there"
    assert two.items.item(theirs, 0, 1) is None
    two.items.end(theirs)
    assert one.turns.finished == two.turns.finished == 1


def test_one_given_up_behind_another_is_skipped_when_that_is_through() -> None:
    (one, two), _ = make(2)
    first, second, third = begun(one, 1, 1), begun(one, 2, 1), begun(one, 3, 1)
    one.items.end(second)
    assert not one.items.bcopy(third, memoryview(b"3"))
    assert one.items.bcopy(first, memoryview(b"1"))
    assert one.items.bcopy(third, memoryview(b"3"))
    theirs = [begun(two, number, 0, {0: {0: 1}}) for number in (1, 2, 3)]
    assert [two.items.available(operation, 0) for operation in theirs] == [1, 1, 1]
    assert two.items.item(theirs[0], 0, 0) == b"1"
    assert two.items.item(theirs[1], 0, 0) is None
    assert two.items.item(theirs[2], 0, 0) == b"3"


@pytest.mark.parametrize("items", [DESCRIPTORS - 1, DESCRIPTORS, 3 * DESCRIPTORS])
def test_absent_items_take_no_descriptor_that_is_in_use(items: int) -> None:
    (one, two), _ = make(2)
    first, second, third = begun(one, 1, 1), begun(one, 2, items), begun(one, 3, 1)
    assert one.items.bcopy(first, memoryview(b"kept"))
    one.items.end(second)
    theirs = [begun(two, number, 0, {0: {0: 1}}) for number in (1, 2, 3)]
    assert two.items.available(theirs[0], 0) == 1
    assert two.items.item(theirs[0], 0, 0) == b"kept"
    two.items.take(theirs[0], 0, 0)
    two.items.end(theirs[0])
    one.items.retire()
    assert two.items.available(theirs[1], 0) >= 1
    assert two.items.item(theirs[1], 0, 0) is None
    two.items.end(theirs[1])
    one.items.retire()
    assert one.items.bcopy(third, memoryview(b"next"))
    assert two.items.available(theirs[2], 0) == 1
    assert two.items.item(theirs[2], 0, 0) == b"next"


def test_needs_that_begin_late_consume_no_more_than_there_is() -> None:
    (one, two), _ = make(2)
    mine = begun(one, 1, 0, {1: {3: 1}})
    begun(two, SKIPPED)
    one.items.retire()
    after = begun(two, 2, 1)
    assert two.items.bcopy(after, memoryview(b"x"))  # else it would find more consumed than there is
    assert one.items.available(mine, 1) == 0


def test_waiting_for_room_and_waiting_for_a_turn_are_told_apart() -> None:
    (one, two), _ = make(2)
    mine = begun(one, 1, RECORDS)
    assert one.items.bcopy(mine, memoryview(bytes(POOL_BYTES)))
    for _ in range(RECORDS - 1):
        begun(one, 2)
    assert one.items.begin(2, 0, {}) is None
    assert not one.items.bcopy(mine, memoryview(b"x"))
    theirs = begun(two, 1, 0, {0: {0: 1}})
    assert two.items.available(theirs, 0) == 1
    two.items.take(theirs, 0, 0)
    assert one.items.bcopy(mine, memoryview(b"x"))
    assert two.turns.wanted_by() == [0], "it waits for us to finish still"
    two.items.end(theirs)
    assert one.items.begin(2, 0, {}) is not None
    assert two.turns.wanted_by() == []


def test_whoever_begins_wakes_all_where_one_waits_for_all() -> None:
    (one, two, three), _ = make(3)
    for _ in range(RECORDS):
        begun(one, 1)
    assert one.items.begin(1, 0, {}) is None
    two.items.end(begun(two, 1))
    assert two.turns.finished == 0, "three might have something for two"
    three.items.end(begun(three, 1))
    assert three.turns.wanted_by() == [0, 1], "two has to be woken, so that one can go on"
    two.items.retire()
    assert one.items.begin(1, 0, {}) is not None


def test_a_member_that_has_left_keeps_nobody_from_publishing() -> None:
    (one, two, three), _ = make(3)
    mine = begun(one, 1, 2)
    assert one.items.bcopy(mine, memoryview(bytes(POOL_BYTES)))
    theirs = begun(two, 1, 0, {0: {0: 1, 1: 1}})
    assert two.items.available(theirs, 0) == 1
    two.items.take(theirs, 0, 0)
    assert not one.items.bcopy(mine, memoryview(b"x"))
    one.turns.left(2)
    assert one.items.bcopy(mine, memoryview(b"x"))
    assert one.turns.behind(0) == [2]
    begun(three, 1)
    assert one.turns.behind(0) == []


ARRAYS = 7
"""The number of everybody's segment of arrays."""


class World:
    """Members, and a segment of arrays for each."""

    def __init__(self, size: int) -> None:
        self.arrays = [memoryview(bytearray(range(200))) for _ in range(size)]
        self.segments = [memoryview(bytearray(LANE_HEAD_BYTES + POOL_BYTES)) for _ in range(size)]
        self.gone: set[int] = set()
        self.lanes = []
        for rank in range(size):
            seen = [view if index == rank else view.toreadonly() for index, view in enumerate(self.segments)]
            self.lanes.append(Lane(rank, seen, self.borrow))

    def borrow(self, member: int, segment: int, offset: int, length: int) -> memoryview | None:
        if member in self.gone:
            return None
        if segment != ARRAYS or offset + length > 200:
            raise LaneFault(member, "no such memory")
        return self.arrays[member][offset : offset + length].toreadonly()


def begin(lane: Lane, items: int, *reads: int) -> LaneOperation:
    """Begin an operation of `items` items, that reads those items of member 0."""
    operation = lane.items.begin(1, items, {0: dict.fromkeys(reads, 1)} if reads else {})
    assert operation is not None
    return operation


def test_an_item_is_read_where_it_is_and_held_until_all_have() -> None:
    world = World(3)
    one, two, three = world.lanes
    mine, theirs, others = begin(one, 2), begin(two, 0, 0, 1), begin(three, 0, 0, 1)
    assert one.items.zcopy(mine, ARRAYS, 10, 5)
    assert one.items.bcopy(mine, memoryview(b"copied"))
    assert not one.items.returned(mine)
    assert two.turns.wanted_by() == [0]
    for lane, operation in ((two, theirs), (three, others)):
        assert lane.items.available(operation, 0) == 2
        assert lane.items.item(operation, 0, 0) == bytes(range(10, 15))
        assert lane.items.take(operation, 0, 0)
        assert lane.items.item(operation, 0, 1) == b"copied"
        assert one.items.returned(mine) is (lane is three)
    one.items.end(mine)
    assert two.items.item(theirs, 0, 1) == b"copied"


def test_zcopy_items_that_were_read_are_news_once_this_rank_waits() -> None:
    """To ring for each would wake their sender for nothing: it waits for all of them."""
    world = World(2)
    one, two = world.lanes
    mine, theirs = begin(one, 18), begin(two, 0, *range(18))
    assert all(one.items.zcopy(mine, ARRAYS, item, 1) for item in range(18))
    assert two.items.available(theirs, 0) == 18
    two.turns.news = False
    for item in range(18):
        assert two.items.item(theirs, 0, item) is not None
        assert two.items.take(theirs, 0, item)
        assert two.turns.news is (item in (0, 16, 17)), "the first, each sixteenth behind it, and the last"
        assert two.turns.news or two.turns.late_news
        two.turns.news = two.turns.late_news = False
    assert one.items.returned(mine)


def test_what_is_awaited_stays_awaited_while_more_is_published() -> None:
    world = World(2)
    one, two = world.lanes
    mine, more = begin(one, 1), begin(one, 1)
    theirs = begin(two, 0, 0)
    assert one.items.zcopy(mine, ARRAYS, 0, 5)
    assert not one.items.returned(mine)
    assert one.items.bcopy(more, memoryview(b"x"))
    assert two.turns.wanted_by() == [0]
    assert two.items.available(theirs, 0) == 1
    two.items.take(theirs, 0, 0)
    assert one.items.returned(mine)


def test_what_is_given_up_is_revoked_before_its_memory_changes() -> None:
    world = World(2)
    one, two = world.lanes
    mine, theirs = begin(one, 3), begin(two, 0, 0, 1, 2)
    assert one.items.zcopy(mine, ARRAYS, 0, 5)
    assert one.items.bcopy(mine, memoryview(b"kept"))
    assert two.items.available(theirs, 0) == 2
    assert two.items.item(theirs, 0, 0) is not None
    one.items.end(mine)
    assert not two.items.take(theirs, 0, 0)
    assert two.items.item(theirs, 0, 0) is None
    assert two.items.item(theirs, 0, 1) == b"kept"
    assert two.items.available(theirs, 0) == 3
    assert two.items.item(theirs, 0, 2) is None


def test_what_is_revoked_changes_in_one_word() -> None:
    """Others read the descriptor meanwhile: any mixture of its words is what was lent, or that it is not."""
    world = World(2)
    one, _ = world.lanes
    mine = begin(one, 1)
    assert one.items.zcopy(mine, ARRAYS, 10, 5)
    words = world.segments[0][DESCRIPTORS_AT : DESCRIPTORS_AT + DESCRIPTOR_BYTES].cast("Q")
    assert words.tolist() == [0, 10, 5, ARRAYS]
    one.items.end(mine)
    assert words.tolist() == [0, 10, ABSENT, ARRAYS]


def test_closing_revokes_all_that_is_lent() -> None:
    world = World(2)
    one, two = world.lanes
    mine, more = begin(one, 1), begin(one, 2)
    theirs, others = begin(two, 0, 0), begin(two, 0, 0, 1)
    assert one.items.zcopy(mine, ARRAYS, 0, 5)
    assert one.items.bcopy(more, memoryview(b"kept"))
    assert one.items.zcopy(more, ARRAYS, 5, 5)
    assert two.items.available(theirs, 0) == 1
    assert two.items.available(others, 0) == 2
    assert two.items.item(theirs, 0, 0) is not None
    assert two.items.take(theirs, 0, 0)
    one.items.revoke_all()
    assert two.items.item(theirs, 0, 0) is not None  # read in time
    assert two.items.item(others, 0, 0) == b"kept"
    assert two.items.item(others, 0, 1) is None


def test_a_member_that_says_what_cannot_be_keeps_nothing_lent_to_the_others() -> None:
    world = World(3)
    one, two, three = world.lanes
    mine, theirs, _ = begin(one, 1), begin(two, 0, 0), begin(three, 0, 0)
    assert one.items.zcopy(mine, ARRAYS, 0, 5)
    assert two.items.available(theirs, 0) == 1
    assert two.items.item(theirs, 0, 0) is not None
    world.segments[2].cast("Q")[CONSUMED] = 1 << 60
    one.items.revoke_all()
    assert not two.items.take(theirs, 0, 0)


def test_as_many_zcopy_items_as_descriptors() -> None:
    world = World(2)
    one, two = world.lanes
    mine, theirs = begin(one, DESCRIPTORS + 1), begin(two, 0, 0, 1)
    assert all(one.items.zcopy(mine, ARRAYS, 0, 1) for _ in range(DESCRIPTORS))
    assert not one.items.zcopy(mine, ARRAYS, 0, 1)
    assert two.turns.wanted_by() == [0]
    assert two.items.available(theirs, 0) == DESCRIPTORS
    two.items.take(theirs, 0, 0)
    assert one.items.zcopy(mine, ARRAYS, 3, 1)
    assert not one.items.zcopy(mine, ARRAYS, 0, 1)  # it has no more items


def test_items_go_out_in_turn() -> None:
    one = World(2).lanes[0]
    first, second = begin(one, 1), begin(one, 1)
    assert not one.items.zcopy(second, ARRAYS, 0, 1)
    assert one.items.zcopy(first, ARRAYS, 0, 1)
    assert one.items.zcopy(second, ARRAYS, 0, 1)


def test_a_member_that_is_gone_lends_nothing() -> None:
    world = World(2)
    one, two = world.lanes
    mine, theirs = begin(one, 1), begin(two, 0, 0)
    assert one.items.zcopy(mine, ARRAYS, 0, 5)
    world.gone.add(0)
    assert two.items.available(theirs, 0) == 1
    assert two.items.item(theirs, 0, 0) is None


@pytest.mark.parametrize("place", [(ARRAYS + 1, 0, 1), (ARRAYS, 200, 1), (ARRAYS, 1 << 63, 1 << 63)])
def test_what_was_never_shared_is_a_fault(place: tuple[int, int, int]) -> None:
    world = World(2)
    one, two = world.lanes
    mine, theirs = begin(one, 1), begin(two, 0, 0)
    assert one.items.zcopy(mine, *place)
    assert two.items.available(theirs, 0) == 1
    with pytest.raises(LaneFault):
        two.items.item(theirs, 0, 0)


def test_without_anything_to_borrow_from_a_lent_item_is_a_fault() -> None:
    segments = [memoryview(bytearray(LANE_HEAD_BYTES + POOL_BYTES)) for _ in range(2)]
    one, two = Lane(0, segments), Lane(1, segments)
    mine, theirs = begin(one, 1), begin(two, 0, 0)
    assert one.items.zcopy(mine, ARRAYS, 0, 1)
    assert two.items.available(theirs, 0) == 1
    with pytest.raises(LaneFault, match="segment 7"):
        two.items.item(theirs, 0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_whoever_reads_reads_what_was_lent_or_knows_better(seed: int) -> None:
    """Operations of one lender, some given up, whose memory changes at once when they are over."""
    rng = random.Random(seed)
    world = World(2)
    one, two = world.lanes
    expected: dict[int, bytes] = {}
    lending: list[LaneOperation] = []
    reading: list[LaneOperation] = []
    good = revoked = 0
    offsets: dict[int, int] = {}
    for _ in range(300):
        free = [offset for offset in range(0, 200, 8) if offset not in offsets.values()]
        if free and len(lending) < 8 and rng.random() < 0.6:
            mine = one.items.begin(1, 1, {})
            theirs = two.items.begin(1, 0, {0: {0: 1}})
            if mine is None or theirs is None:
                continue
            offset = offsets[mine.number] = rng.choice(free)
            expected[mine.number] = bytes(rng.randrange(256) for _ in range(8))
            world.arrays[0][offset : offset + 8] = expected[mine.number]
            lending.append(mine)
            reading.append(theirs)
        for mine in list(lending):
            if not mine.published:
                one.items.zcopy(mine, ARRAYS, offsets[mine.number], 8)
            if (one.items.returned(mine) and mine.published) or rng.random() < 0.05:
                lending.remove(mine)
                one.items.end(mine)
                offset = offsets.pop(mine.number)
                world.arrays[0][offset : offset + 8] = b"overwrit"
        for theirs in list(reading):
            if rng.random() < 0.4 and two.items.available(theirs, 0):
                reading.remove(theirs)
                item = two.items.item(theirs, 0, 0)
                copied = b"" if item is None else bytes(item)
                if item is not None and two.items.take(theirs, 0, 0):
                    assert copied == expected[theirs.number]
                    good += 1
                else:
                    revoked += 1
                two.items.end(theirs)
        one.items.retire()
        two.items.retire()
    assert good > 20
    assert revoked
