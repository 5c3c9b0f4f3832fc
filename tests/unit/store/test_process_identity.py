"""Whether a process that signed a file still runs."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys

from asyncdist.store.file_log import is_gone, read_state, this_process


def test_this_process_is_here() -> None:
    assert not is_gone(this_process())


def test_another_process_with_its_pid_is_not_it() -> None:
    me = this_process()
    assert me.start > 0
    assert is_gone(dataclasses.replace(me, start=me.start - 1))
    assert not is_gone(dataclasses.replace(me, start=0))


def test_zombie_and_reaped_process_are_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = dataclasses.replace(this_process(), pid=child.pid, start=0)
    assert not is_gone(identity)
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    state = read_state(child.pid)
    assert state is not None
    assert state[0] == "Z"
    assert is_gone(identity)
    child.communicate()
    assert is_gone(identity)


def test_process_of_another_host_is_never_known_to_be_gone() -> None:
    assert not is_gone(dataclasses.replace(this_process(), host="elsewhere", pid=2**22 + 1))
