"""What torch's own analyzer finds in dumps of ours."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from dump_kit import dumped
from torch_later import Later

from asyncdist.cli import main as command

fr_trace: Any = Later("torch.distributed.flight_recorder.fr_trace")


@pytest.mark.peers
@pytest.mark.parametrize("differ", [False, True])
def test_the_analyzer_of_torch_names_the_rank_and_the_operation(
    tmp_path: Path, differ: bool, caplog: pytest.LogCaptureFixture
) -> None:
    dumped(tmp_path / "dumps", differ=differ)
    done = CliRunner().invoke(command, ["flight-record", str(tmp_path / "dumps"), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    logging.getLogger("FlightRecorder").propagate = True
    with caplog.at_level(logging.INFO):
        fr_trace.main([str(tmp_path / "out"), "-o", str(tmp_path / "db")])
    assert "all_reduce" in caplog.text
    assert ("COLLECTIVE_TYPE_MISMATCH" if differ else "missing ranks: {2}") in caplog.text
    assert "gloo:broadcast" not in caplog.text  # what all have done alike is no news
