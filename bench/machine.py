"""Describe the machine and the versions a figure was taken on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

PACKAGES = ("asyncdist", "numpy", "uvloop", "msgpack", "torch", "mpi4py", "xoscar", "redis")
PROGRAMS = {"Open MPI": ("mpirun", "--version"), "Redis": ("redis-server", "--version")}
VERSION_TIMEOUT_S = 10.0


def about() -> dict[str, str]:
    """Return date, commit, machine, load average, and the versions of everything that is measured."""
    found = provenance() | {
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "load before": f"{os.getloadavg()[0]:.2f}",
        "Python": platform.python_version(),
    }
    for package in PACKAGES:
        found[package] = package_version(package)
    for name, (program, option) in PROGRAMS.items():
        found[name] = _program_version(program, option)
    return found


def provenance() -> dict[str, str]:
    """Return when, of which commit and on which processor figures are taken."""
    now = datetime.datetime.now(datetime.UTC)
    return {"date": f"{now:%Y-%m-%d}", "commit": commit(Path(__file__).parent), "processor": processor()}


def commit(folder: Path) -> str:
    """Return the commit whose sources are in `folder`, and whether they were changed since."""
    command = (
        "git",
        "describe",
        "--always",
        "--abbrev=10",
        "--exclude=*",
        "--dirty= with changes that are not committed",
    )
    try:
        answer = subprocess.run(command, cwd=folder, capture_output=True, timeout=VERSION_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.decode().strip()


def processor(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name, and the numbers that tell its generation, as names of virtual machines do not."""
    numbers = [
        f"{name} {value}"
        for name, pattern in (("family", "cpu family"), ("model", "model"), ("stepping", "stepping"))
        if (value := _first_match(path, pattern))
    ]
    name = _first_match(path, "model name") or platform.processor() or platform.machine()
    return name + (f" ({', '.join(numbers)})" if numbers else "")


def package_version(package: str) -> str:
    """Return the version of an installed package, or that there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _program_version(program: str, option: str) -> str:
    if shutil.which(program) is None:
        return "not installed"
    answer = subprocess.run([program, option], capture_output=True, timeout=VERSION_TIMEOUT_S, check=False)
    version = re.search(rb"\d+\.\d+\.\d+", answer.stdout)
    return version.group().decode() if version else "unknown"


def _first_match(path: Path, name: str) -> str | None:
    try:
        match = re.search(rf"^{name}\s*:\s*(.+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return match.group(1).strip() if match else None
