"""Which path ranks take, from what they say of themselves; and that hostile bytes are refused."""

from __future__ import annotations

import msgpack
import pytest

from asyncdist.errors import DistBackendError, RemoteProtocolError
from asyncdist.gpu.backend import choose_path, member_of
from asyncdist.gpu.path import Member


def members(*said: tuple[str, str, int, str]) -> tuple[Member, ...]:
    return tuple(Member(host, (gpu,), nccl, wish) for host, gpu, nccl, wish in said)


@pytest.mark.parametrize(
    ("said", "path"),
    [
        ([("a", "0", 23004, "")], "nccl"),
        ([("a", "0", 23004, ""), ("a", "1", 23004, "")], "nccl"),
        ([("a", "0", 23004, ""), ("b", "0", 23004, "")], "nccl"),
        ([("a", "0", 23004, ""), ("a", "0", 23004, "")], "ipc"),
        ([("a", "0", 0, ""), ("a", "0", 0, "")], "ipc"),
        ([("a", "0", 23004, ""), ("a", "0", 23004, ""), ("b", "0", 23004, "")], "staged"),
        ([("a", "0", 23004, ""), ("a", "1", 0, "")], "staged"),
        ([("a", "0", 23004, ""), ("a", "0", 0, "")], "ipc"),
        ([("a", "0", 23004, "staged"), ("a", "1", 23004, "staged")], "staged"),
        ([("a", "0", 23004, "nccl"), ("a", "0", 23004, "nccl")], "nccl"),
    ],
)
def test_the_best_that_all_can_take(said: list[tuple[str, str, int, str]], path: str) -> None:
    assert choose_path(members(*said), tuple(range(len(said)))) == path


def test_ranks_that_ask_for_different_paths() -> None:
    with pytest.raises(DistBackendError, match="rank 4 nccl, rank 7 the best"):
        choose_path(members(("a", "0", 1, "nccl"), ("a", "1", 1, "")), (4, 7))
    with pytest.raises(DistBackendError, match="rank 7 has no NCCL"):
        choose_path(members(("a", "0", 1, "nccl"), ("a", "1", 0, "nccl")), (4, 7))


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        msgpack.packb(3),
        msgpack.packb(["host", ["0"], 1]),
        msgpack.packb(["host", 3, 1, "", False]),
        msgpack.packb([1, ["0"], 1, "", False]),
        msgpack.packb(["host", ["0"], "x", "", False]),
        msgpack.packb(["host", ["0"], 1, "teleport", False]),
        msgpack.packb(["host", ["0"], 1, [], False]),
    ],
)
def test_what_cannot_be_understood(message: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="rank 5"):
        member_of(5, message)
