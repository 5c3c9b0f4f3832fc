"""The test on docs/multinode-tests.md finds what it says, in a service of somebody's own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from host_kit import PREFIX, ROOT, Hosts

SERVICE = """
import asyncio
import numpy as np
import asyncdist as dist

async def main():
    async with dist.init_process_group():
        while True:
            await dist.all_reduce(np.ones(1000))
            print("serving", flush=True)
            await asyncio.sleep(0.1)

dist.run(main())
"""


def test_the_test_on_the_page_passes(namespaces: Hosts, tmp_path: Path) -> None:
    """`namespaces` skips this without root."""
    page = (ROOT / "docs/multinode-tests.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len([line for line in code.splitlines() if line.strip()]) <= 35
    for name, short in (("host1", "h1"), ("host2", "h2"), ("switch", "sw")):
        code = code.replace(name, f"{PREFIX}-{short}")  # so that run.sh finds what is left when this is killed
    (tmp_path / "test_service.py").write_text(code)
    (tmp_path / "service.py").write_text(SERVICE)
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", ".", "test_service.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
