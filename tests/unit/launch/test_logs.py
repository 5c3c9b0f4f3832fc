"""Folders of runs, attempts and workers, and what happens when one cannot be made."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from asyncdist.errors import LaunchError
from asyncdist.launch import logs as logs_module
from asyncdist.launch.logs import MAX_NAME_CHARACTERS, Logs, LogSpec, Streams, run_folder_name
from asyncdist.launch.writers import OutputWriter

Make = Callable[[LogSpec], tuple[Logs, list[str]]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[Logs] = []
    terminal = OutputWriter(os.open(os.devnull, os.O_WRONLY))

    def make(spec: LogSpec) -> tuple[Logs, list[str]]:
        said: list[str] = []
        made.append(Logs(spec, terminal, terminal, said.append))
        return made[-1], said

    yield make
    for logs in made:
        await logs.close(60)
    await terminal.close(60)
    os.close(terminal._fd)


def made_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("run_id", "name"),
    [
        ("job", "job"),
        ("a/b c", "a_b_c"),
        ("../../etc", "_.._etc"),
        ("..", "run"),
        ("", "run"),
        ("\u00e4", "_"),
        ("x" * MAX_NAME_CHARACTERS, "x" * MAX_NAME_CHARACTERS),
        ("x" * (MAX_NAME_CHARACTERS + 1), "x" * MAX_NAME_CHARACTERS),
    ],
)
def test_names_of_runs(run_id: str, name: str) -> None:
    assert run_folder_name(run_id, 0, 1) == name
    assert run_folder_name(run_id, 3, 4) == f"{name}_node3"


async def test_a_folder_for_each_run_attempt_and_worker(make: Make, tmp_path: Path) -> None:
    spec = LogSpec(str(tmp_path / "new" / "logs"), {0: Streams.ALL}, {1: Streams.ERR}, stderr_needles=("x",))
    for run in ("job", "job_2"):
        logs, said = make(spec)
        logs.check()
        logs.open("job", 0, 1, 2)
        assert said == [f"logs in {tmp_path / 'new' / 'logs' / run}"]
        for attempt in range(2):
            logs.start_attempt(attempt)
            for rank in range(2):
                for destination in logs.destinations(rank):
                    destination.close()
        folder = tmp_path / "new" / "logs" / run
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        each = ["0/stderr.log", "0/stdout.log", "1/stderr.log", "filtered_stderr.log"]
        assert made_files(folder) == [f"attempt_{attempt}/{name}" for attempt in range(2) for name in each]
        assert logs.files(1) == [str(folder / "attempt_1/1/stderr.log")]


async def test_numbers_of_runs_of_one_name_end(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs_module, "MAX_SAME_NAMES", 2)
    said: list[str] = []
    for _ in range(3):
        logs, said = make(LogSpec(str(tmp_path)))
        logs.open("job", 0, 1, 1)
    assert sorted(os.listdir(tmp_path)) == ["job", "job_2"]
    assert said == ["cannot make a folder for logs: 2 runs are called job; what was to go there goes to the terminal"]


async def test_without_a_directory_it_is_a_temporary_one(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    logs, said = make(LogSpec(shown_ranks=frozenset({0})))
    logs.check()
    logs.open("job", 0, 1, 1)
    assert (said, os.listdir(tmp_path)) == ([], [])
    logs, said = make(LogSpec(tee=Streams.OUT))
    logs.check()
    logs.open("job", 0, 1, 1)
    (folder,) = (tmp_path / name for name in os.listdir(tmp_path))
    assert said == [f"logs in {folder / 'job'}"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_a_directory_that_nothing_goes_to_is_worth_a_word(make: Make, tmp_path: Path) -> None:
    logs, said = make(LogSpec(str(tmp_path), shown_ranks=frozenset({1, 2})))
    logs.open("job", 0, 1, 2)
    assert said == [
        "local ranks [2] have log options but no worker on this node, which has 2",
        f"logs in {tmp_path / 'job'}",
        "no output goes there: --redirects 3 or --tee 3 say what does",
    ]


async def test_filters_without_a_tee_are_worth_a_word(make: Make, tmp_path: Path) -> None:
    for tee, words in ((Streams.NONE, 1), (Streams.OUT, 0)):
        logs, said = make(LogSpec(str(tmp_path), tee=tee, redirects=Streams.ALL, stdout_needles=("x",)))
        logs.open("job", 0, 1, 1)
        assert len([text for text in said if "look at teed output" in text]) == words


async def test_dev_null_means_no_files(make: Make) -> None:
    logs, said = make(LogSpec(os.devnull, Streams.ALL, Streams.OUT))
    logs.check()
    logs.open("job", 0, 1, 1)
    logs.start_attempt(0)
    assert [(each.file, each.terminal is None) for each in logs.destinations(0)] == [(None, False)] * 2
    assert not said
    assert logs.folder(0) is None


async def test_a_log_directory_that_cannot_be_used(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for path, message in (("file", "is not a directory"), ("file/below", "cannot make .*Not a directory")):
        with pytest.raises(LaunchError, match=message):
            make(LogSpec(str(tmp_path / path)))[0].check()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(LaunchError, match="cannot write to the log directory"):
        make(LogSpec(str(tmp_path)))[0].check()


@pytest.mark.parametrize("broken", ["attempt_0", "attempt_0/0", "attempt_0/0/stdout.log"])
async def test_what_has_no_file_is_shown(make: Make, tmp_path: Path, broken: str) -> None:
    logs, said = make(LogSpec(str(tmp_path), redirects=Streams.ALL, shown_ranks=frozenset({0})))
    logs.open("job", 0, 1, 2)
    stands_there = tmp_path / "job" / broken
    if broken == "attempt_0":
        stands_there.touch()
    logs.start_attempt(0)
    if broken != "attempt_0":
        stands_there.parent.mkdir(exist_ok=True)
        stands_there.touch()
    stdout, stderr = logs.destinations(0)
    assert stdout.file is None
    assert stdout.terminal is not None
    assert (stderr.file is None) == (broken != "attempt_0/0/stdout.log")
    hidden, _ = logs.destinations(1)
    assert hidden.terminal is None
    assert len(said) == 2  # where the logs are, and the first of what went wrong
    assert said[1].startswith(f"cannot make {stands_there}: ")
    for destination in (stdout, stderr, hidden, _):
        destination.close()
