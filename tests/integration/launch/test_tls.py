"""Jobs whose store has TLS: a daemon, a store of their own, the variables, and where none of them count."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from jobs import free_port
from launching import clean_environment, run, write_script
from tls_kit import OPENSSL, WHY_NOT, Certificates, make_certificates

import asyncdist as dist
from asyncdist.cli.store_commands import store_group
from asyncdist.errors import DistStoreError, LaunchError
from asyncdist.launch.config import Endpoint, LaunchConfig
from asyncdist.launch.rendezvous import job_store
from asyncdist.store import TLSConfig
from asyncdist.store.credentials import TLS_VARIABLES, load_tls
from asyncdist_server.serving.threaded import ThreadedServer, serve_in_thread
from asyncdist_server.wire.auth import new_token

pytestmark = pytest.mark.skipif(OPENSSL is None, reason=WHY_NOT)
TOKEN = new_token()
WORKER = """
    import asyncio, json, os
    import asyncdist as dist

    async def main():
        async with dist.init_process_group(timeout=60) as group:
            objects = [None] * group.size
            await group.all_gather_object(objects, group.rank)
            print(json.dumps([objects, sorted(name for name in os.environ if "_TLS_" in name)]))

    dist.run(main())
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def server(certificates: Certificates) -> Iterator[ThreadedServer]:
    own = certificates.server
    with serve_in_thread(token=TOKEN, tls_cert=own.cert, tls_key=own.key) as running:
        yield running


def variables(certificates: Certificates) -> dict[str, str]:
    return {"ASYNCDIST_TLS_CA": str(certificates.ca), "ASYNCDIST_TOKEN": TOKEN}


def own_address() -> str:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


def printed(stdout: str) -> list[list[object]]:
    return [json.loads(line.partition("] ")[2]) for line in stdout.splitlines()]


def test_a_job_on_a_daemon_with_tls(tmp_path: Path, certificates: Certificates, server: ThreadedServer) -> None:
    script = write_script(tmp_path, WORKER)
    store = {"ASYNCDIST_STORE": f"localhost:{server.port}"}
    done = run("--nproc-per-node=2", script, **store, **variables(certificates))
    assert done.returncode == 0, done.stderr
    assert printed(done.stdout) == [[[0, 1], ["ASYNCDIST_TLS_CA"]]] * 2
    without = run("--nproc-per-node=2", script, **store, ASYNCDIST_TOKEN=TOKEN)
    assert without.returncode == 1
    assert "the server requires TLS" in without.stderr
    wrong = run(script, **store, ASYNCDIST_TOKEN=TOKEN, ASYNCDIST_TLS_CA=str(certificates.other_ca))
    assert wrong.returncode == 1
    assert "the certificate of the other side is refused" in wrong.stderr
    half = run(script, **store, ASYNCDIST_TOKEN=TOKEN, ASYNCDIST_TLS_CERT=str(certificates.client.cert))
    assert half.returncode == 2
    assert "TLS needs ASYNCDIST_TLS_CA" in half.stderr


def test_a_launchers_own_store_on_loopback_needs_no_certificate(tmp_path: Path, certificates: Certificates) -> None:
    script = write_script(tmp_path, WORKER)
    done = run("--standalone", script, **variables(certificates), ASYNCDIST_TLS_SERVER_NAME="daemon")
    assert done.returncode == 0, done.stderr
    assert printed(done.stdout) == [[[0], []]]


async def test_a_store_hosted_for_other_machines_has_tls(certificates: Certificates) -> None:
    address = own_address()
    identity = certificates.server
    tls = TLSConfig(
        ca_file=certificates.ca, cert_file=identity.cert, key_file=identity.key, server_hostname="localhost"
    )
    config = LaunchConfig(command=("x",), nnodes=2, endpoint=Endpoint(address, 0), token=TOKEN, tls=tls)
    place = await job_store.find_or_host(config)
    assert place.hosted is not None
    try:
        assert place.tls is tls
        store = await job_store.open_store(place, 10.0)
        assert await store.add("n", 1) == 1
        await store.close()
        with pytest.raises(DistStoreError, match="requires TLS"):
            await dist.TCPStore.connect(address, place.hosted.port, token=place.token)
    finally:
        place.hosted.close()


