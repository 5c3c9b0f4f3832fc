"""The store of a job goes away while the workers are well: the launchers go on without it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from jobs import free_port
from launching import DEADLINE_S, daemon, pids_in, running, until, write_script

WORKER = """
    import os, pathlib, sys, time
    folder = pathlib.Path(sys.argv[1])
    rank = os.environ["RANK"]
    (folder / f"{os.getpid()}.pid").touch()
    steps = 0
    while not (folder / "done").exists():
        if (folder / f"fail{rank}").exists():
            sys.exit(7)
        steps += 1
        part = folder / f"{rank}.part"
        part.write_text(str(steps))
        part.rename(folder / f"{rank}.steps")
        time.sleep(0.01)
"""

TALKING = """
    import asyncio, os, pathlib, sys
    import numpy as np
    import asyncdist as dist

    async def main():
        folder = pathlib.Path(sys.argv[1])
        async with dist.init_process_group() as group:
            (folder / f"{os.getpid()}.pid").touch()
            steps, done = 0, np.zeros(1)
            while not done[0]:
                done[0] = (folder / "done").exists()
                await group.all_reduce(done)
                await asyncio.sleep(0.01)
                steps += 1
                part = folder / f"{group.rank}.part"
                part.write_text(str(steps))
                part.rename(folder / f"{group.rank}.steps")

    dist.run(main())
"""

OUTAGE_S = float(os.environ.get("OUTAGE_S", "3"))
"""600, with `-o faulthandler_timeout=0`, for what is promised of long outages; 3 is more than the times below."""

KINDS = {"fixed": "--nnodes=2", "elastic": "--nnodes=2:3"}
KEEP_ALIVE_S = 1.0
TIMES = f"--rdzv-conf=last_call_timeout=0.2,keep_alive_interval={KEEP_ALIVE_S},keep_alive_max_attempt=1"
OFTEN = "asyncdist.launch.rendezvous.job_store:LOOK_S=0.5"
"""How often launchers look at their store, and for how long: each waits for that twice before it ends."""

END_S = 30.0
"""Launchers without a store end within this; the machine may be busy."""

Launcher = subprocess.Popen[bytes]


class Job:
    """Two launchers on a daemon that is started, killed and started again."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self.script = write_script(folder, WORKER)
        self.folder = folder
        self.port = free_port()
        self.launchers: list[Launcher] = []

    def start(self, kind: str, *options: str, ranks: bool = False, nnodes: str = "", limits: str = "") -> None:
        """Start both launchers; with `ranks` each has its node rank."""
        times = [TIMES] if kind == "elastic" else []
        common = [f"--nnodes={nnodes}" if nnodes else KINDS[kind], *times, "--rdzv-id=job", "--grace=0.2", *options]
        for node in range(2):
            own = [f"--node-rank={node}"] if ranks else []
            arguments = [*common, *own, self.script, str(self.folder)]
            process = running(*arguments, limits=f"{OFTEN} {limits}", ASYNCDIST_STORE=f"127.0.0.1:{self.port}")
            self.launchers.append(self._stack.enter_context(process))
        pids_in(self.folder, 2)
        self.until_steps(3)

    def steps(self) -> list[int]:
        paths = [self.folder / f"{rank}.steps" for rank in range(2)]
        return [int(path.read_text()) if path.exists() else 0 for path in paths]

    def until_steps(self, more: int) -> None:
        aim = [count + more for count in self.steps()]
        until(lambda: all(a >= b for a, b in zip(self.steps(), aim, strict=True)), "steps")

    def go_on_for(self, seconds: float) -> None:
        """See steps on both nodes until that time has passed, in the same processes."""
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            self.until_steps(1)
        assert len(list(self.folder.glob("*.pid"))) == 2, "workers were started anew"

    def finish(self) -> list[tuple[int, str]]:
        (self.folder / "done").touch()
        return self.outcomes()

    def outcomes(self) -> list[tuple[int, str]]:
        results = []
        for process in self.launchers:
            _, stderr = process.communicate(timeout=DEADLINE_S)
            assert b"Traceback" not in stderr, stderr.decode()
            results.append((process.returncode, stderr.decode()))
        return results


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(stack, tmp_path)


