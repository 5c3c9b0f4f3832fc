"""Hosts for tests of several nodes, each a network namespace or a container, on networks that can be cut.

A host runs one command at a time: `start`, then `until_said`, `ended`, and what may happen to a host meanwhile: `kill`,
`pause` and `resume`, `cut` and `mend`. Both kinds of host do the same, so a scenario is written once.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final

from launching import clean_environment

__all__ = ["IMAGE", "KILLED", "PATIENCE_S", "PREFIX", "ROOT", "TOKEN", "Containers", "Hosts", "Namespaces"]

ROOT: Final = Path(__file__).parents[2]
IMAGE: Final = "asyncdist-node:multinode"
SERVER_IMAGE: Final = "asyncdist-server:multinode"
STORE_PORT: Final = 29500

PREFIX: Final = os.environ.get("ASYNCDIST_TEST_HOSTS", f"mn{os.getpid()}")
"""Begins the name of all that is made here: tests/multinode/run.sh removes what a killed test leaves by this name."""

TOKEN: Final = "the-token-of-the-hosts-of-tests"

KILLED: Final = (-9, 137)
"""Exit statuses of a command whose host was killed: as Popen says it, and as an engine does."""

PATIENCE_S: Final = 100.0
"""A scenario takes seconds; a machine that does other things as well may take longer."""

_numbers = itertools.count(1)


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout


class Hosts(ABC):
    """Hosts by name, on `networks` networks of their own. The first network has the store, on the host `store`."""

    examples: ClassVar[str]
    """Where a host finds the folder examples/; `programs/` of the scenarios lies in the working directory."""

    def __init__(self, folder: Path, networks: int = 1) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
        self.networks = networks
        self.prefix = f"{PREFIX}-{worker}-{next(_numbers)}"
        self.names: list[str] = []
        self._subnet = 4 * int(worker)

    def address(self, name: str, network: int = 0) -> str:
        """The address of a host, which is added if it is not there."""
        if name not in self.names:
            self.names.append(name)
            self._add(name)
        return f"10.77.{self._subnet + network}.{10 + self.names.index(name)}"

    def subnet(self, network: int) -> str:
        """What all addresses of a network begin with."""
        return f"10.77.{self._subnet + network}."

    def launch(self, name: str, *arguments: str, ranks: int = 2, **environ: str) -> None:
        """Start `asyncdist run` on a host, with `ranks` workers that compute nothing in parallel."""
        defaults = {"ASYNCDIST_STORE": f"{self.address('store')}:{STORE_PORT}", "ASYNCDIST_TOKEN": TOKEN}
        command = ["run", "--nproc-per-node", str(ranks), "--rdzv-id", "job", *arguments]
        self.address(name)
        self.start(name, command, {**defaults, "OMP_NUM_THREADS": "1", **environ})

    def start_store(self, *options: str) -> None:
        """Start the daemon on the host `store`, and wait until it serves."""
        self.address("store")
        self._start_store(options)
        self.until_said("store", " ready on ")

    @abstractmethod
    def start(self, name: str, arguments: Sequence[str], environ: dict[str, str]) -> None:
        """Start `asyncdist` with `arguments` on a host."""

    @abstractmethod
    def restart_store(self) -> None:
        """Kill the daemon, and start it again with what it had on its disk."""

    def output(self, name: str) -> str:
        """All that the commands of a host have written by now."""
        log = self._folder / f"{name}.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def ended(self, name: str, within_s: float = PATIENCE_S) -> int:
        """Wait until the command of a host has ended; return its exit status."""
        try:
            return self._processes[name].wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} still runs after {within_s:g} s") from None

    @abstractmethod
    def kill(self, name: str) -> None:
        """Kill all processes of a host."""

    @abstractmethod
    def pause(self, name: str) -> None:
        """Stop all processes of a host; its kernel goes on."""

    @abstractmethod
    def resume(self, name: str) -> None:
        """End a pause."""

    @abstractmethod
    def cut(self, name: str, network: int = 0) -> None:
        """Take a host from a network."""

    @abstractmethod
    def mend(self, name: str, network: int = 0) -> None:
        """Connect a host that was cut off, with the address that it had."""

    @abstractmethod
    def shared_folder(self, mode: int) -> str:
        """Make a folder that all hosts see, for the user that their commands run as; return its path.

        Hosts that are added later see the folder.
        """

    @abstractmethod
    def received_bytes(self, name: str, network: int) -> int:
        """What a host's interface of a network has received."""

    @abstractmethod
    def close(self) -> None:
        """Remove the hosts and the networks, whatever runs there."""

    @abstractmethod
    def _add(self, name: str) -> None: ...

    @abstractmethod
    def _start_store(self, options: Sequence[str]) -> None: ...

    def _spawn(self, name: str, command: Sequence[str], environ: dict[str, str] | None = None) -> None:
        """Start a process whose output and end are those of a host's command."""
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                cwd=ROOT / "tests/multinode",
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def until_said(self, name: str, pattern: str, within_s: float = PATIENCE_S, after: int = 0) -> re.Match[str]:
        """Wait until a host has written what matches `pattern`, behind its first `after` characters."""
        deadline_s = time.monotonic() + within_s
        while not (found := re.search(pattern, self.output(name)[after:], re.MULTILINE)):
            if time.monotonic() > deadline_s:
                raise AssertionError(f"{name} did not say {pattern!r} within {within_s:g} s")
            time.sleep(0.1)
        return found

    def report(self) -> str:
        """What all hosts have written, for people."""
        return "".join(f"--- {self.prefix}-{name}\n{self.output(name)}" for name in self.names)


