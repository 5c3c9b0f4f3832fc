"""Describe the machine and the versions a figure was taken on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess

PACKAGES = ("asyncdist", "numpy", "uvloop", "msgpack", "torch", "mpi4py", "xoscar", "redis")
PROGRAMS = {"Open MPI": ("mpirun", "--version"), "Redis": ("redis-server", "--version")}
VERSION_TIMEOUT_S = 10.0


def about() -> dict[str, str]:
    """Return processor, cores, memory, system, load average, and the versions of everything that is measured."""
    found = {
        "processor": _first_match("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.processor(),
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


def _first_match(path: str, pattern: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            match = re.search(pattern, file.read())
    except OSError:
        return None
    return match.group(1).strip() if match else None
