"""Asking processes what their ranks do: all at once, each for a bounded time. `endpoint` answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncdist.concurrency.process import is_stopped
from asyncdist.inspect.endpoint import ALL, LENGTH, NAME, PURPOSE, SAMPLE, SAMPLE_BYTES, STOPPED, extra_s, may_ask
from asyncdist.inspect.job import MAX_RANKS, checked, is_a
from asyncdist_server.serving.sockets import peer_credentials
from asyncdist_server.wire.auth import MAX_HANDSHAKE_BYTES, AuthenticationError, ClientHandshake

ASK_S: Final = 1.5
"""How long a process has to answer."""
ASKED_TOGETHER: Final = 256
"""Processes asked at a time, so that the usual 1,024 descriptors suffice."""
MAX_ANSWER_BYTES: Final = 64 << 20
MAX_ANSWERS_BYTES: Final = 1 << 30
"""Of all that are asked together."""
WHY_STOPPED: Final = "it is stopped (SIGSTOP, or a debugger)"
HUNG_UP: Final = "it has ended, or its world has"
_READ_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class EndpointAddress:
    """Where a process answers: by Unix socket, on this host; and by TCP."""

    host: str
    pid: int
    unix: bytes = b""
    tcp: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process has said; if it said nothing, `state` is why: `gone`, `stopped`, `silent` or `refused`."""

    documents: Sequence[dict[str, Any]] = ()
    state: str = ""
    why: str = ""


class _Unheard(Exception):
    """The process does not answer."""

    def __init__(self, state: str, why: str) -> None:
        super().__init__(why)
        self.answer = Answer((), state, why)


@dataclass
class _Budget:
    """How much the answers that are still to come may say."""

    left: int

    def take(self, nbytes: int) -> None:
        if nbytes > min(self.left, MAX_ANSWER_BYTES):
            raise _Unheard("silent", f"its answer of {nbytes} bytes is too long")
        self.left -= nbytes


async def ask_all(
    endpoints: Iterable[EndpointAddress],
    token: str | None,
    question: bytes = ALL,
    limit_s: float = ASK_S,
    most_bytes: int = MAX_ANSWERS_BYTES,
) -> dict[EndpointAddress, Answer]:
    """Ask all, in parallel; what does not answer within `limit_s` is silent, or stopped if its host can tell.

    What processes have to find out first, they get the time for.
    Once the answers have `most_bytes`, further ones are not read, and count as silent.
    """
    limit_s += extra_s(question)
    together = asyncio.Semaphore(ASKED_TOGETHER)
    budget = _Budget(most_bytes)

    async def ask_one(endpoint: EndpointAddress) -> bytes | Answer:
        async with together:
            return await _ask(endpoint, token, question, limit_s, budget)

    endpoints = list(dict.fromkeys(endpoints))
    heard = dict(zip(endpoints, await asyncio.gather(*map(ask_one, endpoints)), strict=True))
    found = {endpoint: answer if isinstance(answer, Answer) else _read(answer) for endpoint, answer in heard.items()}
    speaking = {endpoint.host: endpoint for endpoint, answer in found.items() if not answer.state}
    silent = [endpoint for endpoint, answer in found.items() if answer.state == "silent" and endpoint.host in speaking]

    async def ask_neighbor(endpoint: EndpointAddress) -> None:
        """Another process of the host sees whether one is stopped."""
        question = STOPPED + b"%d" % endpoint.pid
        said = await _ask(speaking[endpoint.host], token, question, limit_s, budget)
        if said == b"true":
            found[endpoint] = Answer((), "stopped", WHY_STOPPED)

    await asyncio.gather(*map(ask_neighbor, silent))
    return found


def _read(said: bytes) -> Answer:
    """What is no document of a rank is left out."""
    documents = []
    try:
        for one in json.loads(said):
            with contextlib.suppress(ValueError):
                document = dict(checked(one))
                if _is_live(document):
                    documents.append(document)
    except (ValueError, TypeError, RecursionError):
        return Answer((), "silent", "its answer is malformed")
    return Answer(documents)


def _is_live(document: dict[str, Any]) -> bool:
    world = document.get("world")
    if not isinstance(world, dict) or not isinstance(document.get("job"), str):
        return False
    kinds = {"host": str, "pid": int, "loop_turns": bool, "loop_late": float}
    kinds |= {} if document.get("loop_turns") else {"loop_cpu": float}
    return (
        isinstance(world.get("id"), str)
        and isinstance(world.get("name"), str)
        and type(world.get("size")) is int
        and document["rank"] < world["size"] <= MAX_RANKS
        and all(is_a(document.get(name), kind) for name, kind in kinds.items())
    )


