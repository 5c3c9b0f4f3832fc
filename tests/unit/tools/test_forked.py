"""What is forked is as what is started, for whoever runs in it and for whoever has started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
from launching import is_alive, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes are started")

LIMIT_S = 60
KINDS = [subprocess.Popen, forked.Popen]

TOLD = """
import json, os, signal, sys, threading, warnings
import uvloop
import asyncdist
import asyncdist_server.cli
print(json.dumps({
    "arguments": sys.argv, "name": __name__, "main": vars(sys.modules["__main__"]) is globals(),
    "path": sys.path, "flags": sys.flags, "filters": repr(warnings.filters), "limit": sys.getrecursionlimit(),
    "environ": dict(os.environ), "folder": os.getcwd(), "cores": sorted(os.sched_getaffinity(0)),
    "parent": os.getppid(), "group": os.getpgrp(), "session": os.getsid(0), "umask": os.umask(0o22),
    "descriptors": sorted(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")),
    "python threads": threading.active_count(), "main thread": threading.current_thread() is threading.main_thread(),
    "signals": [str(signal.getsignal(number)).split(" at ")[0] for number in sorted(signal.valid_signals())],
    "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "streams": [(s.encoding, s.errors, s.line_buffering, s.isatty(), s.fileno()) for s in (sys.stdout, sys.stderr)],
    "read": sys.stdin.read(),
}))
"""


def start(kind: type[subprocess.Popen[str]], *arguments: str, **options: Any) -> subprocess.Popen[str]:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return kind([sys.executable, *arguments], **{**pipes, "text": True, **options})


@pytest.mark.slow("starts interpreters")
def test_it_is_told_the_same(tmp_path: Path) -> None:
    for _ in range(forked.SERVERS):  # which have all cores, as what has forked for other tests
        start(forked.Popen, "-c", "").communicate(timeout=LIMIT_S)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    told = []
    try:
        for environ in ({"OWN": "\udcff"}, {"PYTHONWARNINGS": "error", "PYTHONUNBUFFERED": "1"}):
            for kind in KINDS:
                options: dict[str, Any] = {"env": {**os.environ, **environ}, "cwd": tmp_path}
                with start(kind, "-c", TOLD, "first", "second", **options) as process:
                    said, errors = process.communicate("input", timeout=LIMIT_S)
                assert (process.returncode, errors) == (0, "")
                told.append(json.loads(said))
    finally:
        os.sched_setaffinity(0, cores)
    assert told[0] == told[1]
    assert told[2] == told[3]
    assert told[1]["parent"] == os.getpid()
    assert told[1]["cores"] == [min(cores)]
    assert (told[1]["folder"], told[1]["read"], told[1]["environ"]["OWN"]) == (str(tmp_path), "input", "\udcff")


@pytest.mark.parametrize(
    "code",
    [
        "pass",
        "1 / 0",
        "raise SystemExit('bye')",
        "import sys; sys.exit(3)",
        "import os; os._exit(4)",
        "import os; os.kill(os.getpid(), 9)",
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
        "import atexit; atexit.register(print, 'at the end')",
        "import threading; threading.Timer(0.01, print, ['from a thread']).start()",
        "import os; print(os.fork() and os.wait()[1])",
        "import warnings; warnings.warn('hear')",
        "import sys; sys.stderr.write('said')",
        "def f():\n f()\nf()",
        "import sys; sys.exit(-1)",
        "import sys; sys.stdout.close()",
        "import sys; sys.exit(True)",
        "import os, sys; os.close(1); print('to nobody')",
        "class Last:\n def __del__(self):\n  print('let go')\nlast = Last()",
        "class Last:\n def __del__(self):\n  print('let go')\nlast = Last()\nlast.last = last",
        "import threading, time; threading.Thread(target=time.sleep, args=(100,), daemon=True).start(); print('over')",
        "not python",
    ],
)
def test_it_ends_the_same(code: str) -> None:
    ends = []
    for kind in KINDS:
        process = start(kind, "-c", code)
        output, errors = process.communicate(timeout=LIMIT_S)
        ends.append((process.returncode, output, errors.splitlines()[-1:], errors.count("Traceback")))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import socket; left = socket.socket()", "ResourceWarning: unclosed <socket.socket"),
        (
            "import asyncio; left = asyncio.new_event_loop(); task = left.create_task(asyncio.sleep(1))",
            "Task was destroyed but it is pending!",
        ),
    ],
)
def test_what_the_program_has_left_open_is_told(code: str, told: str) -> None:
    for kind in KINDS:
        process = start(kind, "-c", "import warnings; warnings.simplefilter('always'); " + code)
        assert told in process.communicate(timeout=LIMIT_S)[1], kind


def test_a_module_is_run_the_same() -> None:
    said = [start(kind, "-m", "asyncdist_server", "--help").communicate(timeout=LIMIT_S) for kind in KINDS]
    assert said[0] == said[1]
    assert "Usage: asyncdist-server" in said[1][0]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_signalled_and_waited_for_as_any_child(kind: type[subprocess.Popen[str]]) -> None:
    with start(kind, "-c", "import signal; print('here', flush=True); signal.pause()") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        process.send_signal(signal.SIGCONT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.kill()
        assert process.wait(LIMIT_S) == -signal.SIGKILL
    assert not is_alive(process.pid)


@pytest.mark.parametrize("kind", KINDS)
def test_it_leads_a_session_at_once_where_it_is_to(kind: type[subprocess.Popen[str]]) -> None:
    for new in (True, False):
        with start(kind, "-c", "input()", start_new_session=new) as process:
            assert (os.getsid(process.pid) == os.getpgid(process.pid) == process.pid) == new
            assert (os.getsid(process.pid) == os.getsid(0)) != new


def test_streams_that_are_not_pipes_are_inherited_or_shared(tmp_path: Path) -> None:
    for kind in KINDS:
        with (tmp_path / "said").open("w") as file:
            code = "import sys; print('one', flush=True); sys.stderr.write('two')"
            start(kind, "-c", code, stdin=None, stdout=file, stderr=subprocess.STDOUT).wait(LIMIT_S)
        assert (tmp_path / "said").read_text() == "one\ntwo"


def test_not_all_hash_alike() -> None:
    code = "print(hash('rank'))"
    assert len({start(forked.Popen, "-c", code).communicate(timeout=LIMIT_S)[0] for _ in range(forked.SERVERS)}) > 1


def test_what_forks_ends_with_whoever_has_started_it() -> None:
    code = """
import os, signal, sys
import forked
forked.Popen([sys.executable, "-c", ""]).wait()
print(*open(f"/proc/self/task/{os.getpid()}/children").read().split(), flush=True)
signal.pause()
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(forked.__file__).parent), *sys.path])}
    with start(subprocess.Popen, "-c", code, env=environ) as owner:
        assert owner.stdout is not None
        (server,) = map(int, owner.stdout.readline().split())
        assert is_alive(server)
        owner.kill()
    until(lambda: not is_alive(server), "the end of what forks")


def test_run_waits_for_the_end_and_no_longer_than_it_may() -> None:
    done = forked.run([sys.executable, "-c", "import sys; print('said'); sys.exit('an error')"], LIMIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (1, "said\n", "an error\n")
    with pytest.raises(subprocess.CalledProcessError):
        done.check_returncode()
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run([sys.executable, "-c", "import time; time.sleep(1000)"], 0.1)
