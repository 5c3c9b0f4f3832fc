"""Elastic jobs: launchers are killed at each stage of a meeting, and the others neither wait for them nor wonder."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import forked
import pytest
from launching import DEADLINE_S, clean_environment, until, write_script

from asyncdist import blocking
from asyncdist_server import serve_in_thread

PATIENT = "--rdzv-conf=last_call_timeout=0.3,keep_alive_interval=100"
"""Nobody is lost by silence: only broken connections tell."""

thorough = functools.partial(pytest.param, marks=pytest.mark.thorough)

NOTICED_S = 10.0
"""A connection tells within a second; the rest is for a busy machine."""

WORKER = """
    import os, pathlib, sys, time
    folder = pathlib.Path(sys.argv[1])
    path = folder / f"{os.environ['ASYNCDIST_ROUND']}-{os.environ['GROUP_WORLD_SIZE']}-{os.environ['RANK']}.up"
    path.with_suffix(".part").write_text(str(os.getppid()))
    path.with_suffix(".part").rename(path)
    while not (folder / "done").exists():
        time.sleep(0.02)
"""

LAUNCHER = """
    import asyncio, importlib, os, signal, sys, time
    from asyncdist.cli import main

    place, nth, later_s, died = sys.argv.pop(1), int(sys.argv.pop(1)), float(sys.argv.pop(1)), sys.argv.pop(1)
    module, owner, method = place.split(":")
    owner = getattr(importlib.import_module(module), owner)
    original = getattr(owner, method)
    calls = 0

    def die():
        open(died, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

    def dying(*arguments, **options):
        global calls
        calls += 1
        if calls == nth and later_s <= 0:
            time.sleep(-later_s)
            die()
        if calls == nth:
            asyncio.get_running_loop().call_later(later_s, die)
        return original(*arguments, **options)

    setattr(owner, method, dying)
    main(prog_name="asyncdist")
"""

Launcher = subprocess.Popen[bytes]


class Job:
    """Launchers of one job on a store of its own, one of which kills itself at a moment of its own choice."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._script = write_script(folder, WORKER)
        server = stack.enter_context(serve_in_thread())
        self._store = server.address
        self._client = stack.enter_context(blocking.TCPStore("127.0.0.1", server.port, namespace="asyncdist-launch"))
        self.died = folder / "died"

    def start(self, nnodes: str = "1:3") -> Launcher:
        return self._start("-m", "asyncdist", nnodes=nnodes)

    def start_dying(self, place: str, nth: int = 1, later_s: float = 0.0) -> Launcher:
        """One that is killed when it calls `module:class:method` for the nth time, or so many seconds later.

        If `later_s` is negative, it stands still until then.
        """
        when = (place, str(nth), str(later_s), str(self.died))
        return self._start("-c", textwrap.dedent(LAUNCHER), *when, nnodes="1:3")

    def _start(self, *program: str, nnodes: str) -> Launcher:
        options = [
            "run",
            f"--nnodes={nnodes}",
            "--rdzv-id=job",
            "--grace=0.2",
            PATIENT,
            self._script,
            str(self._folder),
        ]
        environment = clean_environment(ASYNCDIST_STORE=self._store)
        process = forked.Popen([sys.executable, *program, *options], stderr=subprocess.PIPE, env=environment)
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return process

    def members(self) -> int:
        """How many have joined: they are in a round, or wait for one."""
        return len(self._client.list_keys("job/job/members/"))

    def rounds(self, *launchers: Launcher) -> set[int]:
        """The numbers of the rounds in which these launchers, and no others, had their workers up."""
        found: dict[int, list[int]] = {}
        for path in self._folder.glob("*.up"):
            number, nnodes, _ = path.stem.split("-")
            if int(nnodes) == len(launchers):
                found.setdefault(int(number), []).append(int(path.read_text()))
        pids = sorted(launcher.pid for launcher in launchers)
        return {number for number, met in found.items() if sorted(met) == pids}

    def ended(self, *launchers: Launcher) -> list[str]:
        """Let the workers end; return what the launchers said."""
        (self._folder / "done").touch()
        said = [launcher.communicate(timeout=DEADLINE_S)[1].decode() for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [0] * len(launchers), said
        assert not any("Traceback" in text for text in said), said
        return said


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(stack, tmp_path)


@contextmanager
def soon() -> Iterator[None]:
    begun_s = time.monotonic()
    yield
    assert time.monotonic() - begun_s < NOTICED_S


@pytest.mark.parametrize(
    "place",
    [
        thorough(
            "asyncdist.launch.rendezvous.round:Round:agree"
        ),  # has met the other, who waits for its part of the plan
        "asyncdist.launch.rendezvous.round:Plan:from_json",  # has told its part
        thorough("asyncdist.launch.elastic:ElasticAgent:_run_workers"),  # knows the plan
    ],
)
def test_a_newcomer_that_is_killed_before_it_works_is_noticed(job: Job, place: str) -> None:
    first = job.start()
    until(lambda: bool(job.rounds(first)), "the first to work")
    begun = job.rounds(first)
    victim = job.start_dying(place)
    until(job.died.exists, "the newcomer to get there")
    with soon():
        until(lambda: bool(job.rounds(first) - begun), "the first to go on alone")
    assert f":{victim.pid}): lost" in job.ended(first)[0]


@pytest.mark.parametrize(
    ("place", "nth", "later_s"),
    [
        ("asyncdist.store.member:Membership:rejoin", 2, 0.0),  # is waited for
        ("asyncdist.launch.rendezvous.round:Plan:to_json", 2, 0.0),  # all wait for the plan
        thorough(
            "asyncdist.launch.rendezvous.links:Links:meet", 2, 0.0
        ),  # the newcomer connects to the launchers' own store
        thorough("asyncdist.store.member:Membership:rejoin", 2, 0.1),  # waits for the last call
        thorough("asyncdist.launch.rendezvous.links:Links:meet", 2, -0.5),  # it waits there until all are seen
        thorough("asyncdist.launch.elastic:ElasticAgent:_run_workers", 2, 0.0),
    ],
)
def test_node_0_killed_when_another_comes_is_noticed(job: Job, place: str, nth: int, later_s: float) -> None:
    victim = job.start_dying(place, nth, later_s)
    until(lambda: bool(job.rounds(victim)), "node 0 to work")
    second = job.start()
    until(job.died.exists, "node 0 to get there")
    with soon():
        until(lambda: bool(job.rounds(second)), "the newcomer to work alone")
    said = job.ended(second)[0]
    assert f":{victim.pid}): lost" in said or f":{victim.pid} was lost while the nodes met" in said


def test_a_launcher_that_is_killed_before_it_joins_disturbs_nobody(job: Job) -> None:
    first = job.start()
    until(lambda: bool(job.rounds(first)), "the first to work")
    job.start_dying("asyncdist.store.tcp_store:TCPStore:join")
    until(job.died.exists, "the other to get there")
    second = job.start()  # and nobody waits for who never joined
    until(lambda: bool(job.rounds(first, second)), "both to work")
    assert "lost" not in "".join(job.ended(first, second))
    assert len(job.rounds(first)) == 1


def test_who_waits_for_more_nodes_is_told_who_was_killed(job: Job) -> None:
    first, victim = job.start("3:4"), job.start("3:4")
    until(lambda: job.members() == 2, "both to join")
    victim.kill()
    assert first.stderr is not None
    os.set_blocking(first.stderr.fileno(), False)
    said = bytearray()

    def told() -> bool:
        said.extend(first.stderr.read() or b"")  # type: ignore[union-attr]
        return b":%d was lost while the nodes met" % victim.pid in said

    until(told, "the first to say so")
    others = [job.start("3:4") for _ in range(2)]
    until(lambda: bool(job.rounds(first, *others)), "three to work")
    job.ended(first, *others)
