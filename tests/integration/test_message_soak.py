"""Random messages among processes, judged against a model; `make soak` runs them for ten minutes on each transport."""

from __future__ import annotations

import sys

import pytest
from message_program import LAST, Notes, problems_of
from message_soak import TRANSPORTS, run_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and shares memory")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_acknowledged_is_received_once_and_in_order(transport: str) -> None:
    notes, problems = run_program(1, transport, messages=20)
    assert not problems
    assert sum(map(len, notes[0].sent.values())) > 10


@pytest.mark.parametrize(
    ("got", "problem"),
    [
        ([[1, 16], [2, 16]], "acknowledged and lost: [[4294967295, 16]]"),
        ([[2, 16], [LAST, 16]], "acknowledged and lost: [[1, 16]]"),
        ([[1, 16], [2, 16], [2, 16], [LAST, 16]], "twice"),
        ([[2, 16], [1, 16], [LAST, 16]], "out of order"),
        ([[1, 16], [2, 16], [3, 16], [LAST, 16]], "not acknowledged"),
    ],
)
def test_what_is_wrong_is_found(got: list[list[int]], problem: str) -> None:
    sender = Notes(0, sent={"1 0": [[1, 16], [2, 16], [LAST, 16]]}, whole=True)
    (found,) = problems_of([sender, Notes(1, got={"0 0": got}, whole=True)])
    assert problem in found
    assert not problems_of([sender, Notes(1, got={"0 0": sender.sent["1 0"]}, whole=True)])
    thrown = Notes(1, got={"0 0": sender.sent["1 0"][1:]}, thrown={"0 0": 1}, whole=True)
    assert not problems_of([sender, thrown])
