"""ops/redis as its comments say to use it: the made file loads, and nobody else gets in."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.retry import Retry

from mlxq.producer import Producer, ServerUnreachable
from tests.security.acl import FOLDER, ROLES, TEMPLATE, documented_commands, rules
from tests.server import Server, binary, free_port

QUEUE = "default"


class Guarded(Server):
    """A server that asks everybody for a password."""

    def __init__(self, admin: str, *options: str) -> None:
        super().__init__(*options)
        self._admin = admin

    def client(self, user: str | None = None, password: str | None = None) -> redis.Redis:
        retry = Retry(NoBackoff(), 0)
        return redis.Redis(port=self.port, username=user, password=password, retry=retry)

    def admin(self) -> redis.Redis:
        return self.client(None, self._admin)

    def _answers(self) -> bool:
        with self.admin() as client:
            try:
                return bool(client.ping())
            except RedisError:
                return False


@pytest.fixture(scope="module")
def passwords(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By role, what the commands in the file's comment print; `file` is the file they make."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    folder = tmp_path_factory.mktemp("acl")
    shutil.copy(TEMPLATE, folder)
    printed = subprocess.run(
        ["sh", "-ec", documented_commands()],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    pairs = [line.split() for line in printed.stdout.splitlines()]
    return {name.lower(): word for name, word in pairs} | {"file": str(folder / "default.acl")}


@pytest.fixture(scope="module")
def guarded(passwords: dict[str, str]) -> Iterator[Guarded]:
    """A server on both files of ops/redis."""
    options = ["--include", str(FOLDER / "redis.conf"), "--aclfile", passwords["file"]]
    server = Guarded(passwords["admin"], *options)
    server.start()
    yield server
    server.stop()


def test_the_file_has_one_line_for_each_user(passwords: dict[str, str]) -> None:
    lines = Path(passwords["file"]).read_text().splitlines()
    assert [line.split()[:2] for line in lines] == [["user", name] for name in ("default", *ROLES)]
    assert len(set(passwords.values())) == 5


def test_the_file_is_refused_while_a_password_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "unfinished.acl"
    users = [f"user {name} {' '.join(granted)}" for name, granted in rules(QUEUE).items()]
    path.write_text("\n".join(users) + "\n")
    command = [binary() or "redis-server", "--port", str(free_port()), "--aclfile", str(path)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=30)
    assert ended.returncode == 1
    assert b"ACL" in ended.stdout


def test_the_server_has_the_settings(guarded: Guarded) -> None:
    with guarded.admin() as client:
        settings = client.config_get("*")
    assert settings["maxmemory-policy"] == "noeviction"
    assert (settings["appendonly"], settings["appendfsync"]) == ("yes", "everysec")
    assert "pubsub 33554432 8388608 60" in settings["client-output-buffer-limit"]


def test_nobody_gets_in_without_a_password(guarded: Guarded) -> None:
    for user, password in ((None, None), (None, "wrong"), ("submitter", ""), ("worker", "wrong")):
        with (
            guarded.client(user, password) as client,
            pytest.raises(AuthenticationError),
        ):
            client.ping()


async def test_the_submitter_gets_in_to_its_queue_alone(
    guarded: Guarded, passwords: dict[str, str]
) -> None:
    url = f"redis://submitter:{passwords['submitter']}@127.0.0.1:{guarded.port}"
    async with Producer(url, QUEUE) as producer:
        job = await producer.submit(prompt="a")
        assert await job.abort() == "requested"
    async with Producer(url, "other", submit_timeout_s=5) as producer:
        with pytest.raises(ServerUnreachable, match="refused by Redis"):
            await producer.submit(prompt="a")
    with guarded.admin() as client:
        assert client.dbsize() == 4  # the job, its lane, the bell and the abort key


def test_every_role_logs_in_with_its_own_password(
    guarded: Guarded, passwords: dict[str, str]
) -> None:
    for role in ROLES:
        with guarded.client(role, passwords[role]) as client:
            assert client.ping()
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.flushall()


def test_a_queue_over_shards(guarded: Guarded) -> None:
    """The pattern of ten shards, as the comment writes it."""
    submitter = rules("big.[0-9]")["submitter"]
    with guarded.admin() as client:
        rights = [rule for rule in submitter if not rule.startswith("#")]
        client.execute_command("ACL", "SETUSER", "shards", "reset", ">p", *rights)
        for name, verdict in (("big.0", True), ("big.9", True), ("big.x", False), ("big", False)):
            said = client.execute_command(
                "ACL", "DRYRUN", "shards", "HGET", f"{{mlxq:{name}}}:job:a", "spec"
            )
            assert (said == b"OK") is verdict, (name, said)
