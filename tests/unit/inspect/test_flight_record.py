"""Dumps as torch's Flight Recorder has them; torch's analyzer reads them in `integration/torch`."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from dump_kit import dumped

from asyncdist.cli import main as command
from asyncdist.inspect.flight_record import flight_records


def test_each_rank_begins_where_all_have_something(tmp_path: Path) -> None:
    dumped(tmp_path, differ=False)
    documents = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(3)]
    del documents[1]["entries"][: next(i for i, one in enumerate(documents[1]["entries"]) if one.get("sequence") == 1)]
    found = flight_records(documents)
    first = {rank: record["entries"][0]["profiling_name"] for rank, record in found.items()}
    assert first == dict.fromkeys(range(3), "gloo:_all_gather_base")
    (frame,) = found[0]["entries"][0]["frames"]
    assert Path(frame["filename"]).name == "dump_kit.py"


def test_what_is_no_dump_is_refused(tmp_path: Path) -> None:
    runner = CliRunner()
    assert (
        "no dump that can be read (rank_0.json"
        in runner.invoke(command, ["flight-record", str(tmp_path), str(tmp_path)]).output
    )
    (tmp_path / "rank_0.json").write_text('{"format": "another"}')
    said = runner.invoke(command, ["flight-record", str(tmp_path), str(tmp_path)]).output
    assert "rank_0.json: no dump of asyncdist" in said


def test_a_rank_that_was_ended_while_it_wrote_its_first_dump_is_read(tmp_path: Path) -> None:
    dumped(tmp_path, differ=False)
    (tmp_path / "rank_1.json").rename(tmp_path / "rank_1.1.json")
    assert CliRunner().invoke(command, ["flight-record", str(tmp_path), str(tmp_path / "out")]).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["rank_0", "rank_1", "rank_2"]
