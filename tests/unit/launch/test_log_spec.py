"""Which stream goes where: torchrun's forms of saying it, and what they come to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdist.launch.logs import LogSpec, Streams, parse_local_ranks, parse_needles, parse_streams


@pytest.mark.parametrize(
    ("text", "streams"),
    [
        ("0", Streams.NONE),
        ("1", Streams.OUT),
        ("2", Streams.ERR),
        (" 3 ", Streams.ALL),
        ("0:1", {0: Streams.OUT}),
        ("0:3,1:0,2:1,13:2", {0: Streams.ALL, 1: Streams.NONE, 2: Streams.OUT, 13: Streams.ERR}),
    ],
)
def test_streams(text: str, streams: object) -> None:
    assert parse_streams(text) == streams


@pytest.mark.parametrize(
    "text", ["", "4", "-1", "out", "0:4", "0:1,", ",0:1", "0:1 1:2", "0:1,0:2", "x:1", "1,2", "\u0663"]
)
def test_streams_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither|twice"):
        parse_streams(text)


def test_local_ranks() -> None:
    assert parse_local_ranks("") is None
    assert parse_local_ranks(" 2, 0,2") == frozenset({0, 2})
    for text in (",", "1,", "a", "-1", "0:1"):
        with pytest.raises(ValueError, match="list of local ranks"):
            parse_local_ranks(text)


def test_needles() -> None:
    assert parse_needles("") == ()
    assert parse_needles("apple,orange") == ("apple", "orange")
    assert parse_needles("a,,b,,,c,") == ("a,b,", "c")


def test_nothing_said_means_the_terminal() -> None:
    spec = LogSpec()
    assert not spec.any_filed
    assert (spec.filed(0), spec.shown(0)) == (Streams.NONE, Streams.ALL)


def test_what_is_redirected_is_not_shown_unless_it_is_teed() -> None:
    spec = LogSpec(redirects={0: Streams.ALL, 1: Streams.OUT}, tee={1: Streams.ERR, 2: Streams.OUT, 3: Streams.NONE})
    assert spec.any_filed
    assert [spec.filed(rank) for rank in range(4)] == [Streams.ALL, Streams.ALL, Streams.OUT, Streams.NONE]
    assert [spec.shown(rank) for rank in range(4)] == [Streams.NONE, Streams.ERR, Streams.ALL, Streams.ALL]
    assert not LogSpec(redirects={0: Streams.NONE}).any_filed


@given(*(st.sampled_from(Streams) for _ in range(2)), st.sampled_from([None, frozenset(), frozenset({0})]))
def test_the_filter_concerns_the_terminal_alone(tee: Streams, redirects: Streams, shown: frozenset[int] | None) -> None:
    spec, unfiltered = LogSpec(redirects=redirects, tee=tee, shown_ranks=shown), LogSpec(redirects=redirects, tee=tee)
    assert spec.filed(0) == unfiltered.filed(0) == redirects | tee
    assert spec.shown(0) == (Streams.NONE if shown == frozenset() else unfiltered.shown(0))
    assert unfiltered.shown(0) == Streams.ALL & (~redirects | tee)


def test_ranks_that_a_node_has_not() -> None:
    spec = LogSpec(redirects={0: Streams.ALL, 4: Streams.OUT}, tee=Streams.ALL, shown_ranks=frozenset({1, 7}))
    assert spec.absent_ranks(8) == []
    assert spec.absent_ranks(4) == [4, 7]
