"""Run torch's own tests of its backends against asyncdist, beside gloo: python tests/tools/torch_suite.py [PATTERN ...]

The tests are `torch.testing._internal.distributed.distributed_test`, which torch ships. They ask for gloo by name, so
with `asyncdist` the processes answer that name. Those that torch skips for gloo, as only MPI has what they test, are
run on asyncdist alone. Says what passes with one and not with the other, and exits with 1 if gloo passes more.

Each test forks a world from a process that has imported torch. PATTERNs are those of `fnmatch`, on names of tests.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BY_OWN_NAME = {"test_ddp_logging_data_cpu"}
"""What compares the name that the test asks for with the one that our groups have."""
MARK = "outcome: "
BACKENDS = ("gloo", "asyncdist")


def answer_for_gloo() -> None:
    """Have this process make groups of asyncdist where gloo is asked for."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    from asyncdist.torch import process_group as ours

    helper = c10d._new_process_group_helper
    asked = SimpleNamespace(group_id="", global_ranks_in_group=())

    def noted(size: int, rank: int, ranks: Any, backend: Any, store: Any, name: str, *rest: Any, **named: Any) -> Any:
        asked.global_ranks_in_group, asked.group_id = ranks, name
        return helper(size, rank, ranks, backend, store, name, *rest, **named)

    class Gloo(ours.ProcessGroup):
        backend_name = "gloo"

        def __new__(cls, first: Any, *rest: Any, timeout: timedelta = timedelta(minutes=30)) -> Any:
            if not isinstance(first, dist.Store):
                return super().__new__(cls)
            rank, size = rest
            options = SimpleNamespace(store=first, group_rank=rank, group_size=size, timeout=timeout, **vars(asked))
            return ours.create(options, cls)

        def __init__(self, first: Any, *rest: Any, **_named: Any) -> None:
            if not isinstance(first, dist.Store):
                super().__init__(first, *rest)

        def getBackendName(self) -> str:
            return ours.BACKEND  # at that of gloo, DistributedDataParallel asks gloo itself for more

    c10d._new_process_group_helper = noted
    c10d.ProcessGroupGloo = Gloo


class Outcomes(unittest.TestResult):
    """What became of each test, printed as it ends."""

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        self._began_s = time.monotonic()

    def _tell(self, test: Any, outcome: str, why: str = "") -> None:
        seconds = round(time.monotonic() - self._began_s, 2)
        print(MARK + json.dumps([test._testMethodName, outcome, why, seconds]), flush=True)

    def addSuccess(self, test: Any) -> None:
        self._tell(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:
        self._began_s = time.monotonic()
        self._tell(test, "skipped", reason)

    def addError(self, test: Any, err: Any) -> None:
        self._tell(test, "failed", self._exc_info_to_string(err, test))

    addFailure = addError


def run_here(backend: str, world_size: int, patterns: list[str], *, only_mpi: bool) -> None:
    """Run the tests in this process; one line of JSON for each."""
    directory = tempfile.mkdtemp()
    for name in ("barrier", "test_dir"):
        (Path(directory) / name).mkdir()
    os.environ.update(
        BACKEND="mpi" if only_mpi else "gloo",
        WORLD_SIZE=str(world_size),
        TEMP_DIR=directory,
        INIT_METHOD=f"file://{directory}/shared_init",
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    suite = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    suite.BACKEND = "gloo"
    if backend == "asyncdist":
        answer_for_gloo()

    class Forked(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @property
        def init_method(self) -> str:
            return f"file://{self.file_name}"

    names = [
        name
        for name in unittest.TestLoader().getTestCaseNames(Forked)
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    ]
    outcomes = Outcomes()
    for name in names:
        test = Forked(name)
        suite.BACKEND = "asyncdist" if backend == "asyncdist" and name in BY_OWN_NAME else "gloo"
        if not only_mpi or ("all_to_all" in name and (world_size > 2 or not name.endswith("_group") or "full" in name)):
            test.run(outcomes)


def run(backend: str, world_size: int, patterns: list[str], *, only_mpi: bool = False) -> dict[str, tuple[str, str]]:
    """Run the tests in a process of their own; the outcome and the reason by name."""
    mode = ["--here", backend, "--only-mpi"] if only_mpi else ["--here", backend]
    command = [sys.executable, __file__, *mode, "--worlds", str(world_size), "--", *patterns]
    found: dict[str, tuple[str, str]] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):  # the tests print, too
                name, outcome, why, seconds = json.loads(line.removeprefix(MARK))
                found[name] = outcome, why
                if outcome != "skipped":
                    print(f"{world_size} ranks, {backend}: {name} {outcome} in {seconds} s", file=sys.stderr)
    return found


def compare(world_size: int, patterns: list[str], backends: list[str]) -> bool:
    """Print the difference for worlds of one size; whether asyncdist passes all that gloo passes."""
    found = {backend: run(backend, world_size, patterns) for backend in backends}
    if "asyncdist" in backends:
        alone = run("asyncdist", world_size, patterns, only_mpi=True)
        alone = {name: each for name, each in alone.items() if each[0] != "skipped"}
        found["asyncdist"] = {**found["asyncdist"], **alone}
    for backend, outcomes in found.items():
        counts = {kind: sum(each[0] == kind for each in outcomes.values()) for kind in ("passed", "failed", "skipped")}
        print(f"{world_size} ranks, {backend}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    passed = {backend: {name for name, each in found[backend].items() if each[0] == "passed"} for backend in found}
    worse = passed["gloo"] - passed["asyncdist"] if len(found) == 2 else set()
    for name, (outcome, why) in found.get("asyncdist", {}).items():
        if name in worse or outcome == "failed":
            print(f"  {name}: {outcome}\n    " + "\n    ".join(why.splitlines()[-30:]))
    if len(found) == 2:
        print(f"  with asyncdist only: {', '.join(sorted(passed['asyncdist'] - passed['gloo']))}")
    return not worse


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", default=["*"], help="names of tests")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3, 4], help="sizes of the worlds")
    parser.add_argument("--backends", choices=BACKENDS, nargs="+", default=list(BACKENDS))
    parser.add_argument("--here", choices=BACKENDS, help=argparse.SUPPRESS)
    parser.add_argument("--only-mpi", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    patterns = given.patterns or ["*"]
    if given.here:
        run_here(given.here, given.worlds[0], patterns, only_mpi=given.only_mpi)
        return 0
    return 0 if sum(compare(size, patterns, given.backends) for size in given.worlds) == len(given.worlds) else 1


if __name__ == "__main__":
    sys.exit(main())
