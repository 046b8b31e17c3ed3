"""Clocks jump: the worker's time of day, its machine's sleep, the server's."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from mlxq.protocol.keys import GROUP
from tests.chaos.conftest import Build
from tests.chaos.house import House
from tests.chaos.reader import Reader
from tests.proxy import Proxy

SLEEPS = 6


@pytest.mark.parametrize("jump_s", [3600, -3600], ids=["ahead", "back"])
async def test_time_of_day_of_the_workers(jump_s: int, build: Build) -> None:
    """Right after an outage the workers' time of day is set by an hour: nobody notices.

    Promise: 1 7. Fails without: `now_s` reading a steady clock (let clock.py return time.time():
    set back, the worker takes nothing for an hour).
    """
    house: House = await build(lease_s=1.0)
    async with Proxy(house.server.port) as proxy:
        await house.start("one", "two", url=proxy.url, flags=("--jump-s", str(jump_s)))
        await house.submit_many(6, tokens=300)
        proxy.down = True
        proxy.cut()
        await house.leases(1)
        proxy.down = False
        house.fault()
        for worker in house.alive:
            await worker.logged("redis_back")
            worker.send(signal.SIGUSR1)
        await house.check()


async def test_a_machine_that_slept(build: Build) -> None:
    """A worker's machine sleeps for an hour and no other worker is there: it keeps its jobs.

    Promise: 2 4. The clock that counts sleep has jumped, so it renews its leases before it
    takes, though the bell rings. Fails without: `self._lease.age_s > …` in `Intake._may_take`
    (intake.py).
    """
    house: House = await build(lease_s=2.0, max_batch=6)
    await house.start("one")
    jobs = await house.submit_many(5, tokens=400)
    [worker] = house.alive
    kept = 0
    for _ in range(SLEEPS):
        before = await attempts(house, jobs)
        worker.send(signal.SIGSTOP)
        worker.send(signal.SIGUSR2)
        await house.leases(0.1)  # a TAKE it has sent comes before the hour, not after it
        await lapse_all(house)
        news = await house.submit(tokens=3)
        worker.send(signal.SIGCONT)
        house.fault()
        await news.end()
        kept += await attempts(house, jobs) == before
    await house.check()
    # One that falls asleep between that look and its TAKE takes its own jobs, and goes on.
    assert kept > SLEEPS / 2


async def attempts(house: House, jobs: list[Reader]) -> list[str]:
    return [(await house.hash(job.id))["attempt"] for job in jobs]


async def test_clock_of_the_server_jumps_ahead(house: House) -> None:
    """The server's clock jumps by an hour, so that every lease has lapsed at once.

    Promise: 1 2. Healthy jobs are taken from their owners and go on elsewhere; none is suspected.
    Fails without: guard `fence` in lib.lua. The jump is made as the server sees it: every
    pending entry has been idle for an hour.
    """
    await house.start("one", "two")
    jobs = await house.submit_many(6, tokens=300)
    for _ in range(3):
        await lapse_all(house)
        house.fault()
        await house.leases(0.5)
    await house.check()
    for job in jobs:
        assert (await house.hash(job.id)).get("strikes", "0") == "0"


async def lapse_all(house: House) -> None:
    lane = house.keys.lane("normal")
    pending: Any = await house.client.xpending_range(lane, GROUP, "-", "+", 100)
    for each in pending:
        await house.client.xclaim(
            lane, GROUP, each["consumer"], 0, [each["message_id"]], idle=3_600_000, justid=True
        )
