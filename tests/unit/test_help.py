"""`help` of a public function says what must be known to call it, without another page."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import asyncdist
from asyncdist import blocking
from asyncdist.concurrency.deadline import INHERIT

FUNCTIONS = [name for name in asyncdist.__all__ if inspect.isfunction(getattr(asyncdist, name))]
TIMED = [name for name in FUNCTIONS if "Work" in str(inspect.signature(getattr(asyncdist, name)).return_annotation)]
TIMED.remove("batch_isend_irecv")  # a list of P2POps: what it raises is said in its own words


def help_of(name: str) -> str:
    return inspect.getdoc(getattr(asyncdist, name)) or ""


@pytest.mark.parametrize("name", TIMED)
def test_errors_time_outs_and_cancelling_are_said(name: str) -> None:
    text, parameters = help_of(name), inspect.signature(getattr(asyncdist, name)).parameters
    for word in ("TypeError", "ValueError", "CollectiveMismatchError" if of_all(name) else "PeerLostError", "ancel"):
        assert word in text
    assert "timeout" in text or name in ("average_gradients", "broadcast_parameters")
    if parameters.keys() & {"tensor", "array", "input", "output", "input_tensor"} and "(arrays" not in text:
        assert "buffer protocol" in text
        assert "dtype" in text
    for root in parameters.keys() & {"src", "dst"}:
        assert f"`{root}`" in text
    assert text.count("Issued at the call") <= 1  # completed once


@pytest.mark.parametrize("name", [name for name in TIMED if "object" in name])
def test_functions_of_objects_say_which_can_be_sent(name: str) -> None:
    text = " ".join(help_of(name).split())
    for word in ("frozenset", "allow_pickle", "RemoteProtocolError", "`max_bytes` (1 GiB"):
        assert word in text
    assert "buffer protocol" not in text


@pytest.mark.parametrize("name", ["all_gather_array", "gather_array", "broadcast_array", "scatter_array"])
def test_functions_of_arrays_of_unknown_size_say_what_bounds_them(name: str) -> None:
    assert "`max_total_bytes` (8 GiB)" in " ".join(help_of(name).split())


@pytest.mark.parametrize(
    ("name", "lost"), [("isend", False), ("send_object_list", False), ("irecv", True), ("recv", True)]
)
def test_only_receives_expire_without_loss(name: str, lost: bool) -> None:
    assert ("nothing is lost" in help_of(name)) is lost
    assert ("the message is withdrawn" in help_of(name)) is not lost


@pytest.mark.parametrize(("name", "withdrawn"), [("isend", False), ("send", True), ("irecv", False), ("recv", True)])
def test_each_form_of_a_message_says_what_cancelling_its_waiter_does(name: str, withdrawn: bool) -> None:
    assert ("waiter is cancelled before message and receive have matched" in help_of(name)) is withdrawn
    assert ("waiter ends only its waiting" in help_of(name)) is not withdrawn


def of_all(name: str) -> bool:
    return inspect.signature(getattr(asyncdist, name)).parameters["timeout"].default is INHERIT


@pytest.mark.parametrize(
    "beginning",
    [
        "All ranks of the group call it",
        "Raises TypeError and ValueError at the call for wrong arguments, before",
        "Raises TypeError and ValueError at the call for wrong arguments, PeerLost",
        "Arrays are numpy's",
        "None, bool, int, float",
        "Objects encoded beyond",
        "Lists of arrays of one dtype",
    ],
)
def test_what_functions_share_is_said_in_the_same_words(beginning: str) -> None:
    said = {" ".join(text.split()) for name in TIMED for text in help_of(name).split("\n\n") if beginning in text}
    extra = " Which dtypes an `op` takes is said at `ReduceOp`."
    shared = {text[text.index(beginning) :].removesuffix(extra) for text in said}
    assert len(shared) == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_lines_fit_a_terminal_and_nothing_is_left_out(name: str) -> None:
    text = help_of(name)
    assert not [line for line in text.splitlines() if len(line) > 160]
    assert len(text) > 20


@pytest.mark.parametrize("name", [name for name in TIMED if name in blocking.__all__])
def test_blocking_functions_do_not_speak_of_awaiting(name: str) -> None:
    text = inspect.getdoc(getattr(blocking, name)) or ""
    assert "`await work`" not in text
    if "Issued at the call" in help_of(name):
        assert "Waits and returns" in text or "returns what is to be waited for" in text


def test_without_docstrings_it_is_imported_all_the_same() -> None:
    done = subprocess.run([sys.executable, "-OO", "-c", "import asyncdist.blocking"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
