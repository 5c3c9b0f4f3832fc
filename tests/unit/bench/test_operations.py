"""The inputs and expected results of every measured collective, against the collective done by numpy."""

from __future__ import annotations

import numpy as np
import pytest

from bench.operations import FULL_CHECK_BYTES, OPERATIONS, SPOT_STRIDE, Array, Buffers, make_buffers

RANKS = (2, 3, 4)
NUMBER = 7


def allocate(elements: int) -> Array:
    return np.empty(elements, np.float32)


def world_of(name: str, nbytes: int, ranks: int, *, in_place: bool) -> list[Buffers]:
    found = [make_buffers(name, nbytes, rank, ranks, allocate, in_place=in_place) for rank in range(ranks)]
    for buffers in found:
        buffers.fill(NUMBER)
    return found


def carry_out(name: str, world: list[Buffers]) -> None:
    """Do the collective on all ranks' buffers at once."""
    ranks = len(world)
    inputs = [buffers.input.copy() for buffers in world]
    total = np.sum(inputs, axis=0) if "reduce" in name else None  # elsewhere some inputs are memory of any content
    for rank, buffers in enumerate(world):
        if name == "all_reduce" or (name == "reduce" and rank == 0):
            buffers.output[:] = total
        elif name == "broadcast":
            buffers.output[:] = inputs[0]
        elif name == "all_gather" or (name == "gather" and rank == 0):
            buffers.output[:] = np.concatenate(inputs)
        elif name == "reduce_scatter":
            buffers.output[:] = np.split(total, ranks)[rank]
        elif name == "all_to_all":
            buffers.output[:] = np.concatenate([np.split(source, ranks)[rank] for source in inputs])
        elif name == "all_to_all_uneven":
            parts = [
                np.split(source, np.cumsum(peer.splits[0])[:-1])[rank]
                for source, peer in zip(inputs, world, strict=True)
            ]
            assert [part.size for part in parts] == buffers.splits[1]
            buffers.output[:] = np.concatenate(parts)
        elif name == "scatter":
            buffers.output[:] = np.split(inputs[0], ranks)[rank]


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("nbytes", [4, 4096])
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "barrier"])
def test_right_results_pass_and_one_wrong_element_does_not(name: str, nbytes: int, ranks: int, in_place: bool) -> None:
    world = world_of(name, nbytes, ranks, in_place=in_place)
    carry_out(name, world)
    assert all(buffers.is_right(NUMBER) for buffers in world)
    checked = [buffers for buffers in world if buffers.checks]
    assert checked
    for buffers in checked:
        assert not buffers.is_right(NUMBER + 1)  # the last sample's results do not pass for this one's
        buffers.output[-1] += 1
        assert not buffers.is_right(NUMBER)


def test_large_results_are_checked_at_some_places_and_whole_when_asked() -> None:
    elements = FULL_CHECK_BYTES // 4 + 1
    (buffers,) = world_of("all_reduce", 4 * elements, 1, in_place=True)
    assert buffers.is_right(NUMBER, whole=False)
    buffers.output[1] += 1  # between the places
    assert buffers.is_right(NUMBER, whole=False)
    assert not buffers.is_right(NUMBER, whole=True)
    buffers.output[SPOT_STRIDE] += 1
    assert not buffers.is_right(NUMBER, whole=False)


def test_results_of_up_to_a_mebibyte_are_always_checked_whole() -> None:
    (buffers,) = world_of("all_reduce", FULL_CHECK_BYTES, 1, in_place=True)
    buffers.output[1] += 1
    assert not buffers.is_right(NUMBER, whole=False)


@pytest.mark.parametrize(
    ("name", "factor"), [("all_reduce", 1.5), ("broadcast", 1.0), ("all_gather", 0.75), ("all_to_all", 0.75)]
)
def test_bus_bandwidth_is_that_of_nccl_tests(name: str, factor: float) -> None:
    assert OPERATIONS[name].bus_factor(4) == factor
