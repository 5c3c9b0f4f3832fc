"""Run what failed in the last `make test` again, alone: is the change wrong, or the test unsteady?

    python tests/retest.py

Exits with 0 if every test that failed beside others passes `TIMES` times in a row by itself, and names those tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FAILED = Path(".pytest_cache/v/cache/lastfailed")
"""What pytest's cache knows; `make test` removes it where a run ended in any other way than with failed tests."""

UNSTEADY = Path(".pytest_cache/unsteady")
"""The verdict, for whoever wants to say it last."""

MOST = 5
"""More failures than these are no accident, however each of them fares alone."""

TIMES = 5
"""What fails alone in one of three runs is found in about seven of eight cases, what always fails at once."""


def main() -> int:
    """Run them again, and say what came of it."""
    UNSTEADY.unlink(missing_ok=True)
    failed = sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []
    if not 0 < len(failed) <= MOST:
        print(f"retest: {len(failed)} tests failed, and only 1 to {MOST} are run again", flush=True)
        return 1
    for turn in range(1, TIMES + 1):
        print(f"retest: {len(failed)} failed, run alone for the {turn}. time of {TIMES}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *failed]
        if subprocess.run(command, check=False).returncode != 0:
            print("retest: failed again", flush=True)
            return 1
    verdict = "".join(f"UNSTEADY: {name} failed once beside others and passed {TIMES} times alone\n" for name in failed)
    UNSTEADY.write_text(verdict)
    print(verdict, end="", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