async def _ask(
    endpoint: EndpointAddress, token: str | None, question: bytes, limit_s: float, budget: _Budget
) -> bytes | Answer:
    try:
        async with asyncio.timeout(limit_s):
            with await _connect(endpoint) as sock:
                own = sock.family == socket.AF_UNIX and may_ask(sock)
                if own and is_stopped(peer_credentials(sock)[0]):
                    return Answer((), "stopped", WHY_STOPPED)
                return await _converse(sock, token, question, budget, own=own)
    except TimeoutError:
        return Answer((), "silent", f"no answer within {limit_s:g} s")
    except _Unheard as unheard:
        return unheard.answer
    except AuthenticationError as error:
        return Answer((), "refused", str(error))
    except ConnectionError:
        return Answer((), "gone", HUNG_UP)
    except OSError as error:
        return Answer((), "silent", error.strerror or str(error))


async def speed_of(endpoint: EndpointAddress, token: str | None) -> dict[str, Any]:
    """How many `bytes_per_s` come from there, less what asking for nothing takes; or an `error`."""
    took_s = []
    for size in (0, SAMPLE_BYTES):
        began_s = time.perf_counter()
        said = await _ask(endpoint, token, SAMPLE + b"%d" % size, extra_s(SAMPLE), _Budget(SAMPLE_BYTES))
        if isinstance(said, Answer):
            return {"error": said.why}
        took_s.append(time.perf_counter() - began_s)
    return {"bytes_per_s": SAMPLE_BYTES / max(took_s[1] - took_s[0], 1e-6)}


async def _connect(endpoint: EndpointAddress) -> socket.socket:
    """Connect by Unix socket, which leads to a process of this host only; else by TCP."""
    loop = asyncio.get_running_loop()
    addresses: list[Any] = [endpoint.unix] if endpoint.unix else []
    refused: OSError | None = None
    for address in addresses + list(endpoint.tcp):
        family = (
            socket.AF_UNIX if isinstance(address, bytes) else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        )
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            if family == socket.AF_UNIX:
                sock.connect(address)  # at once, or not at all
            else:
                await loop.sock_connect(sock, address)
            return sock
        except (ConnectionRefusedError, FileNotFoundError) as error:
            sock.close()
            refused = error
        except BaseException:
            sock.close()
            raise
    if not endpoint.tcp and endpoint.host != socket.gethostname():
        raise _Unheard("silent", f"it answers on its own host only: {endpoint.host}")
    raise _Unheard("gone", "nobody listens where it did") from refused


async def _converse(sock: socket.socket, token: str | None, question: bytes, budget: _Budget, *, own: bool) -> bytes:
    loop = asyncio.get_running_loop()
    handshake = ClientHandshake(token, question, PURPOSE, optional=own)
    await loop.sock_sendall(sock, handshake.start())
    while not handshake.done:
        if reply := handshake.receive(await _receive(sock, MAX_HANDSHAKE_BYTES // 2)):
            await loop.sock_sendall(sock, reply)
    said = bytearray(handshake.leftover)
    while len(said) < LENGTH.size:
        said += await _receive(sock, _READ_BYTES)
    (wanted,) = LENGTH.unpack_from(said)
    budget.take(wanted)
    while len(said) < LENGTH.size + wanted:
        said += await _receive(sock, _READ_BYTES)
    return bytes(said[LENGTH.size : LENGTH.size + wanted])


async def _receive(sock: socket.socket, most: int) -> bytes:
    data = await asyncio.get_running_loop().sock_recv(sock, most)
    if not data:
        raise _Unheard("gone", HUNG_UP)
    return data


def endpoints_here(directory: str = "") -> list[EndpointAddress]:
    """Those of this user's processes on this host, and of `directory` (ASYNCDIST_SOCKET_DIR) if it is given."""
    names: list[bytes] = []
    with contextlib.suppress(OSError):
        listed = Path("/proc/net/unix").read_text(errors="replace")
        names += [b"\0" + name.encode() for name in sorted(set(re.findall(rf" @({NAME}[0-9a-f-]+)$", listed, re.M)))]
    if directory:
        found = [name for name in os.listdir(directory) if re.fullmatch(rf"{NAME}[0-9a-f-]+", name)]
        names += [os.fsencode(os.path.join(directory, name)) for name in sorted(found)]
    host = socket.gethostname()
    return [EndpointAddress(host, pid, name) for name in names if (pid := _own_listener(name))]


def _own_listener(name: bytes) -> int:
    """The process of this user that listens there, 0 if there is none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        probe.connect(name)
        return peer_credentials(probe)[0] if may_ask(probe) else 0
    return 0


def silent_rank(rank: int, endpoint: EndpointAddress, answer: Answer) -> dict[str, Any]:
    """What stands for the document of a rank that does not answer."""
    found = {"rank": rank, "host": endpoint.host, "pid": endpoint.pid, "state": answer.state, "why": answer.why}
    return found | {"time": time.time(), "groups": [], "entries": [], "threads": {}, "tasks": {}}
