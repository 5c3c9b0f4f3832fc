"""``python -m bench.hosts``: collectives between hosts whose network is the bottleneck, beside gloo.

Hosts are network namespaces of this machine (as root, on Linux), each connected to a switch by a cable that carries
`--rate` Mbit/s in each direction, or by several (`--interfaces`) to as many networks. So it is the network that limits,
and a slow machine tells as much as a fast one: what counts is the share of the cable that is used (nccl-tests' busbw
divided by the rate; headers take 5 %).

asyncdist is measured as it is, and with what `asyncdist tune --links` finds out about the cable. With several ranks a
host they share memory there, and a ring over all ranks, which does not know hosts, is measured beside them.
`--ranks-per-host 3,1` are two hosts of different size; `--in-turn` deals the ranks out to the hosts one by one.
`--bytes` counts what leaves the busiest host. With several interfaces, one of them is measured beside all. What plain
TCP carries on all hosts' first cables at once says whether this machine keeps up with the rate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.table import Table

from asyncdist.cli.tables import BYTES, show_bytes, show_seconds
from bench.candidates import GLOO, asyncdist
from bench.command_line import Bar, ListOf
from bench.model import LARGE_BYTES, PROFILES, Candidate, Case, Cell, Profile, Subject
from bench.operations import OPERATIONS
from bench.process import Child
from bench.runner import ROOT, Session, run_subject, unused_port

DEVICE: Final = "cable"
QUEUE_MS: Final = 50
"""How long a packet may wait for the cable before it is dropped."""
LEAST_BURST_BYTES: Final = 64 << 10
BURST_S: Final = 2e-3
"""Of the rate, in a row: with less the kernel's timers are too coarse for fast cables. With 64 KiB three cables carry a
quarter of 1 Gbit/s on two busy cores, with two milliseconds all of it."""
PLAIN_S: Final = 2.0
PLAIN_LIMIT_S: Final = 60.0
PLAIN: Final = """
import socket, sys, time
if sys.argv[1] == "receive":
    with socket.create_server(("", 7000)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
    room, count, start = bytearray(1 << 20), 0, time.monotonic()
    while got := connection.recv_into(room):
        count += got
    print(count / (time.monotonic() - start))
else:
    with socket.create_connection((sys.argv[1], 7000)) as connection:
        end = time.monotonic() + float(sys.argv[2])
        while time.monotonic() < end:
            connection.sendall(bytes(1 << 18))
"""
"""One stream, which says how many bytes a second it has carried."""
TUNE_S: Final = 5.0
TUNE_LIMIT_S: Final = 90.0
COUNTED: Final = 10
"""Operations whose bytes are counted."""


class Network:
    """Hosts and what connects them, until it is closed."""

    def __init__(self, sizes: tuple[int, ...], megabits: int, interfaces: int = 1, *, in_turn: bool = False) -> None:
        """`sizes`: ranks of each host; `in_turn`: dealt out one by one, not in runs."""
        self.sizes = sizes
        places = [(place if in_turn else 0, host) for host, size in enumerate(sizes) for place in range(size)]
        self.hosts = [host for _, host in sorted(places)]
        """Of each rank."""
        self.devices = [f"{DEVICE}{number}" for number in range(interfaces)]
        self.transport = "tcp" if max(sizes) == 1 else "auto"
        self.names = [f"bench{os.getpid()}-{number}" for number in range(len(sizes))]
        self._switch = f"bench{os.getpid()}-switch"
        self._megabits = megabits

    def __enter__(self) -> Network:
        try:
            _ip("netns", "add", self._switch)
            for network in range(len(self.devices)):
                _ip("-n", self._switch, "link", "add", f"bridge{network}", "type", "bridge")
                _ip("-n", self._switch, "link", "set", f"bridge{network}", "up")
            for number, name in enumerate(self.names):
                self._add(number, name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self.names, self._switch):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=30)

    def address(self, number: int, network: int = 0) -> str:
        """That of a host."""
        return f"10.215.{network}.{number + 1}"

    def inside(self, rank: int) -> tuple[str, ...]:
        """What the command of a rank begins with: it runs on the rank's host."""
        return self.on(self.hosts[rank])

    def on(self, host: int) -> tuple[str, ...]:
        """What a command on a host begins with."""
        return ("ip", "netns", "exec", self.names[host])

    def sent_bytes(self) -> list[int]:
        """What each host has put on its cables, by the interfaces' own counters."""
        return [sum(self._sent_bytes(name, device) for device in self.devices) for name in self.names]

    def _sent_bytes(self, name: str, device: str) -> int:
        shown = _run("ip", "-n", name, "-json", "-statistics", "link", "show", device)
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def plain_share(self) -> float:
        """The share of the rate that plain TCP carries from each host to the next, all at once, of the slowest."""
        run, number = [sys.executable, "-c", PLAIN], len(self.sizes)
        with contextlib.ExitStack() as stack:

            def start(host: int, *arguments: str) -> subprocess.Popen[str]:
                command = [*self.on(host), *run, *arguments]
                started = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
                stack.callback(started.kill)
                return started

            receiving = [start(host, "receive") for host in range(number)]
            for one in receiving:
                assert one.stdout is not None
                one.stdout.readline()
            for host in range(number):
                start(host, self.address((host + 1) % number), f"{PLAIN_S:g}")
            rates = [float(one.communicate(timeout=PLAIN_LIMIT_S)[0]) for one in receiving]
        return min(rates) / (self._megabits * 125e3)

    def _add(self, number: int, name: str) -> None:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        burst = max(LEAST_BURST_BYTES, int(BURST_S * self._megabits * 125e3))
        for network, device in enumerate(self.devices):
            port = f"port{number}.{network}"
            _ip("link", "add", device, "netns", name, "type", "veth", "peer", "name", port, "netns", self._switch)
            _ip("-n", self._switch, "link", "set", port, "master", f"bridge{network}", "up")
            _ip("-n", name, "address", "add", f"{self.address(number, network)}/24", "dev", device)
            _ip("-n", name, "link", "set", device, "up")
            for where, end in ((name, device), (self._switch, port)):
                limit = ["rate", f"{self._megabits}mbit", "burst", str(burst), "latency", f"{QUEUE_MS}ms"]
                _run("tc", "-n", where, "qdisc", "add", "dev", end, "root", "tbf", *limit)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def tune(network: Network, path: Path, environment: Mapping[str, str]) -> None:
    """Have two hosts measure their link, into the file `path`."""
    children = []
    with contextlib.ExitStack() as stack:
        port = str(unused_port())
        for rank in (0, 1):
            command = [
                *network.on(rank),
                sys.executable,
                "-m",
                "asyncdist",
                "tune",
                "--links",
                "--transport",
                network.transport,
            ]
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": network.address(0), "MASTER_PORT": port}
            children.append(
                Child(
                    [*command, "--seconds", f"{TUNE_S:g}", "--output", str(path)],
                    environment={**environment, **place, "PYTHONPATH": str(ROOT)},
                )
            )
            stack.callback(children[-1].stop)
        for child in children:
            if not child.wait(TUNE_LIMIT_S) or child.process.returncode:
                raise click.ClickException(f"asyncdist tune --links: {child.output_tail()}")


def candidates(network: Network, tuning: Path, environment: Mapping[str, str]) -> tuple[Candidate, ...]:
    """asyncdist as it is and tuned, and gloo, on the hosts of `network`."""
    own = {"ASYNCDIST_TUNING": "off", **environment}
    ours = asyncdist("asyncdist", network.transport)
    found = [
        (ours, "asyncdist", own),
        (ours, "asyncdist tuned", {**own, "ASYNCDIST_TUNING": str(tuning)}),
        (GLOO, "gloo", {"GLOO_SOCKET_IFNAME": network.devices[0]}),
    ]
    if len(network.devices) > 1:
        found.insert(2, (ours, "one interface", {**own, "ASYNCDIST_SOCKET_IFNAME": network.devices[0]}))
    if len(network.hosts) > len(network.sizes):
        found.insert(2, (ours, "ring over all ranks", {**own, "ASYNCDIST_ALGO": "all_reduce:ring"}))
    return tuple(
        dataclasses.replace(
            candidate,
            name=name,
            environment={**candidate.environment, **more},
            host=network.address(0),
            prefix=network.inside,
        )
        for candidate, name, more in found
    )


def cases(operations: tuple[str, ...], sizes: tuple[int, ...], profile: Profile) -> list[Case]:
    """Every operation in every size."""
    return [
        Case(operation, nbytes, *profile.samples(large=nbytes > LARGE_BYTES))
        for operation in operations
        for nbytes in sizes
    ]


def crossing_bytes(case: Case, sizes: tuple[int, ...]) -> float:
    """What the largest host must send to the others, at least, or every host."""
    if case.operation == "all_to_all":
        return max(sizes) * case.nbytes * (sum(sizes) - max(sizes)) / sum(sizes)
    return case.nbytes * OPERATIONS[case.operation].bus_factor(len(sizes))


def count_bytes(network: Network, candidate: Candidate, case: Case) -> float:
    """Bytes that the busiest host sends in one operation, headers included."""
    session = Session(candidate, len(network.hosts))
    try:
        counted = dataclasses.replace(case, samples=COUNTED, warmup=0)
        session.measure(counted)  # connections are made
        before = network.sent_bytes()
        session.measure(counted)
        return max(after - sent for after, sent in zip(network.sent_bytes(), before, strict=True)) / COUNTED
    finally:
        session.close()


def table(cells: list[Cell], megabits: int, sizes: tuple[int, ...], interfaces: int = 1) -> Table:
    """Times, and the share of the cables that they use."""
    cables = f"{interfaces} cables" if interfaces > 1 else "a cable"
    found = Table(title=f"{megabits} Mbit/s between hosts, p50, and the share of {cables} that is used")
    found.add_column("case")
    found.add_column("ranks of hosts", justify="right")
    names = list(cells[0].measurements) if cells else []
    for name in names:
        found.add_column(name, justify="right")
    for cell in cells:
        moved_bytes = crossing_bytes(cell.case, sizes)
        row = []
        for name in names:
            measurement = cell.measurements[name]
            if measurement.failure is not None:
                row.append("missing")
                continue
            share = moved_bytes / measurement.p50_s() / (interfaces * megabits * 125e3)
            wrong = f", {measurement.wrong} wrong" if measurement.wrong else ""
            row.append(f"{show_seconds(measurement.p50_s())}, {share:.0%}{wrong}")
        found.add_row(f"{cell.case.operation} {show_bytes(cell.case.nbytes)}", "+".join(map(str, sizes)), *row)
    return found


def bytes_table(network: Network, tuning: Path, environment: Mapping[str, str], counted: list[Case]) -> Table:
    """What leaves the busiest host, and how much more that is than it has to send."""
    ranks = "+".join(map(str, network.sizes))
    found = Table(title=f"sent by the busiest of {len(network.sizes)} hosts with {ranks} ranks, of the least")
    found.add_column("case")
    used = [candidate for candidate in candidates(network, tuning, environment) if candidate.missing() is None]
    for candidate in used:
        found.add_column(candidate.name, justify="right")
    for case in counted:
        least = crossing_bytes(case, network.sizes)
        sent = [count_bytes(network, candidate, case) for candidate in used]
        shown = (f"{show_bytes(int(number))}, {number / least:.2f}x" for number in sent)
        found.add_row(f"{case.operation} {show_bytes(case.nbytes)}", *shown)
    return found


@click.command()
@click.option("--hosts", type=click.IntRange(min=2, max=64), default=4, show_default=True)
@click.option(
    "--ranks-per-host", type=ListOf(click.IntRange(min=1, max=64)), default="1", help="One number, or one per host."
)
@click.option("--in-turn", is_flag=True, help="Ranks 0, 1, ... are on hosts 0, 1, ..., instead of runs of them.")
@click.option("--bytes", "counts", is_flag=True, help="Count what leaves the busiest host, instead of times.")
@click.option("--rate", "megabits", type=click.IntRange(min=1, max=100_000), default=200, show_default=True)
@click.option("--interfaces", type=click.IntRange(min=1, max=16), default=1, show_default=True, help="Of each host.")
@click.option(
    "--operations", type=ListOf(click.Choice(sorted(set(OPERATIONS) - {"barrier"}))), default="all_reduce,all_to_all"
)
@click.option("--sizes", type=ListOf(BYTES), default="64KiB,256KiB,1MiB,16MiB", show_default=True)
@click.option("--profile", type=click.Choice(list(PROFILES)), default="promises", show_default=True)
def main(
    hosts: int,
    ranks_per_host: tuple[int, ...],
    in_turn: bool,
    counts: bool,
    megabits: int,
    interfaces: int,
    operations: tuple[str, ...],
    sizes: tuple[int, ...],
    profile: str,
) -> None:
    """Measure collectives between HOSTS network namespaces whose cables carry RATE Mbit/s each."""
    if sys.platform != "linux" or os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        raise SystemExit("needs Linux, root, and iproute2's ip and tc, to make network namespaces")
    chosen = PROFILES[profile]
    environment = {"ASYNCDIST_TOKEN": secrets.token_hex()}
    ranks = ranks_per_host * hosts if len(ranks_per_host) == 1 else ranks_per_host
    network = Network(ranks, megabits, interfaces, in_turn=in_turn)
    if interfaces > 1:
        environment["ASYNCDIST_SOCKET_IFNAME"] = ",".join(network.devices)
    with network, tempfile.TemporaryDirectory(prefix="bench-") as folder:
        tuning = Path(folder) / "tuning.json"
        tune(network, tuning, environment)
        share = network.plain_share()
        print(f"plain TCP from each host to the next, all at once: {share:.0%} of {megabits} Mbit/s", file=sys.stderr)
        if counts:
            Console(width=120).print(bytes_table(network, tuning, environment, cases(operations, sizes, chosen)))
            return
        subject = Subject(
            "hosts",
            "Between hosts",
            (sum(ranks),),
            lambda used: cases(operations, sizes, used),
            candidates(network, tuning, environment),
            modes=("free",),
            budgeted=True,
        )
        with Bar(Console(stderr=True)) as bar:
            cells = run_subject(subject, dataclasses.replace(chosen, neighbors=True), progress=bar.line)
    Console(width=120).print(table(cells, megabits, ranks, interfaces))
    if any(measurement.wrong for cell in cells for measurement in cell.measurements.values()):
        raise SystemExit("wrong results")


if __name__ == "__main__":
    main()
