"""What a client that means harm can make a daemon hold, in the memory of its process."""

from __future__ import annotations

import asyncio
import re
import struct
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from server_kit import SocketClient

DEADLINE_S = 120.0


def peak_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def array(count: int, elements: bytes) -> bytes:
    return b"\xdd" + struct.pack(">I", count) + elements


@pytest.mark.parametrize("element", [b"\x91\x90", b"\xcd\xff\xff", b"\xc4\x02ab"], ids=["arrays", "numbers", "bytes"])
async def test_a_frame_of_tiny_elements_takes_no_multiple_of_its_bytes(element: bytes) -> None:
    many = array(32_768, element * 32_768)
    count = (16 << 20) // len(many)
    payload = b"\x92\x00" + b"\x94\x01\x01" + array(count, many * count) + b"\xc0"
    async with asyncio.timeout(DEADLINE_S), DaemonProcess() as daemon:
        before = peak_bytes(daemon.pid)
        client = await asyncio.to_thread(SocketClient, daemon.port)
        client.socket.settimeout(DEADLINE_S)
        await asyncio.to_thread(client.socket.sendall, struct.pack(">I", len(payload)) + payload)
        assert "elements" in (await asyncio.to_thread(client.reply))[2]
        client.socket.close()
        assert peak_bytes(daemon.pid) - before < 4 * len(payload)
        (await asyncio.to_thread(SocketClient, daemon.port)).socket.close()  # others are served