class Namespaces(Hosts):
    """Hosts that are network namespaces, with cables to a switch in one more namespace. Needs root and iproute2."""

    examples = str(ROOT / "examples")

    def __init__(self, folder: Path, networks: int = 1) -> None:
        super().__init__(folder, networks)
        self._store_options: Sequence[str] = ()
        self._shared: Path | None = None
        self._machines: dict[str, list[str]] = {}
        self._switch = f"{self.prefix}-switch"
        try:
            _run("ip", "netns", "add", self._switch)
            for network in range(networks):
                self._ip(self._switch, "link", "add", f"switch{network}", "type", "bridge")
                self._ip(self._switch, "link", "set", f"switch{network}", "up")
        except BaseException:
            self.close()
            raise

    def _ip(self, namespace: str, *arguments: str) -> None:
        _run("ip", "-n", namespace, *arguments)

    def _add(self, name: str) -> None:
        host = f"{self.prefix}-{name}"
        _run("ip", "netns", "add", host)
        self._ip(host, "link", "set", "lo", "up")
        for network in range(self.networks):
            end, cable = f"eth{network}", f"{name}.{network}"
            self._ip(self._switch, "link", "add", cable, "type", "veth", "peer", "name", end, "netns", host)
            self._ip(self._switch, "link", "set", cable, "master", f"switch{network}", "up")
            self._ip(host, "addr", "add", f"{self.address(name, network)}/24", "dev", end)
            self._ip(host, "link", "set", end, "up")

    def inside(self, name: str, *command: str) -> list[str]:
        """The command that runs `command` on a host."""
        return ["ip", "netns", "exec", f"{self.prefix}-{name}", *self._machines.get(name, ()), *command]

    def own_machine(self, name: str, booted_s: int) -> None:
        """Give a host a boot id, and clocks since boot that are `booted_s` seconds ahead of this machine's."""
        boot_id = self._folder / f"{name}.boot_id"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        clocks = ["unshare", "--time", f"--monotonic={booted_s}", f"--boottime={booted_s}", "--fork"]
        mount = f'mount --bind {boot_id} /proc/sys/kernel/random/boot_id && exec "$0" "$@"'
        self._machines[name] = [*clocks, "sh", "-c", mount]

    def start_command(self, name: str, command: Sequence[str], environ: dict[str, str]) -> None:
        """Start any program on a host, with this process's environment and `environ`."""
        kits = str(ROOT / "tests/kits")
        environ = clean_environment(PYTHONPATH=kits, PYTHONUNBUFFERED="1", **environ)
        self._spawn(name, self.inside(name, *command), environ)

    def _start(self, name: str, program: Sequence[str], environ: dict[str, str]) -> None:
        self.start_command(name, [sys.executable, "-m", *program], environ)

    def start(self, name: str, arguments: Sequence[str], environ: dict[str, str]) -> None:
        self._start(name, ["asyncdist", *arguments], environ)

    def _start_store(self, options: Sequence[str]) -> None:
        self._store_options = options
        durable = ["--data-dir", str(self._folder / "store")] if "durable" in options else []
        command = ["asyncdist_server", "--host", "0.0.0.0", "--port", str(STORE_PORT), *durable, *options]
        self._start("store", command, {"ASYNCDIST_TOKEN": TOKEN})

    def restart_store(self) -> None:
        self.kill("store")
        self.ended("store")
        said = len(self.output("store"))
        self._start_store(self._store_options)
        self.until_said("store", " ready on ", after=said)

    def _signal(self, name: str, number: signal.Signals) -> bool:
        """Signal all processes of a host; return whether it has any."""
        pids = _run("ip", "netns", "pids", f"{self.prefix}-{name}", check=False).split()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), number)
        return bool(pids)

    def kill(self, name: str) -> None:
        while self._signal(name, signal.SIGKILL):
            """Others may have been forked meanwhile."""

    def pause(self, name: str) -> None:
        self._signal(name, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self._signal(name, signal.SIGCONT)

    def cut(self, name: str, network: int = 0) -> None:
        self._ip(self._switch, "link", "set", f"{name}.{network}", "down")

    def mend(self, name: str, network: int = 0) -> None:
        self._ip(self._switch, "link", "set", f"{name}.{network}", "up")

    def limit(self, name: str, network: int, megabits: int) -> None:
        """Have a host's cable carry no more, in each direction."""
        self.address(name)
        for where, device in ((f"{self.prefix}-{name}", f"eth{network}"), (self._switch, f"{name}.{network}")):
            rate = ["rate", f"{megabits}mbit", "burst", "64kb", "latency", "50ms"]
            _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", *rate)

    def take_down(self, name: str, network: int) -> None:
        """Switch an interface of a host off."""
        self._ip(f"{self.prefix}-{name}", "link", "set", f"eth{network}", "down")

    def drop(self, name: str, network: int) -> None:
        """Have a host drop, without a word, what comes and goes over an interface."""
        for chain, side in (("INPUT", "-i"), ("OUTPUT", "-o")):
            rule = ["iptables", "-A", chain, side, f"eth{network}", "-j", "DROP"]
            _run("ip", "netns", "exec", f"{self.prefix}-{name}", *rule)

    def close_ports(self, name: str, source: str, ports: str) -> None:
        """Have a host drop, without a word, what another one sends to its TCP ports, such as `20000:20009`."""
        self.address(name)
        rule = ["iptables", "-A", "INPUT", "-s", self.address(source), "-p", "tcp", "--dport", ports, "-j", "DROP"]
        _run(*self.inside(name, *rule))

    def say(self, name: str, *arguments: str, **environ: str) -> str:
        """What `asyncdist` says with `arguments` on a host, beside what runs there."""
        environ = clean_environment(ASYNCDIST_TOKEN=TOKEN, COLUMNS="200", **environ)
        command = self.inside(name, sys.executable, "-m", "asyncdist", *arguments)
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S).stdout

    def shared_folder(self, mode: int) -> str:
        self._shared = Path(tempfile.mkdtemp(prefix=f"{PREFIX}-"))  # pytest's folders are too long for sockets
        self._shared.chmod(mode)
        return str(self._shared)

    def received_bytes(self, name: str, network: int) -> int:
        file = f"/sys/class/net/eth{network}/statistics/rx_bytes"
        return int(_run("ip", "netns", "exec", f"{self.prefix}-{name}", "cat", file))

    def close(self) -> None:
        for name in self.names:
            self.kill(name)
        for process in self._processes.values():
            process.wait(PATIENCE_S)
        for namespace in [f"{self.prefix}-{name}" for name in self.names] + [self._switch]:
            _run("ip", "netns", "del", namespace, check=False)
        if self._shared is not None:
            shutil.rmtree(self._shared)


