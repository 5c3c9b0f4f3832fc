"""A daemon process with TLS: its options, new certificates on SIGHUP, and a client that outlives a kill -9."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import forked
import pytest
from launching import clean_environment
from tls_kit import OPENSSL, WHY_NOT, Certificates, Identity, make_certificates

from asyncdist.errors import DistStoreError
from asyncdist.store import TCPStore
from asyncdist_server.wire.auth import new_token

pytestmark = pytest.mark.skipif(OPENSSL is None, reason=WHY_NOT)
DEADLINE_S = 60.0
TOKEN = new_token()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@contextmanager
def daemon(identity: Identity, *arguments: object, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A daemon process that is ready, and its port."""
    options = ("--port", port, "--tls-cert", identity.cert, "--tls-key", identity.key, *arguments)
    with forked.Popen(
        [sys.executable, "-m", "asyncdist_server", *map(str, options)],
        env=clean_environment(ASYNCDIST_TOKEN=TOKEN),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("asyncdist-server ready on 127.0.0.1:"), (line, process.communicate())
            yield process, int(line.split()[-1].rpartition(":")[2])
        finally:
            process.kill()
            process.communicate()


async def test_a_client_outlives_the_kill_of_a_daemon_with_tls(certificates: Certificates) -> None:
    changed = asyncio.Event()
    with daemon(certificates.server, "--tls-ca", certificates.ca) as (process, port):
        store = await TCPStore.connect(
            "localhost", port, token=TOKEN, tls=certificates.mutual, on_incarnation_change=changed.set
        )
        assert await store.add("n", 5) == 5
        waiting = asyncio.ensure_future(store.get("later", timeout=DEADLINE_S))
        assert await store.add("n", 5) == 10
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.wait)
    with daemon(certificates.server, "--tls-ca", certificates.ca, port=port):
        async with store, asyncio.timeout(DEADLINE_S):
            await changed.wait()
            assert await store.add("n", 1) == 1
            await store.set("later", "now")
            assert await waiting == b"now"


async def test_renewed_certificates_are_read_on_a_signal(certificates: Certificates, tmp_path: Path) -> None:
    own = Identity(tmp_path / "cert.pem", tmp_path / "key.pem")

    def install(identity: Identity) -> None:
        own.cert.write_bytes(identity.cert.read_bytes())
        own.key.write_bytes(identity.key.read_bytes())

    async def heard(process: subprocess.Popen[str], words: str) -> None:
        assert process.stderr is not None
        async with asyncio.timeout(DEADLINE_S):
            while words not in await asyncio.to_thread(process.stderr.readline):
                pass

    install(certificates.expired)
    tls = certificates.client_config()
    with daemon(own) as (process, port):
        with pytest.raises(DistStoreError, match="certificate has expired"):
            await TCPStore.connect("127.0.0.1", port, token=TOKEN, tls=tls)
        install(certificates.server)
        process.send_signal(signal.SIGHUP)
        await heard(process, "certificates_read")
        async with TCPStore("127.0.0.1", port, token=TOKEN, tls=tls) as store:
            own.key.write_text("junk")
            process.send_signal(signal.SIGHUP)
            await heard(process, "certificates_kept")
            assert await store.check([])
        async with TCPStore("127.0.0.1", port, token=TOKEN, tls=tls) as store:
            assert await store.check([])


def test_wrong_files_are_one_clear_line(certificates: Certificates, tmp_path: Path) -> None:
    own = certificates.server
    locked = tmp_path / "locked.key"
    assert OPENSSL is not None
    encrypt = [OPENSSL, "ec", "-in", str(own.key), "-out", str(locked), "-aes128", "-passout", "pass:secret"]
    subprocess.run(encrypt, check=True, capture_output=True)
    for arguments, words in (
        (("--tls-key", own.key), "give --tls-cert"),
        (("--tls-cert", own.cert), "no certificate and its key"),
        (("--tls-cert", own.cert, "--tls-key", certificates.client.key), "key values mismatch"),
        (("--tls-cert", own.cert, "--tls-key", locked), "the key is encrypted"),
        (("--tls-cert", own.cert, "--tls-key", own.key, "--tls-ca", own.key), "no certificates in PEM"),
        (("--tls-cert", own.cert, "--tls-key", own.key, "--torch"), "--torch-port"),
        (("--tls-cert", tmp_path / "nothing"), "does not exist"),
    ):
        command = [sys.executable, "-m", "asyncdist_server", "--port", "0", *map(str, arguments)]
        done = forked.run(command, DEADLINE_S, clean_environment())
        assert done.returncode != 0
        assert words in done.stderr
        assert "Traceback" not in done.stderr
