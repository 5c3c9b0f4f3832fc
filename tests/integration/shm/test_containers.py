"""Ranks in network namespaces of their own, as in containers, that have nothing in common but a directory."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import PRELUDE

CODE = """
async def main():
    rank = int(sys.argv[1])
    async with dist.init_process_group(
        init_method="file://" + sys.argv[2], rank=rank, world_size=3, timeout=float(sys.argv[3])
    ) as group:
        for count in (1, 1000, 300_000):
            data = np.ones(count)
            await group.all_reduce(data)
            assert (data == 3).all()
        print(group.world.mesh.describe((rank + 1) % 3))
        await group.barrier()
dist.run(main())
"""


def can_unshare() -> bool:
    return sys.platform == "linux" and not subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode


pytestmark = pytest.mark.skipif(not can_unshare(), reason="network namespaces need root")


def run(
    short_path: Path, *, pid_namespaces: bool = False, timeout_s: int = 30, environ: dict[str, str]
) -> list[subprocess.Popen[str]]:
    own = ["unshare", "-n"] + (["--pid", "--fork"] if pid_namespaces else [])
    return [
        subprocess.Popen(
            [
                *own,
                sys.executable,
                "-c",
                PRELUDE + textwrap.dedent(CODE),
                str(rank),
                str(short_path / "store"),
                str(timeout_s),
            ],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONWARNINGS": "error", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Pytest's own are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="ad-") as name:
        yield Path(name)


@pytest.mark.slow("starts ranks in namespaces, which cannot be forked")
@pytest.mark.parametrize("pid_namespaces", [False, True])
def test_containers_that_share_a_directory_share_memory(short_path: Path, pid_namespaces: bool) -> None:
    sockets = short_path / "sockets"
    ranks = run(short_path, pid_namespaces=pid_namespaces, environ={"ASYNCDIST_SOCKET_DIR": str(sockets)})
    for rank in ranks:
        stdout, stderr = rank.communicate(timeout=60)
        assert rank.returncode == 0, stderr
        assert f"shm beside unix {sockets}/asyncdist-" in stdout
    assert list(sockets.iterdir()) == []


@pytest.mark.slow("waits three seconds for a rank that nobody reaches")
def test_containers_that_share_nothing_are_told_so(short_path: Path) -> None:
    ended = [(rank.communicate(timeout=60)[1], rank.returncode) for rank in run(short_path, timeout_s=3, environ={})]
    assert all(code for _, code in ended)
    assert any("on different hosts" in stderr for stderr, _ in ended), ended
