"""The server crashes, comes back with its data or without, stays away."""

from __future__ import annotations

import asyncio

import pytest

from mlxq.protocol.errors import ServerUnreachable, UnknownJob
from tests.chaos.conftest import Build
from tests.chaos.house import House
from tests.proxy import Proxy
from tests.server import Server

# With `everysec` a crash may take the last two seconds with it, and readers are told so.
AOF = ("--appendonly", "yes", "--appendfsync", "always")


async def test_server_crashes_and_comes_back_with_its_data(build: Build) -> None:
    """kill -9 of the server in mid-stream, three times, with an append-only file.

    Promise: 1 2 7. Fails without: the `except` of `Doorbell.run`, `Intake._ask` or
    `Publisher.flush`: the part ends, and with it the worker.
    """
    house: House = await build(server=Server(*AOF))
    await house.start("one", "two")
    jobs = await house.submit_many(8, tokens=400)
    for _ in range(3):
        await asyncio.to_thread(house.server.restart)
        await house.client.connection_pool.disconnect()
        house.fault()
        await jobs[0].go_on(5)
    await house.check()


async def test_server_comes_back_empty(house: House) -> None:
    """kill -9 of a server without persistence: everything stored is gone, and nobody hangs.

    Promise: 7. A submit is as durable as its server. Readers are told `UnknownJob`; the same ids
    can be submitted again. Fails without: `if look.state is None` in stream.py (`_judge`).
    """
    await house.start("one", "two")
    lost = await house.submit_many(6, tokens=100_000)
    await asyncio.to_thread(house.server.restart)
    await house.client.connection_pool.disconnect()
    house.fault()
    for reader in lost:
        await reader.end()
        assert isinstance(reader.error, UnknownJob)
    for reader in lost:
        await house.submit(tokens=50, job_id=reader.id)
    await house.check(lost=lost)


@pytest.mark.slow
async def test_server_is_away_for_four_leases(build: Build) -> None:
    """The server is away for four leases (a minute at the default) and keeps its data.

    Promise: 1 2 7. Whoever lived through the outage keeps its jobs, though an idle worker is the
    first to be back. A submit meanwhile is refused honestly; nobody spins. Fails without:
    `self._intake.hold` in `Shard._redis_back` (shard.py).
    """
    house: House = await build(server=Server(*AOF), lease_s=1.5)
    async with Proxy(house.server.port) as proxy:
        await house.start("one", "two", url=proxy.url)
        jobs = await house.submit_many(2 * house.max_batch, tokens=700)
        await house.start("idle")
        house.server.kill()
        proxy.down = True
        house.use_producer(submit_timeout_s=0.5)
        with pytest.raises(ServerUnreachable):
            await house.submit(tokens=20)
        await house.leases(1)
        await house.check_idle(house.alive)
        await house.leases(2.5)
        await asyncio.to_thread(house.server.start)
        await house.client.connection_pool.disconnect()
        await house.workers["idle"].logged("redis_back")
        proxy.down = False
        house.fault()
        await house.check()
    assert {reader.terminal.attempts for reader in jobs} == {1}
