"""Whether what listens can be reached: it is connected to, and hung up on. Needs no event loop.

The kernel of the other host takes the connection, also where its process is stopped or does not return to its loop.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from asyncdist.transport.connections.dialer import Target

_RTT: Final = struct.Struct("<68xI")
"""Of Linux's tcp_info: microseconds, which do not count the time until this thread runs."""


def reach(targets: Sequence[Target], limit_s: float) -> list[dict[str, Any]]:
    """Dial all at once, and wait for `limit_s` at most: where (`to`), and `rtt_s`, or `error` as a name of errno."""
    found: list[dict[str, Any]] = [{"to": target.label, "error": "ETIMEDOUT"} for target in targets]
    with contextlib.ExitStack() as sockets:
        poll, dialing = select.poll(), {}
        until_s = time.monotonic() + limit_s

        def end(sock: socket.socket, told: dict[str, Any], began_s: float, code: int) -> None:
            told["error"] = errno.errorcode.get(code, str(code))
            if code in (0, errno.EAGAIN):  # EAGAIN: its queue is full, of a Unix socket
                del told["error"]
                told["rtt_s"] = time.monotonic() - began_s
                if sys.platform == "linux" and sock.family != socket.AF_UNIX:
                    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT.size)
                    told["rtt_s"] = _RTT.unpack(info)[0] / 1e6

        for target, told in zip(targets, found, strict=True):
            sock = sockets.enter_context(socket.socket(target.family, socket.SOCK_STREAM))
            sock.setblocking(False)
            began_s = time.monotonic()
            try:
                if target.source:
                    sock.bind((target.source, 0))
                code = sock.connect_ex(target.address)
            except OSError as error:
                code = error.errno or errno.EINVAL
            if code == errno.EINPROGRESS:
                dialing[sock.fileno()] = sock, told, began_s
                poll.register(sock, select.POLLOUT)
            else:
                end(sock, told, began_s, code)
        while dialing and (left_s := until_s - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(1000 * left_s):
                poll.unregister(descriptor)
                sock, told, began_s = dialing.pop(descriptor)
                end(sock, told, began_s, sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
    return found
