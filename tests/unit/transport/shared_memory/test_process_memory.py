"""Reading another process's memory: of the one that was meant, what is there, and into nothing but the target."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest

from asyncdist.arrays.host import Array
from asyncdist.transport.config import TransportConfig
from asyncdist.transport.shared_memory import process_memory
from asyncdist.transport.shared_memory.process_memory import (
    TOKEN_BYTES,
    OwnMemory,
    ProcessMemory,
    RemoteBytes,
    Token,
    Unreadable,
    permit_reading,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process_vm_readv is Linux's")
PAGE = mmap.PAGESIZE
DATA = bytes(range(256)) * 16
NOBODY = 65_534

CHILD = """
import ctypes, os, sys
from asyncdist.transport.shared_memory.process_memory import OwnMemory
own = OwnMemory()
data = ctypes.create_string_buffer(bytes(range(256)) * 16, 4096)
print(own.token.address, own.token.octets.hex(), ctypes.addressof(data), flush=True)
if sys.stdin.readline() == "exec\\n":
    os.execv("/bin/sh", ["sh", "-c", "echo another; read wait"])
"""


class Child:
    """A process that says where its token is, and DATA."""

    def __init__(self) -> None:
        self.process = forked.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        address, octets, data = self.process.stdout.readline().split()
        self.token = Token(int(address), bytes.fromhex(octets))
        self.data = int(data)

    @property
    def memory(self) -> ProcessMemory:
        return ProcessMemory(self.process.pid, self.token)

    def exec(self) -> None:
        """Have it run another program."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("exec\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "another\n"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child()
    yield made
    made.end()


@pytest.fixture
def own() -> OwnMemory:
    return OwnMemory()


@pytest.fixture
def memory(own: OwnMemory) -> ProcessMemory:
    return ProcessMemory(os.getpid(), own.token)


class Target:
    """`nbytes` to read into, between others that must stay as they are."""

    def __init__(self, nbytes: int = len(DATA)) -> None:
        self._around = np.full(nbytes + 2 * PAGE, 0xAA, np.uint8)
        self.array = self._around[PAGE : PAGE + nbytes]

    def check(self) -> None:
        assert (self._around[:PAGE] == 0xAA).all()
        assert (self._around[PAGE + self.array.size :] == 0xAA).all()


def read(memory: ProcessMemory, address: int, nbytes: int = len(DATA)) -> bytes:
    target = Target(nbytes)
    try:
        RemoteBytes(memory, address, nbytes).read(0, target.array)
    finally:
        target.check()
    return target.array.tobytes()


def unreadable(memory: ProcessMemory, address: int, nbytes: int = len(DATA)) -> bool:
    """It must be; returns whether the process is gone."""
    with pytest.raises(Unreadable, match="cannot be read") as caught:
        read(memory, address, nbytes)
    return caught.value.gone


def address_of(data: Any) -> int:
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


def test_our_own(memory: ProcessMemory) -> None:
    assert read(memory, address_of(DATA)) == DATA


def test_another_process(child: Child) -> None:
    memory = child.memory
    assert read(memory, child.data) == DATA
    assert read(memory, child.data + 5, 7) == DATA[5:12]
    lent = RemoteBytes(memory, child.data, len(DATA))
    assert lent.nbytes == len(DATA)
    target = Target(100)
    lent.read(200, target.array)
    target.check()
    assert target.array.tobytes() == DATA[200:300]


def test_an_array_of_larger_elements(memory: ProcessMemory) -> None:
    source, target = np.arange(1000.0), np.zeros(10)
    RemoteBytes(memory, address_of(source), source.nbytes).read(80, target)
    assert (target == source[10:20]).all()


@pytest.mark.parametrize("left", [False, True])
def test_what_is_reduced_goes_through_staging(memory: ProcessMemory, left: bool) -> None:
    source, target, staging = np.arange(1000.0), np.full(10, 100.0), np.zeros(30, np.uint8)

    def subtract(one: Array, other: Array, out: Array) -> None:
        assert len(out) <= 3, "as many elements as staging holds"
        np.subtract(one, other, out=out)

    RemoteBytes(memory, address_of(source), source.nbytes).reduce(80, target, staging, subtract, left)
    assert (target == (source[10:20] - 100 if left else 100 - source[10:20])).all()


