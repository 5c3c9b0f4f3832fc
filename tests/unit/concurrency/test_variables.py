"""A misspelt environment variable is told, once."""

from __future__ import annotations

import logging

import pytest
from click.testing import CliRunner

import asyncdist as dist
from asyncdist.cli import main
from asyncdist.concurrency import trace as variables
from asyncdist.concurrency.trace import misspelt


@pytest.fixture(autouse=True)
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "_told", set())


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("ASYNCDIST_CHEKC", "ASYNCDIST_CHECK"),
        ("ASYNCDIST_TIMEOUT_S", "ASYNCDIST_TIMEOUT"),
        ("ASYNCDIST_SPIN", "ASYNCDIST_SPIN_US"),
        ("ASYNCDIST_TOKENFILE", "ASYNCDIST_TOKEN_FILE"),
    ],
)
def test_what_resembles_a_variable_is_named_with_it(variable: str, meant: str) -> None:
    assert misspelt({variable: "1", meant: "1"}) == {variable: meant}


@pytest.mark.parametrize("variable", ["ASYNCDIST_CHECK", "ASYNCDIST_SERVER_PROT", "ASYNCDIST_FEWER_CASES", "CHEKC"])
def test_others_are_not(variable: str) -> None:
    assert misspelt({variable: "1"}) == {}


async def test_joining_a_world_tells_it_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("ASYNCDIST_CHEKC", "full")
    caplog.set_level(logging.WARNING, "asyncdist")
    async with dist.HashStore() as store:
        for _ in range(2):
            async with dist.init_process_group(store=store, rank=0, world_size=1):
                pass
    assert [record.getMessage() for record in caplog.records] == [
        "environment variable ASYNCDIST_CHEKC is not known and has no effect: did you mean ASYNCDIST_CHECK?"
    ]
    variables._told.clear()
    monkeypatch.setenv("LOCAL_RANK", "1")
    caplog.clear()
    variables.warn_of_misspelt({"ASYNCDIST_CHEKC": "full", "LOCAL_RANK": "1"})
    assert not caplog.records


def test_the_launcher_tells_it() -> None:
    result = CliRunner().invoke(main, ["run", "--standalone", "--nnodes=2", "x"], env={"ASYNCDIST_TIMEUOT": "5"})
    said = "ASYNCDIST_TIMEUOT is not known and has no effect: did you mean ASYNCDIST_TIMEOUT?"
    assert f"asyncdist run: environment variable {said}" in result.output
