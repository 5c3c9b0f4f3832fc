"""Plants one mistake after another in a copy of the tree, and runs the tests of its room: does any test fail?

    python tests/tools/planted_mistakes.py                          # all, some minutes
    python tests/tools/planted_mistakes.py --only "lost wake-up"    # those of which the name has this

A mistake is a replacement of lines that stand in exactly one file of the packages: where code was changed so that they
do not, the mistake no longer applies, which is a failure of its own. Found is what fails a test; what hangs, ends the
process or passes is not.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import click

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("asyncdist", "server", "tests", "docs", "examples", "pyproject.toml", "README.md")
PACKAGES = ("asyncdist", "server/asyncdist_server")
LIMIT_S = 400.0
"""Of the tests of one mistake."""
HANGS_S = 100
"""A test that takes longer ends the process; one that is asynchronous is cancelled and fails a little before."""


class Mistake(NamedTuple):
    """`right`, a text that is there once, becomes `wrong`; of `tests`, in pytest's words, one must fail."""

    name: str
    right: str
    wrong: str
    tests: tuple[str, ...]


MISTAKES = (
    Mistake(
        "credit that never comes back",
        "            self._queue.return_credit(self._traffic, self.owed)\n            self.owed = 0\n",
        "            self.owed = 0\n",
        ("tests/unit/transport/protocol",),
    ),
    Mistake(
        "replies released before their commit",
        "        if self._changes.dirty or self._changes.late or self._failed:\n            return self._number\n",
        "        if self._failed:\n            return self._number\n",
        ("tests/unit/server", "-k", "commit or fail"),
    ),
    Mistake(
        "a failed journal ignored",
        "        self._watch_no_more()\n        if error is not None:\n            self._fail(error)\n        else:\n",
        "        self._watch_no_more()\n        if True:\n",
        ("tests/unit/server", "-k", "commit or fail"),
    ),
    Mistake(
        "a lost wake-up of the second waiter for a key",
        "        waiters = list(self._waiters.pop(key, ()))\n",
        "        waiters = list(self._waiters.pop(key, ()))[:1]\n",
        ("tests/unit/server/test_engine.py",),
    ),
    Mistake(
        "a lost wake-up of what came before sleep",
        "            self._words[ASLEEP] = 1\n            fence()\n            self.poll()\n",
        "            self._words[ASLEEP] = 1\n            fence()\n",
        ("tests/unit/transport/shared_memory",),
    ),
    Mistake(
        "a wrong slice of a long reduction",
        "                self._apply(kind, source[first:last], target[first:last], left)\n",
        "                self._apply(kind, source[: last - first], target[first:last], left)\n",
        ("tests/unit/collectives/executor",),
    ),
    Mistake(
        "blocks that begin one too late",
        "    return tuple(accumulate(counts, initial=0))\n",
        "    return tuple(accumulate(counts, initial=int(len(counts) > 3)))\n",
        ("tests/unit/plan/algorithms",),
    ),
    Mistake(
        "one lease more than allowed",
        "        if self.count >= MAX_LEASES:\n",
        "        if self.count > MAX_LEASES:\n",
        ("tests/unit/server", "-k", "lease"),
    ),
    Mistake(
        "one key more asked for than allowed",
        "        if len(self.asked) >= MAX_ASKS and key not in self.asked:\n",
        "        if len(self.asked) > MAX_ASKS and key not in self.asked:\n",
        ("tests/unit/transport/protocol",),
    ),
    Mistake(
        "a forgotten cancellation",
        "        except asyncio.CancelledError as error:\n            cancelled = error\n",
        "        except asyncio.CancelledError:\n            pass\n",
        ("tests/unit/concurrency",),
    ),
    Mistake(
        "a lease that is not renewed",
        "        if asked:\n            try:\n                self._asked = self._ask(messages.KEEP_ALIVE",
        "        if not asked:\n            try:\n                self._asked = self._ask(messages.KEEP_ALIVE",
        ("tests/unit/store", "-k", "lease"),
    ),
    Mistake(
        "a lease that no connection keeps alive",
        "        for lease in client.namespace.bound.get(client.identity, ()):\n            lease.deadline = None\n",
        "        for lease in client.namespace.bound.get(client.identity, ()):\n",
        ("tests/unit/server", "-k", "lease"),
    ),
    Mistake(
        "a wrong root",
        "    return position & (position - 1)\n",
        "    return position & (position - 1) if position != 3 else 1\n",
        ("tests/unit/plan/proof", "-k", "every_algorithm"),
    ),
    Mistake(
        "a wrong tag match",
        "    return _KEY.pack(group, tag, sequence, slot, traffic)\n",
        "    return _KEY.pack(group, tag & 1, sequence, slot, traffic)\n",
        ("tests/unit/transport/protocol",),
    ),
    Mistake(
        "messages of one key that overtake each other",
        "        receive, _ = entry.popitem(last=False)\n",
        "        receive, _ = entry.popitem()\n",
        ("tests/unit/transport/protocol",),
    ),
    Mistake(
        "an unread error of a step",
        "            self._stopped = True\n            self.ended(error)\n",
        "            self._stopped = True\n            self.ended(None)\n",
        ("tests/unit/collectives", "tests/unit/group"),
    ),
    Mistake(
        "a lost rank that a receive from any source does not hear of",
        "        for receive in lost:\n            receive.fail(error)\n",
        "",
        ("tests/unit/transport/protocol/test_matching.py",),
    ),
    Mistake(
        "a wrong proof of the token accepted",
        "    return hmac.compare_digest(proof(key, role, *transcript), claimed)\n",
        "    return hmac.compare_digest(proof(key, role, *transcript)[:0], claimed[:0])\n",
        ("tests/unit/server",),
    ),
    Mistake(
        "a short deadline that is late",
        "        if work.deadline_s < at_s:\n            at_s = work.deadline_s\n",
        "",
        ("tests/unit/group", "-k", "deadline"),
    ),
    Mistake(
        "an expired request that is never answered",
        "        while (soonest := self.next()) is not None and soonest <= now:\n",
        "        while (soonest := self.next()) is not None and soonest < now:\n",
        ("tests/unit/server/test_engine.py",),
    ),
    Mistake(
        "an average that is a sum",
        "    if op is not ReduceOp.AVG:\n        return\n",
        "    if op is not ReduceOp.AVG or array.size > 1:\n        return\n",
        ("tests/unit/arrays/test_reduction.py",),
    ),
    Mistake(
        "bytes that wrap around in the wrong order",
        "                ring[at:] = whole[:cut]\n                ring[: end - size] = whole[cut:]\n",
        "                ring[at:] = whole[-cut:]\n                ring[: end - size] = whole[:-cut]\n",
        ("tests/unit/transport/shared_memory",),
    ),
    Mistake(
        "a restart too many",
        "    if restarts < max_restarts:\n        return Conclusion",
        "    if restarts <= max_restarts:\n        return Conclusion",
        ("tests/unit/launch",),
    ),
    Mistake(
        "a GPU's stream that is not waited for",
        "        if array.stream is not None and (device, handle) not in streams:\n",
        "        if array.stream and (device, handle) in streams:\n",
        ("tests/unit/gpu", "tests/integration/gpu_fake", "-k", "stream"),
    ),
)


