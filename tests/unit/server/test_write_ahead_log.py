"""A write-ahead log that a kill left: what was acknowledged is there, or a sentence says that it is not."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from sqlite_journal_kit import NOTE, batch, damage, damages_found, opened, written

from asyncdist_server.journal import sqlite_journal, write_ahead_log
from asyncdist_server.journal.batch import CLEAN, Batch
from asyncdist_server.journal.journal import JournalError
from asyncdist_server.journal.write_ahead_log import AcknowledgedRow

pytestmark = pytest.mark.usefixtures("nothing_stays_open")


def advice(refused: pytest.ExceptionInfo[JournalError]) -> str:
    """The command that a refusal names last."""
    return str(refused.value).rpartition(": ")[2]


def test_a_log_that_is_gone_is_told_until_one_says_to_go_on_without(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    written(first, close=False)
    (first / "journal.sqlite-wal").unlink()
    with pytest.raises(JournalError, match=r"-wal is gone, and with it what was last written to .*journal.sqlite"):
        opened(first)
    shutil.copytree(first, second)  # which nobody uses
    with pytest.raises(JournalError, match=r"-wal is gone") as refused:
        opened(second)
    subprocess.run(advice(refused), shell=True, check=True)
    shutil.copytree(second, tmp_path / "third")
    journal, rows = opened(tmp_path / "third")
    assert rows == []
    journal.close()


def acknowledge(path: Path, number: int) -> None:
    """Have the journal in `path` say that the rows up to `number` were acknowledged."""
    note = AcknowledgedRow(path / NOTE)
    note.read(bytes.fromhex(json.loads((path / "identity").read_text())["incarnation"]))
    note.begin(number)
    note.close()


def cut_short(original: Path, copy: Path, cut: int, acknowledged: int) -> None:
    """Make a copy whose write-ahead log has only `cut` bytes, though so many rows of it were acknowledged."""
    shutil.copytree(original, copy)
    log = copy / "journal.sqlite-wal"
    log.write_bytes(log.read_bytes()[:cut])
    acknowledge(copy, acknowledged)


def test_a_log_that_ends_before_what_was_acknowledged_is_refused_and_no_other_is(tmp_path: Path) -> None:
    """Cut at the end of each of its pages: each way that a transaction, or a part of one, can be missing."""
    whole = tmp_path / "whole"
    written(whole, close=False)
    size, page = (whole / "journal.sqlite-wal").stat().st_size, 4096 + 24
    found = set()
    for cut in range(32, size + 1, page):
        base = tmp_path / f"cut-{cut}"
        cut_short(whole, base, cut, 0)
        try:
            journal, rows = opened(base)
        except JournalError:
            continue  # not even the tables are there
        journal.close()
        found.add(len(rows))
        for acknowledged in range(1, 6):
            copy = tmp_path / f"cut-{cut}-{acknowledged}"
            cut_short(whole, copy, cut, acknowledged)
            if acknowledged > len(rows):
                with pytest.raises(JournalError, match=r"-wal is cut short behind byte \d+: ") as refused:
                    opened(copy)
                assert f"rows up to {acknowledged} that were acknowledged" in str(refused.value)
                assert f"those behind row {len(rows)} are gone; put the file back as it was" in str(refused.value)
            else:
                journal, again = opened(copy)
                assert again == rows
                journal.close()
    assert found == set(range(6))


def test_one_that_was_cut_short_is_whole_again_when_it_is_put_back_or_goes_on_without(tmp_path: Path) -> None:
    whole, cut, back, on = (tmp_path / name for name in ("whole", "cut", "back", "on"))
    written(whole, close=False)
    log = (whole / "journal.sqlite-wal").read_bytes()
    cut_short(whole, cut, len(log) // 2, 5)
    with pytest.raises(JournalError, match="is cut short"):
        opened(cut)
    for copy in (back, on):
        shutil.copytree(cut, copy)  # which nobody uses
    (back / "journal.sqlite-wal").write_bytes(log)
    journal, rows = opened(back)
    assert len(rows) == 5
    journal.close()
    with pytest.raises(JournalError, match="is cut short") as refused:
        opened(on)
    subprocess.run(advice(refused), shell=True, check=True)
    shutil.copytree(on, tmp_path / "third")
    journal, rows = opened(tmp_path / "third")
    assert 0 < len(rows) < 5
    journal.write(batch(len(rows) + 1, b"more"))
    journal.close()
    assert len(opened(tmp_path / "third")[1]) == len(rows) + 1


def test_a_journal_of_an_earlier_version_gets_its_note_when_it_is_read(tmp_path: Path) -> None:
    written(tmp_path, close=False)
    (tmp_path / NOTE).unlink()
    opened(tmp_path)[0].close()
    assert (tmp_path / NOTE).read_bytes().startswith(b"00000000000000000005 ")


@pytest.mark.parametrize("backwards", [False, True])
def test_an_older_copy_of_the_journal_itself_is_refused(tmp_path: Path, backwards: bool) -> None:
    """Also of one that was closed in order, which has no write-ahead log: a backup put there without `restore`."""
    written(tmp_path / "data")
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "data", copy)
    for number in (6, 7):
        journal, _ = opened(tmp_path / "data")
        journal.write(batch(number, b"more", flags=CLEAN))
        journal.close()
    old, new = (copy, tmp_path / "data") if backwards else (tmp_path / "data", copy)
    shutil.copy(old / "journal.sqlite", new / "journal.sqlite")
    if backwards:
        with pytest.raises(
            JournalError, match="had rows up to 7 that were acknowledged, and those behind row 5 are gone"
        ):
            opened(new)
    else:
        assert len(opened(new)[1]) == 7


@pytest.mark.parametrize("how", ["empty", "cut", "changed", "another's"])
def test_a_damaged_note_is_told_until_one_says_to_go_on_without(tmp_path: Path, how: str) -> None:
    written(tmp_path / "data")
    note = tmp_path / "data" / NOTE
    said = note.read_bytes()
    if how == "another's":
        AcknowledgedRow(note).begin(5)  # of a journal without an incarnation
    else:
        note.write_bytes({"empty": b"", "cut": said[:-1], "changed": said.replace(b"5 ", b"4 ")}[how])
    with pytest.raises(JournalError, match=f"{note} is damaged: it does not say which row") as refused:
        opened(tmp_path / "data")
    shutil.copytree(tmp_path / "data", tmp_path / "copy")  # which nobody uses
    subprocess.run(advice(refused).replace("/data/", "/copy/"), shell=True, check=True)
    assert len(opened(tmp_path / "copy")[1]) == 5


def test_the_note_is_written_when_the_row_is_on_the_disk_and_synced_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is ahead of the journal would have a journal refused that is whole."""
    journal, _ = opened(tmp_path)
    said: list[tuple[str, int]] = []

    def look(name: str) -> None:
        said.append((name, int((tmp_path / NOTE).read_bytes()[:20])))

    synced: list[int] = []
    monkeypatch.setattr(sqlite_journal, "failpoint", look)
    monkeypatch.setattr(write_ahead_log, "_sync", synced.append)
    journal.write(Batch(1, 1, 0, 1, [[], []]))
    assert said == [("begun", 0), ("written", 0), ("committed", 0)]
    assert (tmp_path / NOTE).read_bytes().startswith(b"00000000000000000002 ")
    assert not synced
    for _ in range(2):
        journal.tidy()
        assert len(synced) == 1
    journal.close()


