"""The timeout of what a server is asked: what expires it, and what does not."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from mlxq.protocol import servers
from mlxq.protocol.keys import Keys
from mlxq.protocol.servers import Address, Locator
from mlxq.protocol.timeouts import ReplyTimeout
from tests.stall import stall, stalled

LIMIT_S = 0.2


async def test_silence_expires_it() -> None:
    with pytest.raises(TimeoutError):
        async with ReplyTimeout(LIMIT_S):
            await asyncio.Event().wait()


async def test_without_a_limit_it_ends_only_if_told() -> None:
    async def wait() -> None:
        async with timeout:
            await asyncio.Event().wait()

    timeout = ReplyTimeout(None)
    task = asyncio.create_task(wait())
    await asyncio.sleep(LIMIT_S)
    assert not task.done()
    timeout.expire()
    timeout.expire()
    with pytest.raises(TimeoutError):
        await task


async def test_a_cancellation_stays_one() -> None:
    async def wait() -> None:
        async with ReplyTimeout(LIMIT_S):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_answer_that_came_while_the_loop_stalled_counts(client: Redis) -> None:
    async def ask() -> bool:
        async with ReplyTimeout(LIMIT_S):
            return await client.ping()

    await ask()
    assert await stalled(ask(), 2 * LIMIT_S)


async def test_an_answer_of_many_reads_counts_however_often_the_loop_stalls(
    client: Redis, keys: Keys
) -> None:
    """Fails where a stalled loop has one turn, or a fixed time, left to read in."""

    async def busy() -> None:
        while True:
            await asyncio.sleep(0)
            stall(0.1)

    await client.set(keys.bell, b"x" * 400_000)
    others = asyncio.create_task(busy())
    async with ReplyTimeout(0.05):
        assert len(await client.get(keys.bell) or b"") == 400_000
    others.cancel()
    await client.delete(keys.bell)


async def test_a_server_is_found_though_the_loop_stalls(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asking(Locator):
        async def _ask(self, redis: Redis, node: Address) -> Address:
            await redis.ping()
            await stalled(redis.get("nothing"), 2 * LIMIT_S)
            return node

    monkeypatch.setattr(servers, "LOOKUP_S", LIMIT_S)
    options = client.connection_pool.connection_kwargs
    address = Address(options["host"], options["port"])
    assert await Asking([address], {}).locate() == address