def plant(tree: Path, mistake: Mistake) -> tuple[Path, str]:
    """Write the mistake into its file; returns the file and its text before. Raises ValueError if it does not apply."""
    found = []
    for package in PACKAGES:
        for path in (tree / package).rglob("*.py"):
            text = path.read_text()
            found += [(path, text)] * text.count(mistake.right)
    if len(found) != 1:
        raise ValueError(f"its lines are there {len(found)} times")
    path, text = found[0]
    path.write_text(text.replace(mistake.right, mistake.wrong))
    return path, text


def judge(tree: Path, mistake: Mistake) -> str:
    """Run the tests of the room; returns what is wrong with them, or nothing if one failed."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("ASYNCDIST_")}
    environ |= {"PYTHONPATH": os.pathsep.join(map(str, (tree, tree / "server"))), "ASYNCDIST_FEWER_CASES": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-o", f"faulthandler_timeout={HANGS_S}", *mistake.tests]
    try:
        done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"not over after {LIMIT_S:g} s"
    if re.search(r"^\d+ failed\b", done.stdout, re.MULTILINE):
        failed = re.search(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
        click.echo(f"    {failed[1] if failed else ''}")
        return ""
    if done.returncode == 0:
        return "no test has failed"
    return (
        f"no test has failed, but the run has ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-1500:]}"
    )


@click.command()
@click.option("--only", default="", help="Mistakes of which the name has this text.")
def main(only: str) -> None:
    """Plant mistakes, and exit with 1 if one of them was not found."""
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, tree / name)
        chosen = [mistake for mistake in MISTAKES if only in mistake.name]
        for mistake in chosen:
            begun_s = time.monotonic()
            try:
                path, text = plant(tree, mistake)
            except ValueError as error:
                problem = f"does not apply: {error}"
            else:
                problem = judge(tree, mistake)
                path.write_text(text)
            click.echo(f"{mistake.name}: {problem or 'found'}, {time.monotonic() - begun_s:.0f} s")
            missed += [mistake.name] * bool(problem)
    click.echo(f"{len(chosen) - len(missed)} of {len(chosen)} mistakes found")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