async def test_a_store_hosted_for_other_machines_says_what_it_misses(certificates: Certificates) -> None:
    tls = TLSConfig(ca_file=certificates.ca)
    config = LaunchConfig(command=("x",), nnodes=2, endpoint=Endpoint(own_address(), 0), token=TOKEN, tls=tls)
    with pytest.raises(LaunchError, match="ASYNCDIST_TLS_CERT and ASYNCDIST_TLS_KEY"):
        await job_store.find_or_host(config)


@pytest.mark.parametrize("how", ["env", "tcp"])
async def test_ranks_that_host_their_store_use_tls(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    port = free_port()
    for name, text in {**variables(certificates), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, text)
    method = "env://" if how == "env" else f"tcp://127.0.0.1:{port}"
    with pytest.raises(DistStoreError, match="ASYNCDIST_TLS_CERT and ASYNCDIST_TLS_KEY"):
        await dist.init_process_group(init_method=method, rank=0, world_size=1)
    monkeypatch.setenv("ASYNCDIST_TLS_CERT", str(certificates.server.cert))
    monkeypatch.setenv("ASYNCDIST_TLS_KEY", str(certificates.server.key))
    async with dist.init_process_group(init_method=method, rank=0, world_size=1):
        with pytest.raises(DistStoreError, match="requires TLS"):
            await dist.TCPStore.connect("127.0.0.1", port, token=TOKEN, tls=None)


def test_store_commands_take_tls_by_option_and_by_variable(
    certificates: Certificates, server: ThreadedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def invoke(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(store_group, [str(argument) for argument in arguments])
        return result.exit_code, result.output

    for name in TLS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ASYNCDIST_STORE", f"127.0.0.1:{server.port}")
    monkeypatch.setenv("ASYNCDIST_TOKEN", TOKEN)
    assert "the server requires TLS" in invoke("set", "cli", "1")[1]
    assert invoke("--tls-ca", certificates.ca, "set", "cli", "1") == (0, "")
    monkeypatch.setenv("ASYNCDIST_TLS_CA", str(certificates.ca))
    assert invoke("get", "cli")[1].strip() == "1"
    assert "certificate of the other side" in invoke("--tls-ca", certificates.other_ca, "get", "cli")[1]
    assert "is not valid for 'elsewhere'" in invoke("--tls-server-name", "elsewhere", "get", "cli")[1]
    assert "--tls-ca" in invoke("--help")[1]


def test_what_the_variables_mean() -> None:
    assert load_tls({}) is None
    assert load_tls(dict.fromkeys(TLS_VARIABLES, "")) is None
    assert load_tls({"ASYNCDIST_TLS_CA": "system"}) == TLSConfig()
    every = dict(zip(TLS_VARIABLES, ("ca", "cert", "key", "name"), strict=True))
    expected = TLSConfig(ca_file="ca", cert_file="cert", key_file="key", server_hostname="name")
    assert load_tls(every) == expected
    for name in TLS_VARIABLES[1:]:
        with pytest.raises(ValueError, match="TLS needs ASYNCDIST_TLS_CA"):
            load_tls({name: "x"})
    with pytest.raises(ValueError, match="ASYNCDIST_TLS_CERT"):
        load_tls({"ASYNCDIST_TLS_CA": "ca", "ASYNCDIST_TLS_KEY": "key"})


def test_a_blocking_store_takes_tls(certificates: Certificates, server: ThreadedServer) -> None:
    from asyncdist import blocking

    tls = TLSConfig(ca_file=certificates.ca)
    with blocking.TCPStore("127.0.0.1", server.port, token=TOKEN, tls=tls) as store:
        assert store.add("blocking", 3) == 3


@pytest.mark.slow("spawns interpreters")
def test_spawned_children_reach_a_daemon_with_tls(
    tmp_path: Path, certificates: Certificates, server: ThreadedServer
) -> None:
    script = write_script(
        tmp_path,
        """
        import asyncdist as dist

        def work(rank):
            async def main():
                async with dist.init_process_group(timeout=60) as group:
                    print(f"{group.size}\\n", end="", flush=True)  # in one piece, as both print
            dist.run(main())

        if __name__ == "__main__":
            dist.spawn(work, nprocs=2)
        """,
    )
    environment = clean_environment(ASYNCDIST_STORE=f"127.0.0.1:{server.port}", **variables(certificates))
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "2\n2\n"), done.stderr
