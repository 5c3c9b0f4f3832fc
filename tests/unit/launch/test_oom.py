"""A worker that was killed for want of memory."""

from __future__ import annotations

from pathlib import Path

from asyncdist.launch.worker import Exit, oom_kills


def test_the_kernel_counts(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("oom_kill_other 7\noom_kill 3\nnr_free_pages 1\n")
    assert oom_kills(vmstat) == 3
    vmstat.write_text("nr_free_pages 1\n")  # an old kernel
    assert oom_kills(vmstat) == 0
    assert oom_kills(tmp_path / "none") == 0  # another system


def test_what_people_read() -> None:
    assert str(Exit(1, 12, -9)) == "killed by SIGKILL"
    assert str(Exit(1, 12, -9, out_of_memory=True)).startswith("killed by SIGKILL, probably for want of memory")
