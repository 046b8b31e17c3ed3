"""The worker of ops/redis/users.acl: it can run a whole worker, and nothing but this queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from mlxq.producer import Producer, Status
from mlxq.protocol.keys import Keys
from mlxq.protocol.scripts import Scripts, run
from mlxq.worker.engine.request import Admit
from tests.security.acl import User, command, grant
from tests.security.conftest import TEXT, Connect
from tests.server import Server
from tests.worker.fakes import FakeBatch
from tests.worker.harness import Submitter, check_stream, running, text_of

Load = Callable[[], FakeBatch]


async def denials(client: Redis, user: User) -> list[str]:
    """What the server has refused this user, apart from redis-py introducing itself."""
    log: Any = await client.acl_log(128)
    refused = [entry["object"] for entry in log if entry["username"] == user.name]
    return [what for what in refused if what != "client|setinfo"]


async def test_runs_a_whole_worker(
    users: dict[str, User],
    client: Redis,
    queue: str,
    keys: Keys,
    submitter: Submitter,
    load: Load,
) -> None:
    """Serving, aborts, bad input, sweeps, drain, take-over: the server refuses nothing of it."""
    settings = {"queue": queue, "lease_s": 2.0, "redis_url": users["worker"].url}
    slow = load()
    slow.manual = True
    async with Producer(users["submitter"].url, queue) as producer:
        async with running(lambda: slow, **settings, name="mac1", drain_timeout_s=0) as first:
            job = await producer.submit(prompt="Hi", max_tokens=100)
            bad = await producer.submit(prompt_token_ids=[10**6])
            doomed = await producer.submit(prompt="Hi", max_tokens=100)
            await submitter.until(doomed.id)
            assert await doomed.abort() == "requested"
            await submitter.terminal(doomed.id)
            slow.allow(5)
            await submitter.until(job.id, tokens=3)
            assert await first.stop() == 0
        async with running(load, **settings, name="mac2"):
            assert (await job.result()).text == TEXT
            assert (await submitter.terminal(bad.id))["type"] == "failed"
            assert [worker.name for worker in (await _status(users, queue)).workers] == ["mac2"]
    events = await submitter.events(job.id)
    check_stream(events)
    assert text_of(events) == TEXT
    assert {"requeued", "resumed"} <= {event["type"] for event in events}
    assert await denials(client, users["worker"]) == []


async def _status(users: dict[str, User], queue: str) -> Status:
    async with Producer(users["observer"].url, queue) as observer:
        return await observer.status()


async def test_sweeps_to_the_end_of_the_lanes(
    users: dict[str, User], client: Redis, connect: Connect, keys: Keys, submitter: Submitter
) -> None:
    """The script forgets consumers there, and would pass over a refusal in silence."""
    scripts, worker = Scripts(keys), connect(users["worker"])
    await submitter.enqueue("a", prompt="Hi")
    await run(worker, scripts.take("w.1", 1, lease_ms=60_000))
    assert (await run(worker, scripts.sweep())).wrapped
    assert await denials(client, users["worker"]) == []
    forget = ("XGROUP", "DELCONSUMER", keys.lane("low"), "workers", "gone.1")
    assert await command(client, "ACL", "DRYRUN", users["worker"].name, *forget) == b"OK"


async def test_gives_back_what_a_dying_engine_held(
    users: dict[str, User], client: Redis, queue: str, submitter: Submitter, load: Load
) -> None:
    def burst(rows: list[Admit]) -> None:
        raise RuntimeError("no more")

    broken = load()
    broken.before_step = burst
    url = users["worker"].url
    async with running(lambda: broken, redis_url=url, queue=queue, lease_s=2.0) as worker:
        await submitter.enqueue("a", prompt="Hi")
        assert await worker.exit == 3
    assert (await submitter.events("a"))[-1]["reason"] == "crash"
    assert await denials(client, users["worker"]) == []


async def test_in_a_cluster(queue: str, load: Load) -> None:
    """The same rights are enough there: the slots are asked for, and channels are sharded."""
    node = Server("--cluster-enabled", "yes").start()
    try:
        async with Redis(port=node.port) as admin:
            await command(admin, "CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            async with asyncio.timeout(30):
                while b"cluster_state:ok" not in await command(admin, "CLUSTER", "INFO"):
                    await asyncio.sleep(0.05)
            users = await grant(admin, node.port, queue)
            urls = {
                role: user.url.replace("redis:", "redis+cluster:") for role, user in users.items()
            }
            async with (
                running(load, redis_url=urls["worker"], queue=queue, lease_s=2.0),
                Producer(urls["submitter"], queue) as producer,
                Producer(urls["observer"], queue) as observer,
            ):
                job = await producer.submit(prompt="Hi", max_tokens=100)
                assert "".join([text async for text in job]) == TEXT
                assert await job.abort() == "finished"
                assert len((await observer.status()).workers) == 1
            assert await denials(admin, users["worker"]) == []
    finally:
        node.stop()


async def test_may_do_nothing_else(
    users: dict[str, User], connect: Connect, queue: str, keys: Keys
) -> None:
    worker = connect(users["worker"])
    other = Keys(f"{queue}-other")
    refused: list[tuple[str | int, ...]] = [
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("CONFIG", "GET", "*"),
        ("CONFIG", "SET", "maxmemory", 1),
        ("ACL", "LIST"),
        ("ACL", "SETUSER", "me", "+@all"),
        ("KEYS", "*"),
        ("SCAN", 0),
        ("SCRIPT", "FLUSH"),
        ("FUNCTION", "FLUSH"),
        ("CLIENT", "LIST"),
        ("CLIENT", "KILL", "TYPE", "normal"),
        ("SHUTDOWN",),
        ("MONITOR",),
        ("INFO",),
        ("SELECT", 1),
        ("SUBSCRIBE", keys.live("a")),
        ("PSUBSCRIBE", "*"),
        ("SET", keys.job("a"), "x"),
        ("RENAME", keys.job("a"), keys.job("b")),
        ("HGET", other.job("a"), "spec"),
        ("HSET", other.job("a"), "state", "done"),
        ("XADD", other.events("a"), "1-1", "e", "{}"),
        ("XRANGE", other.events("a"), "-", "+"),
        ("DEL", other.lane("normal")),
        ("PUBLISH", other.live("a"), "x"),
        ("SPUBLISH", other.live("a"), "x"),
        ("EVAL", "return 1", 1, other.bell),
    ]
    for words in refused:
        with pytest.raises(NoPermissionError):
            await command(worker, *words)