def test_nothing(memory: ProcessMemory) -> None:
    assert read(memory, address_of(DATA), 0) == b""
    assert read(memory, 0, 0) == b""


@pytest.mark.parametrize("waited", [False, True])
def test_a_process_that_has_ended(child: Child, waited: bool) -> None:
    memory = child.memory
    child.process.kill()
    os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)
    if waited:
        child.process.wait()
    assert unreadable(memory, child.data)
    with pytest.raises(ProcessLookupError):
        child.memory  # noqa: B018


def test_a_process_that_runs_another_program(child: Child) -> None:
    memory = child.memory
    child.exec()
    assert unreadable(memory, child.data)
    with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
        child.memory  # noqa: B018


def test_another_process_than_the_one_that_is_meant(own: OwnMemory, child: Child) -> None:
    with pytest.raises(ProcessLookupError):
        ProcessMemory(os.getpid(), Token(own.token.address, child.token.octets))
    with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
        ProcessMemory(os.getpid(), Token(0, own.token.octets))
    with pytest.raises(ProcessLookupError):
        ProcessMemory(0, own.token)  # one that is in no namespace of ours


def test_a_process_that_becomes_another(own: OwnMemory, memory: ProcessMemory) -> None:
    """As where its number was given to another: what it holds may be read, and is not taken."""
    ctypes.memset(own.token.address, 0, TOKEN_BYTES)
    assert unreadable(memory, address_of(DATA))


def test_everyone_has_a_token_of_its_own(own: OwnMemory, child: Child) -> None:
    tokens = {own.token.octets, OwnMemory().token.octets, child.token.octets}
    assert [len(token) for token in tokens] == [TOKEN_BYTES] * 3


def test_a_forked_child_has_another() -> None:
    fork = "import os; from asyncdist.transport.shared_memory.process_memory import OwnMemory; own = OwnMemory()\n"
    fork += "child = os.fork(); own = own if child else OwnMemory(); child and os.waitpid(child, 0)\n"
    fork += "print(own.token.octets.hex(), flush=True)"
    process = forked.Popen([sys.executable, "-c", fork], stdout=subprocess.PIPE, text=True)
    tokens = process.communicate()[0].split()
    assert len(set(tokens)) == len(tokens) == 2


class Mapping:
    """Three pages, of which the middle one can be protected; `source` begins in the first and ends in the last."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 3 * PAGE)
        self.address = address_of(self._map)
        self.source = self.address + 10
        self.nbytes = 3 * PAGE - 20
        self._map[10 : self.nbytes + 10] = os.urandom(self.nbytes)
        self.content = self._map[10 : self.nbytes + 10]

    def protect(self, page: int, protection: int) -> None:
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(self.address + page * PAGE), PAGE, protection) == 0


@pytest.mark.parametrize("page", [0, 1, 2])
def test_a_page_that_cannot_be_read(own: OwnMemory, memory: ProcessMemory, page: int) -> None:
    mapping = Mapping()
    mapping.protect(page, 0)
    assert not unreadable(memory, mapping.source, mapping.nbytes)
    assert own.readable(mapping.source, mapping.nbytes) is (page == 1)
    mapping.protect(page, mmap.PROT_READ)
    assert read(memory, mapping.source, mapping.nbytes) == mapping.content
    assert own.readable(mapping.source, mapping.nbytes)


def test_memory_that_the_kernel_reads_for_nobody(own: OwnMemory, memory: ProcessMemory) -> None:
    """As a device's: we can read it, others cannot."""
    with open("/proc/self/maps") as maps:
        found = [line for line in maps if "[vvar]" in line]
    if not found:
        pytest.skip("this kernel maps no [vvar]")
    address = int(found[0].partition("-")[0], 16)
    assert not unreadable(memory, address, 8)
    assert not own.readable(address, 8)


HOSTILE = [0, 1, PAGE - 1, 1 << 47, (1 << 63) - 1, 1 << 63, (1 << 64) - PAGE, (1 << 64) - 1, 1 << 64, (1 << 70) + 5, -1]


@pytest.mark.parametrize("address", HOSTILE)
@pytest.mark.parametrize("nbytes", [1, 16, 4096])
def test_addresses_of_a_hostile_peer(own: OwnMemory, memory: ProcessMemory, address: int, nbytes: int) -> None:
    assert not unreadable(memory, address, nbytes)
    assert not own.readable(address, nbytes)
    with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
        ProcessMemory(os.getpid(), Token(address, own.token.octets))


