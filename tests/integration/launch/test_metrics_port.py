"""`--metrics-port`: a job whose ranks compute and hang is asked all the same."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from launching import DEADLINE_S, pids_in, run, running, until, write_script

SCRIPT = """
import asyncio, os, sys, time
import numpy as np
import asyncdist as dist

async def main():
    async with dist.init_process_group() as group:
        for _ in range(5):
            await group.all_reduce(np.ones(10, np.float32))
        open(f"{sys.argv[1]}/{os.getpid()}.pid", "w").close()
        while group.rank == 1 and not os.path.exists(f"{sys.argv[1]}/scraped"):
            time.sleep(0.01)  # blocks the event loop
        await group.barrier()

asyncio.run(main())
"""


def scrape(address: str) -> str:
    with urllib.request.urlopen(address, timeout=DEADLINE_S) as answer:
        text: str = answer.read().decode()
        return text


def told(stream: IO[bytes]) -> Iterator[str]:
    for line in stream:
        yield line.decode()


@pytest.mark.slow("the launcher imports aiohttp, and two ranks start")
def test_a_job_is_asked_while_a_rank_is_blocked(tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT)
    with running("--nproc-per-node=2", "--metrics-port=0", script, str(tmp_path)) as process:
        assert process.stderr is not None
        said = next(line for line in told(process.stderr) if "metrics at" in line)
        address = re.findall(r"http://\S+", said)[0]
        pids_in(tmp_path, 2)
        text = scrape(address)
        assert 'asyncdist_operation_seconds_count{operation="all_reduce",size="1KiB"} 10.0' in text
        for rank in (0, 1):
            assert f'asyncdist_rank_answers{{rank="{rank}"}} 1.0' in text
            assert f'asyncdist_rank_operations_total{{rank="{rank}"}} 5.0' in text
        age = re.compile(r'rank_oldest_operation_seconds\{rank="0"\} (?!0\.0\n)')
        until(lambda: bool(age.search(scrape(address))), "rank 0 to wait for rank 1")
        (tmp_path / "scraped").touch()
        _, rest = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, rest


def test_a_port_that_is_none_ends_the_launcher_at_once(tmp_path: Path) -> None:
    result = run("--metrics-port=localhost", write_script(tmp_path, ""))
    assert result.returncode == 2
    assert "--metrics-port" in result.stderr
