"""Workers that are alive and out of touch: a Mac that slept, a network that was cut."""

from __future__ import annotations

import signal
from typing import Literal

import pytest

from mlxq.protocol.events import Resumed
from mlxq.protocol.scripts import script
from tests.chaos.conftest import Build
from tests.chaos.house import House
from tests.chaos.reader import Reader
from tests.proxy import Proxy


def resumed_by(reader: Reader) -> list[str]:
    return [event.worker for event in reader.events if isinstance(event, Resumed)]


async def test_a_worker_sleeps_for_two_leases(house: House) -> None:
    """SIGSTOP for two leases, SIGCONT while another one goes on with its jobs.

    Promise: 2 4. The sleeper is fast enough to overtake. Fails without: guard `fence` in lib.lua
    (`is_owned`), which refuses the events of the one that wakes.
    """
    await house.start("sleeper")
    jobs = await house.submit_many(4, tokens=200)
    house.workers["sleeper"].send(signal.SIGSTOP)
    house.fault()
    await house.start("other", flags=("--step-ms", "12"))
    await house.leases(2)
    for job in jobs:
        await job.go_on()
    house.workers["sleeper"].send(signal.SIGCONT)
    await house.check()
    assert [resumed_by(job)[0] for job in jobs] == ["other"] * 4


async def test_a_worker_is_cut_off_for_two_leases(house: House) -> None:
    """The worker's network swallows everything for two leases, then delivers it all.

    Promise: 2 4 7. Fails without: guard `fence` in lib.lua (`is_owned`).
    """
    async with Proxy(house.server.port) as proxy:
        await house.start("cut", url=proxy.url)
        jobs = await house.submit_many(4, tokens=200)
        proxy.reading.clear()
        house.fault()
        await house.start("other", flags=("--step-ms", "12"))
        await house.leases(2)
        for job in jobs:
            await job.go_on()
        proxy.reading.set()
        await house.check()
    assert [resumed_by(job)[0] for job in jobs] == ["other"] * 4


@pytest.mark.parametrize("how", ["cut", "half_close"])
async def test_connections_that_die(how: Literal["cut", "half_close"], build: Build) -> None:
    """Five times all connections of the workers are cut, or half closed, with events on the way.

    Promise: 1 2 7. Fails without: events kept in `Row.frozen` until they are answered (let
    `Publisher.flush` take unanswered ones for stored).
    """
    house: House = await build(lease_s=2.0)
    await house.client.script_load(script("emit").source)
    async with Proxy(house.server.port) as proxy:
        await house.start("one", "two", url=proxy.url)
        jobs = await house.submit_many(8, tokens=200)
        for _ in range(5):
            proxy.lose_request(script("emit").sha.encode())
            await house.until(lambda: proxy.pending_losses == 0)
            proxy.cut() if how == "cut" else proxy.half_close()
            house.fault()
            await house.leases(0.05)
        await house.check()
    assert {job.terminal.attempts for job in jobs} == {1}


async def test_a_slow_line(build: Build) -> None:
    """Every reply takes a sixth of a lease: events grow, and nothing queues up.

    Promise: 2 6. Fails without: one event for all that came meanwhile (`Row._take_events` in
    rows.py: let it make one for each id).
    """
    house: House = await build(lease_s=2.0)
    async with Proxy(house.server.port) as proxy:
        await house.start("one", "two", url=proxy.url)
        jobs = await house.submit_many(4, tokens=250)
        proxy.delay_s = house.lease_s / 6
        house.fault()
        for job in jobs:
            await job.end()
        proxy.delay_s = 0
        await house.check()
    assert {job.terminal.attempts for job in jobs} == {1}
    assert max(len(job.events) for job in jobs) < 100
