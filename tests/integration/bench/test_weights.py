"""`python -m bench.weights`, small and without gloo: that it measures, not what."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # bench is not installed: it lives beside the packages

from click.testing import CliRunner  # noqa: E402

from bench import weights  # noqa: E402


def test_it_measures(tmp_path: Path) -> None:
    options = ["--mib", "2", "--servers", "2", "--rounds", "1", "--folder", str(tmp_path)]
    done = CliRunner().invoke(weights.command, options)
    assert done.exit_code in (0, 1), done.output
    assert "asyncdist: 2 MiB to 2 servers in 0." in done.output
    assert "p99 of requests" in done.output