@pytest.mark.slow("is without a store for three seconds")
@pytest.mark.parametrize("kind", ["elastic", pytest.param("fixed", marks=pytest.mark.thorough)])
def test_a_store_that_is_gone_for_good_ends_nothing(job: Job, kind: str) -> None:
    job.script = write_script(job.folder, TALKING)
    with daemon(job.port) as store:
        job.start(kind)
        store.kill()
        store.wait()
        job.go_on_for(OUTAGE_S)
        begun_s = time.monotonic()
        results = job.finish()
    assert [returncode for returncode, _ in results] == [0, 0], results
    assert time.monotonic() - begun_s < END_S


@pytest.mark.slow("is without a store for three seconds, and sees three more")
@pytest.mark.parametrize("durable", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_store_that_comes_back_late_starts_nothing_anew(job: Job, tmp_path: Path, durable: bool) -> None:
    """It is away for longer than a node may be silent, and nobody is taken for lost."""
    options = ["--durability=durable", f"--data-dir={tmp_path / 'data'}"] if durable else []
    silence_s = 2.5  # more than a client pauses between two tries to connect
    with daemon(job.port, *options) as store:
        job.start("elastic", f"--rdzv-conf=last_call_timeout=0.2,keep_alive_interval={silence_s / 4}")
        store.kill()
        store.wait()
        job.go_on_for(1.2 * silence_s)
    with daemon(job.port, *options):
        job.go_on_for(1.2 * silence_s)
        results = job.finish()
    assert [returncode for returncode, _ in results] == [0, 0], results
    assert not any("taken for lost" in stderr for _, stderr in results)


@pytest.mark.slow("starts two launchers and their workers")
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_fails_without_a_store_ends_the_job_everywhere(job: Job, kind: str) -> None:
    with daemon(job.port) as store:
        job.start(kind)
        store.kill()
        store.wait()
        (job.folder / "fail1").touch()
        results = job.outcomes()
    assert [returncode for returncode, _ in results] == [7, 7], results
    assert all("rank 1 failed first: exit code 7" in stderr for _, stderr in results)


@pytest.mark.slow("waits for looks at the store")
@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_fixed_job_whose_launcher_is_killed_without_a_store_ends_and_names_it(job: Job, killed: int) -> None:
    with daemon(job.port) as store:
        job.start("fixed", ranks=True, limits="asyncdist.launch.rendezvous.nodes:PRESENCE_GRACE_S=1")
        store.kill()
        store.wait()
        job.launchers[killed].kill()
        results = job.outcomes()
    assert results[1 - killed][0] == 1, results
    assert f"node {killed} (host" in results[1 - killed][1]
    assert "its launcher was killed" in results[1 - killed][1]


@pytest.mark.slow("waits for looks at the store")
@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_an_elastic_job_that_loses_a_node_waits_for_the_store(job: Job, killed: int) -> None:
    with daemon(job.port) as store:
        job.start("elastic", nnodes="1:2")
        store.kill()
        store.wait()
        job.launchers[killed].kill()
        survivor = job.launchers[1 - killed]
        assert survivor.stderr is not None
        for line in survivor.stderr:
            if b"without it the nodes cannot meet: waiting" in line:
                break
        assert survivor.poll() is None
    with daemon(job.port):
        until(lambda: len(list(job.folder.glob("*.pid"))) == 3, "the next round")
        results = job.finish()
    assert results[1 - killed][0] == 0, results


@pytest.mark.slow("waits for looks at the store")
@pytest.mark.parametrize("kind", KINDS)
def test_an_outage_that_is_too_long_ends_the_job_and_says_so(job: Job, kind: str) -> None:
    with daemon(job.port) as store:
        job.start(kind, "--store-outage=0.5")
        store.kill()
        store.wait()
        results = job.outcomes()
    assert [returncode for returncode, _ in results] == [1, 1], results
    assert all("which --store-outage forbids" in stderr for _, stderr in results), results
