"""Groups in launched, spawned and plainly forked processes: `init_process_group()` finds everything by itself."""

from __future__ import annotations

import multiprocessing
import os
import signal
import textwrap
from pathlib import Path

import numpy as np
import pytest
from jobs import free_port
from launching import DEADLINE_S, run, write_script

import asyncdist as dist
from asyncdist.launch.spawn import spawn

SUM = """
    import numpy as np
    import asyncdist as dist

    async def main():
        async with dist.init_process_group():
            x = np.array([dist.get_rank() + 1])
            await dist.all_reduce(x)
            print(dist.get_world_size(), x[0])

    dist.run(main())
"""


async def sum_of_ranks() -> tuple[int, int]:
    async with dist.init_process_group(timeout=DEADLINE_S):
        x = np.array([dist.get_rank() + 1])
        await dist.all_reduce(x)
        return dist.get_rank(), int(x[0])


def spawned(local_rank: int, folder: str) -> None:
    rank, result = dist.run(sum_of_ranks())
    Path(folder, str(rank)).write_text(str(result))


def started_plainly(rank: int, port: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    spawned(rank, folder)


def sums(folder: Path) -> list[str]:
    return [(folder / name).read_text() for name in sorted(os.listdir(folder))]


@pytest.fixture
def no_job_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ASYNCDIST_STORE", "ASYNCDIST_TOKEN", "ASYNCDIST_TOKEN_FILE", "ASYNCDIST_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


def test_launched(tmp_path: Path) -> None:
    done = run("--nproc-per-node", "3", write_script(tmp_path, SUM))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] 3 6" for rank in range(3)]


def test_launched_again_after_a_failure(tmp_path: Path) -> None:
    fail_once = """
        import os, sys
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
            sys.exit(1)
    """
    script = write_script(tmp_path, textwrap.dedent(fail_once) + textwrap.dedent(SUM))
    done = run("--nproc-per-node", "2", "--grace", "0", "--max-restarts", "1", script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 2 3", "[rank 1] 2 3"]


def test_the_death_of_one_is_raised_by_the_others_within_the_grace(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, signal
        import numpy as np
        import asyncdist as dist

        async def main():
            async with dist.init_process_group():
                x = np.zeros(1)
                try:
                    await dist.all_reduce(x)  # rank 1 may be done with it, and dead, before the others are
                    if dist.get_rank() == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    await dist.all_reduce(x)
                except (dist.PeerLostError, dist.GroupAbortedError) as error:
                    print("rank 1" in str(error))
                    raise

        dist.run(main())
        """,
    )
    done = run("--nproc-per-node", "3", "--grace", "60", script)
    assert done.returncode == 128 + signal.SIGKILL
    assert sorted(done.stdout.splitlines()) == ["[rank 0] True", "[rank 2] True"], done.stderr
    assert "rank 1 failed first: killed by SIGKILL" in done.stderr


def test_the_report_is_of_the_cause_however_slowly_it_unwinds(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import atexit, time
        import numpy as np
        import asyncdist as dist

        async def main():
            async with dist.init_process_group():
                await dist.barrier()
                if dist.get_rank() == 1:
                    atexit.register(time.sleep, 1)
                    raise ZeroDivisionError("the cause")
                await dist.barrier()

        dist.run(main())
        """,
    )
    done = run("--nproc-per-node", "2", "--grace", "60", script)
    assert done.returncode == 1
    assert "rank 1 failed first" in done.stderr
    assert done.stderr.endswith("[rank 1] ZeroDivisionError: the cause\n")


@pytest.mark.slow("spawns interpreters")
@pytest.mark.usefixtures("no_job_in_the_environment")
def test_spawned(tmp_path: Path) -> None:
    spawn(spawned, (str(tmp_path),), nprocs=3)
    assert sums(tmp_path) == ["6", "6", "6"]


@pytest.mark.usefixtures("no_job_in_the_environment")
def test_plain_multiprocessing(tmp_path: Path) -> None:
    port = free_port()
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=started_plainly, args=(rank, port, str(tmp_path))) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
        assert process.exitcode == 0
    assert sums(tmp_path) == ["3", "3"]