class Containers(Hosts):
    """Hosts that are containers of the images of docker-compose.yml, on internal networks of the engine."""

    examples = "examples"

    def __init__(self, folder: Path, networks: int = 1) -> None:
        super().__init__(folder, networks)
        self._volume: str | None = None
        try:
            for network in range(networks):
                subnet = f"{self.subnet(network)}0/24"
                _run("docker", "network", "create", "--internal", "--subnet", subnet, self._net(network))
        except BaseException:
            self.close()
            raise

    def _net(self, network: int) -> str:
        return f"{self.prefix}-net{network}"

    def _container(self, name: str) -> str:
        return f"{self.prefix}-{name}"

    def _add(self, name: str) -> None:
        """Containers are made with their command."""

    def _begin(self, name: str, *options: str) -> None:
        """Make a container and start it."""
        container = self._container(name)
        of_network = ["--network", self._net(0), "--ip", self.address(name), "--no-healthcheck"]
        _run("docker", "create", "--name", container, "--hostname", name, *of_network, *options)
        for network in range(1, self.networks):
            self.mend(name, network)
        self._attach(name)

    def _attach(self, name: str) -> None:
        self._spawn(name, ["docker", "start", "--attach", self._container(name)])

    def start(self, name: str, arguments: Sequence[str], environ: dict[str, str]) -> None:
        kits = {"PYTHONPATH": "/kits"}
        variables = [f"--env={key}={value}" for key, value in (kits | environ).items()]
        mounts = [f"{ROOT}/tests/multinode/programs:/home/asyncdist/programs:ro", f"{ROOT}/tests/kits:/kits:ro"]
        if self._volume is not None:
            mounts.append(f"{self._volume}:/checkpoints")
        self._begin(name, *variables, *(f"--volume={mount}" for mount in mounts), IMAGE, *arguments)

    def _start_store(self, options: Sequence[str]) -> None:
        durable = ["--data-dir", "/var/lib/asyncdist"] if "durable" in options else []
        volume = ["--volume", "/var/lib/asyncdist"] if durable else []
        self._begin("store", f"--env=ASYNCDIST_TOKEN={TOKEN}", *volume, SERVER_IMAGE, *durable, *options)

    def restart_store(self) -> None:
        said = len(self.output("store"))
        self.kill("store")
        self.ended("store")
        self._attach("store")
        self.until_said("store", " ready on ", after=said)

    def kill(self, name: str) -> None:
        _run("docker", "kill", self._container(name))

    def pause(self, name: str) -> None:
        _run("docker", "pause", self._container(name))

    def resume(self, name: str) -> None:
        _run("docker", "unpause", self._container(name))

    def cut(self, name: str, network: int = 0) -> None:
        _run("docker", "network", "disconnect", "--force", self._net(network), self._container(name))

    def mend(self, name: str, network: int = 0) -> None:
        of_network = ["--ip", self.address(name, network), self._net(network), self._container(name)]
        _run("docker", "network", "connect", *of_network)

    def shared_folder(self, mode: int) -> str:
        self._volume = f"{self.prefix}-shared"
        _run("docker", "volume", "create", self._volume)
        folder, mount = "/checkpoints/shared", f"{self._volume}:/checkpoints"
        make = ["docker", "run", "--rm", "--name", f"{self.prefix}-mkdir", "--volume", mount, "--network", "none"]
        _run(*make, "--entrypoint", "mkdir", IMAGE, f"--mode={mode:o}", folder)
        return folder

    def received_bytes(self, name: str, network: int) -> int:
        code = (
            "import psutil; print(psutil.net_io_counters(pernic=True)[next(name for name, addresses in "
            f"psutil.net_if_addrs().items() if addresses[0].address.startswith({self.subnet(network)!r}))].bytes_recv)"
        )
        return int(_run("docker", "exec", self._container(name), "python3", "-c", code))

    def close(self) -> None:
        containers = [self._container(name) for name in self.names]
        _run("docker", "rm", "--force", "--volumes", *containers, check=False)
        for process in self._processes.values():
            process.wait(PATIENCE_S)
        _run("docker", "network", "rm", *map(self._net, range(self.networks)), check=False)
        if self._volume is not None:
            _run("docker", "volume", "rm", self._volume)