@pytest.mark.parametrize("nbytes", [1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 16, (1 << 64) - 1])
def test_lengths_of_a_hostile_peer(memory: ProcessMemory, nbytes: int) -> None:
    """More than is there. Nothing is written, as nothing can be read."""
    target = Target()
    with pytest.raises(Unreadable):
        memory.read(0, address_of(target.array), nbytes)
    lent = RemoteBytes(memory, address_of(DATA), nbytes)
    lent.read(0, target.array)
    target.check()
    assert target.array.tobytes() == DATA


def as_nobody(code: str, *arguments: object) -> str:
    """What a program of another user prints."""
    start = "import os, sys; from asyncdist.transport.shared_memory.process_memory import *\n"
    start += f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
    process = forked.Popen(
        [sys.executable, "-c", start + code, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )
    return process.communicate()[0].strip()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user(own: OwnMemory) -> None:
    attempt = """
try:
    ProcessMemory(int(sys.argv[1]), Token(int(sys.argv[2]), bytes.fromhex(sys.argv[3])))
    print("read")
except OSError as error:
    print(type(error).__name__, error.errno)
"""
    told = as_nobody(attempt, os.getpid(), own.token.address, own.token.octets.hex())
    assert told == f"PermissionError {errno.EPERM}"


def refused(code: int) -> Callable[..., int]:
    def readv(*_arguments: object) -> int:
        ctypes.set_errno(code)
        return -1

    return readv


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.ENOMEM, errno.EACCES])
def test_what_is_refused_is_there_nevertheless(
    memory: ProcessMemory, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(process_memory, "_readv", refused(code))
    assert not unreadable(memory, address_of(DATA))


def test_a_system_without_the_call(own: OwnMemory, memory: ProcessMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "_readv", process_memory._missing)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSYS)):
        ProcessMemory(os.getpid(), own.token)
    assert not own.readable(address_of(DATA), len(DATA))
    assert not unreadable(memory, address_of(DATA))


