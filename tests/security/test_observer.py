"""The observer of ops/redis/users.acl: numbers and names, no text, and no change of anything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError
from typer.testing import CliRunner

from mlxq.producer import Producer
from mlxq.producer.commands import app
from mlxq.protocol.keys import Keys
from tests.security.acl import User, command
from tests.security.conftest import Connect
from tests.server import Server
from tests.worker.fakes import FakeBatch
from tests.worker.harness import Submitter, running

Load = Callable[[], FakeBatch]


async def test_sees_workers_and_depths(
    users: dict[str, User], server: Server, queue: str, submitter: Submitter, load: Load
) -> None:
    held = load()
    held.manual = True
    settings = {"redis_url": server.url, "queue": queue, "name": "mac1", "max_batch": 1}
    async with running(lambda: held, **settings):
        for job_id in ("a", "b", "c"):
            await submitter.enqueue(job_id, prompt="Hi")
        await submitter.until("a")
        async with Producer(users["observer"].url, queue) as observer:
            status = await observer.status()
    assert status.jobs == {"high": 0, "normal": 3, "low": 0}
    assert [worker.name for worker in status.workers] == ["mac1"]


def test_runs_the_command_without_showing_the_password(
    users: dict[str, User], queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXQ_REDIS_URL", users["observer"].url)
    for flags in ([], ["--json"]):
        shown = CliRunner().invoke(app, ["status", "--queue", queue, *flags])
        assert shown.exit_code == 0, shown.output
        assert queue in shown.output
        assert users["observer"].password not in shown.output


async def test_may_run_no_command_that_writes(users: dict[str, User], client: Redis) -> None:
    """Asks the server about each of its commands. Scripts and transactions count as writing."""
    writing: set[bytes] = set()
    for category in ("write", "scripting", "pubsub", "admin", "dangerous", "transaction"):
        writing |= set(await command(client, "ACL", "CAT", category))
    assert {b"set", b"eval", b"publish", b"flushall"} <= writing
    name = users["observer"].name
    verdicts = {each: await _dry_run(client, name, each) for each in writing}
    allowed = {each: said for each, said in verdicts.items() if b"permissions to run" not in said}
    assert allowed == {}


async def _dry_run(client: Redis, user: str, name: bytes) -> bytes:
    """What the server says to a command by this user, with as many words as it needs at least."""
    words = name.decode().split("|")
    for _ in range(12):
        try:
            return bytes(await command(client, "ACL", "DRYRUN", user, *words))
        except ResponseError as error:
            if "wrong number of arguments" not in str(error):
                raise
            words.append("1")
    raise AssertionError(f"{name!r} is never complete")


async def test_reads_no_prompt_and_no_output(
    users: dict[str, User], connect: Connect, queue: str, keys: Keys
) -> None:
    observer = connect(users["observer"])
    other = Keys(f"{queue}-other")
    refused: list[tuple[str | int, ...]] = [
        ("HGETALL", keys.job("a")),
        ("HGET", keys.job("a"), "spec"),
        ("XRANGE", keys.events("a"), "-", "+"),
        ("XRANGE", keys.dead, "-", "+"),
        ("SUBSCRIBE", keys.live("a")),
        ("GET", keys.abort("a")),
        ("DUMP", keys.job("a")),
        ("XLEN", other.lane("normal")),
        ("HGETALL", other.worker("w")),
        ("ZRANGE", other.workers, 0, -1),
        ("SCAN", 0),
        ("KEYS", "*"),
        ("CONFIG", "GET", "requirepass"),
    ]
    for words in refused:
        with pytest.raises(NoPermissionError):
            await command(observer, *words)
