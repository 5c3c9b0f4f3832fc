"""`--dump-dir`: what ranks write before their group is torn down, and before SIGTERM ends them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from launching import DEADLINE_S, pids_in, run, running, write_script

SCRIPT = """
import asyncio, os, sys
import numpy as np
import asyncdist as dist

async def main():
    async with dist.init_process_group() as group:
        await group.barrier()
        open(f"{sys.argv[1]}/{os.getpid()}.pid", "w").close()
        if group.rank == 1 and sys.argv[2] == "fails":
            os._exit(3)
        if group.rank == 1:
            await dist.HashStore().get("never")
        await group.all_reduce(np.ones(3))

if sys.argv[2] == "asyncio":
    asyncio.run(main())
dist.run(main())
"""


def test_a_lost_rank_makes_the_others_write_what_they_did(tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT)
    options = ["--nproc-per-node=2", "--rdzv-id=job", f"--dump-dir={tmp_path / 'dumps'}"]
    ended = run(*options, script, str(tmp_path), "fails")
    assert ended.returncode == 3
    (path,) = (tmp_path / "dumps").rglob("*.json")
    assert path.relative_to(tmp_path / "dumps") == Path("job.0/rank_0.json")
    document = json.loads(path.read_text())
    assert "rank 1" in document["reason"]
    assert document["entries"][-1]["operation"] == "group aborted"
    waiting = [entry for entry in document["entries"] if entry["operation"] == "all_reduce"]
    assert [entry["site"] for entry in waiting] == [f"{script}:14"]
    said = f"dumps in {path.parent} say: Rank 1 is lost: the connection was closed without a goodbye"
    assert said in ended.stderr, ended.stderr
    place = f"{Path(script).name}:14"
    assert f"It had not called all_reduce #1 of group default, in which rank 0 waited at {place}." in ended.stderr
    assert "dumps in" not in run(*options, "--no-python", "false").stderr  # they are of an earlier run of that name


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_sigterm_writes_what_is_under_way_and_ends_the_ranks(tmp_path: Path, loop: str) -> None:
    script = write_script(tmp_path, SCRIPT)
    options = ["--nproc-per-node=2", "--rdzv-id=job", f"--dump-dir={tmp_path / 'dumps'}"]
    with running(*options, script, str(tmp_path), loop) as process:
        pids_in(tmp_path, 2)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGTERM, said
    dumps = [json.loads((tmp_path / "dumps" / "job.0" / f"rank_{rank}.json").read_text()) for rank in (0, 1)]
    reasons = [dump["reason"] for dump in dumps]
    assert "SIGTERM" in reasons  # of the other it may be that it has lost this one
    for rank, reason in enumerate(reasons):
        if reason == "SIGTERM":
            last = [entry for entry in dumps[rank]["entries"] if "ended" not in entry][-1]
            assert last["kind"] == ("collective", "store")[rank]