@pytest.mark.parametrize("error", [OSError, AttributeError, TypeError])
def test_a_library_without_the_call(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def load(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert process_memory._find("process_vm_readv") is process_memory._missing


def test_others_are_permitted_to_read_where_they_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel here has Yama, whose word this is; what it is asked for, and what becomes of its answers."""
    asked: list[tuple[int, ...]] = []
    said: list[str] = []
    answers = [0, errno.EINVAL, errno.EPERM]

    def prctl(*arguments: int) -> int:
        asked.append(arguments)
        ctypes.set_errno(answers[0])
        return -1 if answers.pop(0) else 0

    monkeypatch.setattr(process_memory, "_prctl", prctl)
    monkeypatch.setattr(process_memory.events, "info", lambda text, *values: said.append(text % values))
    permit_reading()
    permit_reading()
    assert not said, "granted, and not needed"
    permit_reading()
    assert said == ["others cannot be permitted to read this process: Operation not permitted"]
    assert set(asked) == {(int.from_bytes(b"Yama", "big"), 2**64 - 1, 0, 0, 0)}


def test_the_system_is_asked_without_harm() -> None:
    permit_reading()
    assert OwnMemory().readable(ctypes.addressof(ctypes.create_string_buffer(8)), 8)


HUGE = 2 << 20


def small_pages(nbytes: int) -> tuple[mmap.mmap, Array]:
    """Memory in small pages, filled, that begins behind the beginning of a huge page."""
    made = mmap.mmap(-1, nbytes + 2 * HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -address_of(made) % HUGE + PAGE
    array = np.frombuffer(made, np.uint8)[start : start + nbytes]
    array[:] = np.arange(nbytes) % 251
    return made, array


def huge_bytes_at(address: int) -> int:
    """How much of the mapping that `address` is in lies in huge pages."""
    found = False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            name, *rest = line.split()
            if "-" in name:
                begin, end = (int(bound, 16) for bound in name.split("-"))
                found = begin <= address < end
            elif found and name == "AnonHugePages:":
                return int(rest[0]) << 10
    raise LookupError(hex(address))


class Moves:
    """Stands for madvise: what was to be moved, by offset from the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: int = 0) -> None:
        self.asked: list[tuple[int, int]] = []
        self.answer = answer
        monkeypatch.setattr(process_memory, "_huge_page_bytes", lambda: HUGE)
        monkeypatch.setattr(process_memory, "madvise", self)

    def __call__(self, address: int, nbytes: int, advice: int) -> int:
        assert advice == 25
        self.asked.append((address, nbytes))
        ctypes.set_errno(errno.ENOMEM)
        return self.answer


@pytest.mark.skipif(not process_memory._huge_page_bytes(), reason="this system has no huge pages, or is to have none")
def test_a_buffer_that_is_read_again_moves_to_huge_pages() -> None:
    own = OwnMemory(huge_pages=True)
    made, array = small_pages(12 << 20)
    found, expected = [], array.copy()
    for _ in range(4):
        own.use(address_of(array), array.nbytes)
        found.append(huge_bytes_at(address_of(array)))
    if not found[1]:
        pytest.skip("Linux before 6.1, or no memory for a huge page")
    assert found == [0, 8 << 20, 10 << 20, 10 << 20]
    assert (array == expected).all()
    assert made


def test_only_whole_huge_pages_are_moved_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moves, own = Moves(monkeypatch), OwnMemory(huge_pages=True)
    for _ in range(5):
        own.use(100 * HUGE + 64, 6 * HUGE)
    assert moves.asked == [(101 * HUGE, 4 * HUGE), (105 * HUGE, HUGE)]
    for _ in range(3):
        own.use(200 * HUGE + 64, HUGE + 100)
        own.use(300 * HUGE, HUGE - 1)
    assert len(moves.asked) == 2, "no whole huge page is in these"


def test_what_cannot_be_moved_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    moves, own = Moves(monkeypatch, -1), OwnMemory(huge_pages=True)
    for _ in range(4):
        own.use(100 * HUGE, 32 * HUGE)
    assert moves.asked == [(100 * HUGE, 4 * HUGE)]
    for _ in range(2):
        own.use(200 * HUGE, 32 * HUGE)
    assert len(moves.asked) == 2, "another buffer may be of another kind"


def test_buffers_are_forgotten_from_the_least_used_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "BUFFERS_KEPT", 2)
    moves, own = Moves(monkeypatch), OwnMemory(huge_pages=True)
    for place in (100, 200, 100, 300, 200, 100):
        own.use(place * HUGE, HUGE)
    assert moves.asked == [(100 * HUGE, HUGE)], "200 was forgotten for 300, and what has moved stays known"


@pytest.mark.parametrize(
    ("enabled", "nbytes", "found"),
    [
        ("always [madvise] never", "2097152", HUGE),
        ("always madvise [never]", "2097152", 0),
        ("[always] madvise never", "536870912", 0),
        (None, None, 0),
    ],
)
def test_the_system_says_whether_there_are_huge_pages(
    enabled: str | None, nbytes: str | None, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("enabled", enabled), ("hpage_pmd_size", nbytes)):
        if text is not None:
            (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(process_memory, "_HUGE_PAGES", tmp_path)
    assert process_memory._huge_page_bytes() == found


def test_without_huge_pages_nothing_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    moves, own = Moves(monkeypatch), OwnMemory()
    for _ in range(3):
        own.use(100 * HUGE, 32 * HUGE)
    assert not moves.asked
    assert TransportConfig.from_environ({"ASYNCDIST_HUGE_PAGES": "off"}).huge_pages == "off"
    assert TransportConfig.from_environ({}).huge_pages == "auto"
    with pytest.raises(ValueError, match="ASYNCDIST_HUGE_PAGES='never': use one of auto, off"):
        TransportConfig.from_environ({"ASYNCDIST_HUGE_PAGES": "never"})


@pytest.mark.parametrize(("text", "word"), [("", "auto"), (" OFF ", "off"), ("permit", "permit")])
def test_the_environment_says_whether(text: str, word: str) -> None:
    assert TransportConfig.from_environ({"ASYNCDIST_SINGLE_COPY": text}).single_copy == word


def test_anything_else_is_refused() -> None:
    with pytest.raises(ValueError, match="ASYNCDIST_SINGLE_COPY='yes': use one of auto, permit, off"):
        TransportConfig.from_environ({"ASYNCDIST_SINGLE_COPY": "yes"})