def test_one_that_was_read_by_other_than_a_daemon_is_not_gone(tmp_path: Path) -> None:
    written(tmp_path, close=False)
    for _ in range(3):
        journal, rows = opened(tmp_path)
        assert len(rows) == 5
        journal.close()
    journal, _ = opened(tmp_path)
    journal.write(batch(6, b"last", flags=CLEAN))
    journal.close()
    assert not (tmp_path / "journal.sqlite-wal").exists()
    journal, rows = opened(tmp_path)
    assert len(rows) == 6
    journal.close()


def test_every_damaged_byte_of_it_is_found_or_harmless(tmp_path: Path) -> None:
    written(tmp_path / "data", close=False)
    size = (tmp_path / "data" / "journal.sqlite-wal").stat().st_size
    offsets = [*range(56), *range(56, size, 397)]  # each of the headers of the file and of the first page
    found = damages_found(tmp_path / "data", "journal.sqlite-wal", offsets)
    assert found > size // 397 // 2


def test_one_may_go_on_without_what_is_behind_the_damage(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    written(first, close=False)
    log = first / "journal.sqlite-wal"
    damage(log, log.stat().st_size // 2)
    with pytest.raises(JournalError, match=r"damaged behind byte \d+, and more was written later"):
        opened(first)
    shutil.copytree(first, second)  # which nobody uses
    with pytest.raises(JournalError, match=r"damaged behind byte \d+, and more was written later") as refused:
        opened(second)
    subprocess.run(advice(refused), shell=True, check=True)
    shutil.copytree(second, tmp_path / "third")
    journal, rows = opened(tmp_path / "third")
    assert 0 < len(rows) < 5
    journal.close()
