"""A worker whose loop is busy takes no stall of its own for an outage of the server."""

from __future__ import annotations

import asyncio

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from mlxq.protocol.keys import Keys
from mlxq.protocol.scripts import Scripts
from mlxq.worker import doorbell
from mlxq.worker.config import Config
from mlxq.worker.doorbell import Doorbell
from mlxq.worker.lease import LeaseThread
from mlxq.worker.link import Link, connect
from mlxq.worker.tasks import cancel_all
from tests.server import Server
from tests.stall import stall, stalled

LIMIT_S = 0.5


async def test_a_link_reads_what_came_while_the_loop_stalled(server: Server, keys: Keys) -> None:
    """Fails with asyncio.timeout in `Link.once`."""
    link = Link(server.url, keys.bell, timeout_s=LIMIT_S, on_back=lambda down_s: None)
    await link.once(link.client.ping)
    assert await stalled(link.once(link.client.ping), 2 * LIMIT_S)
    assert not link.down
    await link.close()


async def test_a_beat_counts_though_its_loop_stalled(server: Server, keys: Keys) -> None:
    """Fails with asyncio.timeout in `LeaseThread._beat`."""
    config = Config(model="none", redis_url=server.url, queue=keys.queue, lease_s=2 * LIMIT_S)
    lease = LeaseThread(
        config,
        Scripts(keys),
        stalled_s=lambda: 0.0,
        on_lost=lambda key, status: None,
        on_stall=lambda stalled_s: None,
    )
    client = connect(server.url, keys.bell)
    assert await lease._beat(client)
    assert await stalled(lease._beat(client), 2 * LIMIT_S)
    await client.aclose()
    lease._loop.close()


async def test_a_ring_counts_though_the_loop_stalled(
    server: Server, client: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails with asyncio.timeout in `Doorbell.run`: it gives up the line."""

    def ring_and_stall() -> None:
        with BlockingRedis.from_url(server.url) as other:
            other.xadd(keys.bell, {"ring": "2"})
        stall(2 * LIMIT_S)

    def on_ring() -> None:
        rings.append("ring")
        if len(rings) == 1:
            asyncio.get_running_loop().call_soon(ring_and_stall)

    async def disconnect() -> None:
        rings.append("lost")
        await give_up()

    rings: list[str] = []
    monkeypatch.setattr(doorbell, "ANSWER_S", LIMIT_S)
    bell = Doorbell(server.url, keys.bell, on_ring)
    pool = bell._client.connection_pool
    give_up = pool.disconnect
    monkeypatch.setattr(pool, "disconnect", disconnect)
    await client.xadd(keys.bell, {"ring": "1"})
    task = asyncio.create_task(bell.run())
    while len(rings) < 2:
        await asyncio.sleep(0.01)
    assert rings == ["ring", "ring"]
    await cancel_all([task])
