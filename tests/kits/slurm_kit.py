"""A cluster of Debian's Slurm on hosts that are namespaces: a controller, munge, and two nodes with two cores each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from host_kit import PATIENCE_S, ROOT, Namespaces
from launching import clean_environment

__all__ = ["NEEDED", "NODES", "Slurm"]

NODES: Final = ("node1", "node2")
PROGRAMS: Final = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "unshare")
NEEDED: Final = [program for program in PROGRAMS if shutil.which(program) is None]
"""What is missing of Debian's packages slurm-wlm, munge and util-linux."""

NAMED: Final = 'hostname "$0"; mount --bind "$1" /etc/hosts; shift; exec "$@"'
"""Gives a host a name, and the names of the others, as a network namespace has none of its own."""

CONFIGURATION: Final = """
ClusterName=asyncdist
SlurmctldHost=head({head})
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=10
NodeName=node1 NodeAddr={node1} CPUs=2
NodeName=node2 NodeAddr={node2} CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Slurm:
    """The cluster, on `hosts`, which stop it; its files, and those of its jobs, are in `folder`."""

    def __init__(self, hosts: Namespaces, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        addresses = {name: hosts.address(name) for name in ("head", "munge", *NODES)}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, **addresses))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # a name, not a search: there is none to find
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        paths = [f"--{what}={folder}/munge.{what}" for what in ("socket", "key", "pid", "log", "seed")]
        paths = [re.sub("--(key|pid|log|seed)=", r"--\1-file=", path) for path in paths]
        self._start("munge", "munged", "--foreground", "--force", *paths)
        hosts.until_said("munge", "Created .* work threads")
        self._start("head", "slurmctld", "-D")
        for name in NODES:
            self._start(name, "slurmd", "-D")
        deadline_s = time.monotonic() + PATIENCE_S
        while (states := self.said("sinfo", "--noheader", "--Node", "--format=%T").split()) != ["idle"] * len(NODES):
            assert time.monotonic() < deadline_s, f"nodes do not become idle: {states}"
            time.sleep(0.1)

    @property
    def _environ(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path, "OMP_NUM_THREADS": "1"}

    def _start(self, name: str, *command: str) -> None:
        named = ["unshare", "--uts", "--mount", "sh", "-c", NAMED, name, str(self.folder / "hosts")]
        self.hosts.start_command(name, [*named, *command], self._environ)

    def said(self, *command: str, text: str = "") -> str:
        """Run a command of Slurm's on the head, with `text` as its input, and return its output once it has ended."""
        done = subprocess.run(
            self.hosts.inside("head", *command),
            input=text,
            cwd=ROOT / "tests/multinode",
            env=clean_environment(**self._environ),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        return done.stdout + done.stderr

    def submit(self, script: str, *options: str) -> str:
        """Give a script to sbatch; return the job's number. The job writes to the file `job-<number>.log`."""
        said = self.said("sbatch", "--parsable", f"--output={self.folder}/job-%j.log", *options, text=script)
        assert said.strip().isdecimal(), said
        return said.strip()

    def output(self, job: str) -> str:
        """What a job has written by now."""
        log = self.folder / f"job-{job}.log"
        return log.read_text() if log.exists() else ""

    def until_said(self, job: str, pattern: str) -> None:
        """Wait until a job has written what matches."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not re.search(pattern, self.output(job), re.MULTILINE):
            assert time.monotonic() < deadline_s, f"job {job} did not say {pattern!r}: {self.output(job)}"
            time.sleep(0.1)

    def until(self, job: str, states: str) -> str:
        """Wait until a job is in one of `states`, as in `COMPLETED|FAILED`; return that and its exit status."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            shown = self.said("scontrol", "show", "job", job)
            if found := re.search(rf"JobState=({states}) (?:.|\n)* ExitCode=(\S+)", shown):
                return f"{found[1]} {found[2]}"
            assert time.monotonic() < deadline_s, f"{shown}\n{self.output(job)}"
            time.sleep(0.1)
