"""What follows from how the nodes of a round ended."""

from __future__ import annotations

import pytest

from asyncdist.launch.failure import Conclusion, End, Failure, conclude


def failure(rank: int) -> Failure:
    return Failure(node=rank, rank=rank, host="h", pid=12, exitcode=3, description="exit code 3")


COMPLETED, STOPPED, LEFT = End(completed=True), End(), End(left=True)
AGAIN, DONE = Conclusion("again"), Conclusion("done")


def failed(rank: int, consequence: bool = False) -> End:
    return End(failure=failure(rank), consequence=consequence)


@pytest.mark.parametrize(
    ("ends", "gone", "expected"),
    [
        ([COMPLETED, COMPLETED], [], DONE),
        ([COMPLETED, STOPPED], [], AGAIN),  # one was stopped for a newcomer before it was done
        ([STOPPED, STOPPED], [], AGAIN),
        ([COMPLETED], [1], AGAIN),  # what the lost one had to do is not done
        ([COMPLETED, LEFT], [], AGAIN),
        ([failed(0, consequence=True), LEFT], [], AGAIN),
        ([failed(0, consequence=True)], [1], AGAIN),
        ([failed(0)], [1], AGAIN),  # whatever its last words are, the loss took it along
        ([COMPLETED, failed(1)], [], Conclusion("again", True, failure(1))),
        ([failed(0), failed(1)], [], Conclusion("again", True, failure(0))),
        ([failed(0, consequence=True), failed(1)], [], Conclusion("again", True, failure(1))),
        ([failed(0, consequence=True), STOPPED], [], Conclusion("again", True, failure(0))),
    ],
)
def test_what_follows(ends: list[End], gone: list[int], expected: Conclusion) -> None:
    assert conclude(dict(enumerate(ends)), gone, 0, 1) == expected


def test_restarts_are_counted_and_nothing_else() -> None:
    for restarts, kind in ((1, "again"), (2, "over"), (3, "over")):
        conclusion = conclude({0: failed(0)}, [], restarts, 2)
        assert (conclusion.kind, conclusion.counted) == (kind, kind == "again")
        assert conclusion.failure == failure(0)
        assert conclude({0: failed(0)}, [1], restarts, 2) == AGAIN


def test_what_is_written_is_read() -> None:
    for end in (COMPLETED, STOPPED, LEFT, failed(1), failed(2, consequence=True)):
        assert End.from_json(end.to_json().encode()) == end
    for conclusion in (AGAIN, DONE, Conclusion("over", False, failure(1))):
        assert Conclusion.from_json(conclusion.to_json().encode()) == conclusion
