"""How a producer comes to its server: sockets, bad URLs, passwords and rights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis

from mlxq.producer import (
    Producer,
    ServerUnreachable,
)
from mlxq.protocol.keys import Keys
from tests.producer.hand import HandWorker
from tests.server import Server, free_port


async def test_a_unix_socket(tmp_path: Path, queue: str) -> None:
    path = tmp_path / "s"
    own = Server("--unixsocket", str(path)).start()
    try:
        async with Producer(f"unix://{path}", queue) as producer:
            job = await producer.submit(prompt="a")
            await job.abort()
            assert (await job.result()).finish_reason == "aborted"
    finally:
        own.stop()


async def test_no_server(caplog: pytest.LogCaptureFixture) -> None:
    async with Producer(f"redis://127.0.0.1:{free_port()}", submit_timeout_s=0.3) as producer:
        with pytest.raises(ServerUnreachable, match="Connect"):
            await producer.submit(prompt="a")
        pings = [producer.ping() for _ in range(10)]
        outcomes = await asyncio.gather(*pings, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {ServerUnreachable}
    # One outage is told once, by the commands and by the subscription.
    assert len(caplog.records) == 2


@pytest.mark.parametrize("url", ["http://localhost", "redis://:sec/ret@host:99", "localhost:6379"])
def test_a_bad_url(url: str) -> None:
    with pytest.raises(ValueError, match="bad Redis URL") as error:
        Producer(url)
    assert "sec" not in str(error.value)


async def test_a_wrong_password_is_told_at_once_and_never_shown(
    client: Redis, server: Server, queue: str
) -> None:
    await client.acl_setuser(queue, enabled=True, passwords=["+right"], categories=["+@all"])
    url = f"redis://{queue}:hunter2@127.0.0.1:{server.port}"
    async with Producer(url, queue, submit_timeout_s=3600) as producer:
        with pytest.raises(ServerUnreachable) as refused:
            await producer.submit(prompt="a")
        with pytest.raises(ServerUnreachable):
            await producer.attach("a").result()
        shown = repr(refused.value) + repr(producer) + repr(vars(producer))
    assert "refused" in shown
    assert "hunter2" not in shown


async def test_with_the_rights_of_a_submitter_alone(
    client: Redis, server: Server, worker: HandWorker, keys: Keys, queue: str
) -> None:
    """The ACL of PROTOCOL section 11. Such a user may ask for an abort by the key alone."""
    tag = keys.tag
    commands = "eval evalsha subscribe xrange hget hmget hset xadd xlen set time"
    rules = ["on", "nopass", f"%R~{tag}:events:*", f"&{tag}:live:*"]
    rules += [f"%RW~{tag}:{part}" for part in ("job:*", "jobs:*", "bell", "abort:*")]
    rules += [f"+{command}" for command in f"{commands} unsubscribe ping".split()]
    await client.execute_command("ACL", "SETUSER", queue, *rules)  # type: ignore[no-untyped-call]
    url = f"redis://{queue}@127.0.0.1:{server.port}"
    async with Producer(url, queue) as producer:
        job = await producer.submit(prompt="a")
        hand = await worker.take()
        await hand.start()
        await hand.say("x")
        texts = aiter(job)
        assert await anext(texts) == "x"
        assert await job.abort() == "requested"
        assert await client.get(keys.abort(job.id)) == b"1"
