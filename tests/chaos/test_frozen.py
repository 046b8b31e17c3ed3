"""Workers that are alive and out of touch: a Mac that slept, a network that was cut."""

from __future__ import annotations

import signal

from mlxq.protocol.events import Resumed
from tests.chaos.house import House
from tests.chaos.reader import Reader
from tests.proxy import Proxy


def resumed_by(reader: Reader) -> list[str]:
    return [event.worker for event in reader.events if isinstance(event, Resumed)]


async def test_a_worker_sleeps_for_two_leases(house: House) -> None:
    """SIGSTOP for two leases, SIGCONT while another one goes on with its jobs.

    Promise: 2 4. Fails without: guard `fence` in lib.lua (`is_owned`), which refuses the events
    of the one that wakes.
    """
    await house.start("sleeper")
    jobs = await house.submit_many(4, tokens=700)
    house.workers["sleeper"].send(signal.SIGSTOP)
    house.fault()
    await house.start("other")
    await house.leases(2)
    for job in jobs:
        await job.reach(tokens=len(job.ids) + 1)
    house.workers["sleeper"].send(signal.SIGCONT)
    await house.check()
    assert [resumed_by(job)[0] for job in jobs] == ["other"] * 4


async def test_a_worker_is_cut_off_for_two_leases(house: House) -> None:
    """The worker's network swallows everything for two leases, then delivers it all.

    Promise: 2 4 7. Fails without: guard `fence` in lib.lua, or without `asyncio.timeout` in
    `Link.once` (link.py): then the worker waits for ever for a reply that went away.
    """
    async with Proxy(house.server.port) as proxy:
        await house.start("cut", url=proxy.url)
        jobs = await house.submit_many(4, tokens=700)
        proxy.reading.clear()
        house.fault()
        await house.start("other")
        await house.leases(2)
        for job in jobs:
            await job.reach(tokens=len(job.ids) + 1)
        proxy.reading.set()
        await house.check()
    assert [resumed_by(job)[0] for job in jobs] == ["other"] * 4


async def test_connections_that_die_without_a_word(house: House) -> None:
    """Every connection of both workers is cut in mid-stream, five times.

    Promise: 1 2 7. Fails without: events kept in `Row.frozen` until they are answered (let
    `Publisher.flush` take unanswered ones for stored).
    """
    async with Proxy(house.server.port) as proxy:
        await house.start("one", "two", url=proxy.url)
        jobs = await house.submit_many(8, tokens=300)
        for _ in range(5):
            proxy.cut()
            house.fault()
            await house.leases(0.2)
        await house.check()
    assert {job.terminal.attempts for job in jobs} == {1}
