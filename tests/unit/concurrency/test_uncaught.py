"""A rank that ends because of another prints two lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from asyncdist.concurrency.trace import shorten_if_uncaught
from asyncdist.errors import CollectiveTimeoutError, GroupAbortedError, PeerLostError

LAUNCHED = {"TORCHELASTIC_RUN_ID": "job"}


def lost() -> PeerLostError:
    return PeerLostError("rank 0 lost rank 1", 1)


def printed(error: BaseException, environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What Python would print of an uncaught `error`."""
    try:
        raise error
    except BaseException:
        kind, value, where = sys.exc_info()
    assert kind is not None
    assert value is not None
    shorten_if_uncaught(error, environ)
    sys.excepthook(kind, value, where)
    return capsys.readouterr().err.splitlines()


@pytest.fixture(autouse=True)
def hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


@pytest.mark.parametrize("error", [lost(), ExceptionGroup("tasks", [lost(), GroupAbortedError("x")])])
def test_a_consequence_is_two_lines(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(error, LAUNCHED, capsys) == [
        "asyncdist.errors.PeerLostError: rank 0 lost rank 1",
        "(this rank ended because of that; its traceback: ASYNCDIST_DEBUG=INFO prints it)",
    ]


def test_the_traceback_is_in_the_error_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "error.json"
    environ = LAUNCHED | {"TORCHELASTIC_ERROR_FILE": str(path)}
    assert f"its traceback: {path}, or" in printed(lost(), environ, capsys)[1]
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "rank 0 lost rank 1"
    assert "raise error" in message["extraInfo"]["py_callstack"]
    assert str(path) not in printed(lost(), environ, capsys)[1]  # what is there is the script's own


@pytest.mark.parametrize(
    ("error", "environ"),
    [
        (lost(), {}),
        (lost(), LAUNCHED | {"ASYNCDIST_DEBUG": "INFO"}),
        (KeyError("cause"), LAUNCHED),
        (CollectiveTimeoutError("late"), LAUNCHED),
        (ExceptionGroup("tasks", [lost(), KeyError("cause")]), LAUNCHED),
    ],
)
def test_other_errors_are_whole(error: Exception, environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert any("Traceback" in line for line in printed(error, environ, capsys))


def test_one_hook_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    printed(lost(), LAUNCHED, capsys)
    hook = sys.excepthook
    printed(GroupAbortedError("x"), LAUNCHED, capsys)
    assert sys.excepthook is hook


def test_another_error_that_ends_the_process_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    shorten_if_uncaught(lost(), LAUNCHED)
    assert any("Traceback" in line for line in printed(KeyError("later"), {}, capsys))
