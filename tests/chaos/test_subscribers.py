"""Readers lose their subscription, are too slow, or come from elsewhere."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.house import FOREVER, House
from tests.proxy import Proxy

pytestmark = pytest.mark.server  # its output limit
FLOOD = b"x" * 65_536


@pytest.fixture(autouse=True)
def no_looks_at_quiet_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would find in the end what these tests want found at once."""
    monkeypatch.setattr("mlxq.producer.stream.QUIET_MIN_S", 3_600.0)


async def test_killed_subscriptions(house: House) -> None:
    """`CLIENT KILL` of all pub/sub connections, five times, and jobs that end meanwhile.

    Promise: 2. Fails without: `self._mark_dirty()` in `Feed.acknowledge` (hub.py).
    """
    async with Proxy(house.server.port) as proxy:
        house.use_producer(proxy.url)
        await house.start("one", "two")
        jobs = await house.submit_many(8, tokens=FOREVER)
        other = house.use_producer()
        for _ in range(5):
            await house.client.client_kill_filter(_type="pubsub")
            house.fault()
            await jobs[0].go_on(20)
        proxy.down = True
        proxy.cut()
        for job in jobs:
            assert await other.attach(job.id).abort() == "aborted"
        proxy.down = False
        await house.check()


async def test_a_subscriber_cut_off_by_the_output_limit(house: House) -> None:
    """A process that reads nothing is cut by Redis' output limit, and reads on afterwards.

    Promise: 2 6. Fails without: `self._mark_dirty()` in `Feed.acknowledge` (hub.py).
    """
    await house.client.config_set("client-output-buffer-limit", "pubsub 65536 65536 0")
    async with Proxy(house.server.port) as proxy:
        house.use_producer(proxy.url)
        await house.start("one", "two")
        jobs = await house.submit_many(4, tokens=FOREVER)
        other = house.use_producer()
        proxy.reading.clear()
        while await house.client.client_list(_type="pubsub"):
            await house.client.publish(house.keys.keepalive, FLOOD)
        for job in jobs:
            assert await other.attach(job.id).abort() == "aborted"
        proxy.reading.set()
        house.fault()
        await house.check()
    log = (house.server.folder / "log").read_text()
    assert "overcoming of output buffer limits" in log


async def test_readers_from_elsewhere_with_a_cursor(house: House) -> None:
    """Thirty readers attach late, with a cursor, to a fast stream; its worker is killed.

    Promise: 2. Fails without: the comparison in `Stream._is_next` (stream.py; let it return True).
    """
    await house.start("one", "two", flags=("--step-ms", "0.3"))
    [job] = await house.submit_many(1, tokens=FOREVER)
    other = house.use_producer()
    cursor = job.events[-1].id

    async def rest() -> list[str]:
        return [event.id async for event in other.attach(job.id).events(after=cursor)]

    late = []
    for _ in range(30):
        late.append(asyncio.create_task(rest()))
        await job.go_on(10)
    house.kill(job.worker)
    await job.go_on(100)
    assert await job.job.abort() == "aborted"
    await house.check()
    ids = [event.id for event in job.events]
    for reading in late:
        assert await reading == ids[ids.index(cursor) + 1 :]
