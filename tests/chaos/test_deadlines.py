"""Jobs end when their time is up, and nothing of them stays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from mlxq.protocol.events import Done, Failed, Started
from ops.lib.synthetic import answer_text
from tests.chaos.conftest import Build
from tests.chaos.house import FOREVER, House
from tests.chaos.reader import GUARD_S, Reader

LASTING = {"bell", "meta", "jobs:high", "jobs:normal", "jobs:low"}


def is_expired(reader: Reader) -> bool:
    end = reader.terminal
    return isinstance(end, Failed) and end.code == "deadline_exceeded" and end.retryable


async def test_a_deadline_passes_in_the_queue(house: House) -> None:
    """All slots are taken for ever; a queued job ends at its deadline.

    Promise: 1. Fails without: the sweep (`await asyncio.sleep(3600)` in sweeper.py).
    """
    await house.start("one")
    running = await house.submit_many(house.max_batch, tokens=FOREVER)
    waiting = await house.submit(deadline_s=0.3)
    house.fault()
    await waiting.end()
    assert is_expired(waiting)
    assert not any(isinstance(event, Started) for event in waiting.events)
    for job in running:
        await job.job.abort()
    await house.check()


async def test_a_deadline_passes_while_the_job_runs(house: House) -> None:
    """A running job ends at its deadline, also in a long prefill; its slot is free.

    Promise: 1 3. Fails without: guard `gate` in lib.lua.
    """
    await house.start("one", "two")
    jobs = [await house.submit(tokens=FOREVER, deadline_s=0.5) for _ in range(3)]
    reading = await house.submit("prefill:100000", deadline_s=0.5)
    in_time = await house.submit(tokens=20, deadline_s=60)
    house.fault()
    await house.check()
    assert all(is_expired(job) and job.ids for job in jobs)
    assert is_expired(reading) and not reading.ids
    assert isinstance(in_time.terminal, Done)


async def test_a_deadline_passes_while_the_worker_is_dead(build: Build) -> None:
    """Its worker is killed and the other one is full; the job ends at its deadline all the same.

    Promise: 1. Fails without: the sweep (`await asyncio.sleep(3600)` in sweeper.py).
    """
    house: House = await build(max_batch=1)
    await house.start("full")
    [other] = await house.submit_many(1, tokens=FOREVER)
    await house.start("dead")
    job = await house.submit(tokens=FOREVER, deadline_s=1.5)
    await job.reach(tokens=3)
    house.kill("dead")
    await job.end()
    assert is_expired(job)
    await other.job.abort()
    await house.check()


@pytest.mark.slow
async def test_nothing_is_left_after_retention(house: House) -> None:
    """However jobs end, their keys expire: at last only those of the queue itself are there.

    Promise: 6. The transcript of a good end goes first; the result is then read without it.
    Fails without: PEXPIRE in `settle` (lib.lua).
    """
    house.use_producer(retention_s=2.5, replay_s=0.5)
    house.keep()
    await house.start("one", "two")
    good = await house.submit(tokens=30)
    bad = await house.submit(tokens=10_000_000)
    late = await house.submit(tokens=FOREVER, deadline_s=0.2)
    aborted = await house.submit(tokens=FOREVER)
    await aborted.reach(tokens=1)
    await aborted.job.abort()
    await good.end()
    await until_gone(house, lambda left: f"events:{good.id}" not in left)
    assert "".join([text async for text in good.job]) == answer_text(good.id, 30)
    poison = await house.submit("die@prefill", tokens=30)
    await poison.end()
    for reader in house.readers:
        reader.check_exact()
    failed = [isinstance(reader.terminal, Failed) for reader in (good, bad, late, aborted, poison)]
    assert failed == [False, True, True, False, True]
    await house.drain()
    await until_gone(house, lambda left: not left - {"dead"})


async def until_gone(house: House, holds: Callable[[set[str]], bool]) -> None:
    """Returns once what is left of the jobs and workers is as it should be."""
    deadline_s = time.monotonic() + GUARD_S
    while not holds(left := await keys_left(house)):
        assert time.monotonic() < deadline_s, left
        await asyncio.sleep(0.05)


async def keys_left(house: House) -> set[str]:
    """Keys beyond those of the queue itself. Killed workers' presence goes by itself, in 10 s."""
    prefix = f"{house.keys.tag}:"
    found = [key.decode() async for key in house.client.scan_iter(f"{prefix}*")]
    names = (house.keys.worker(""), house.keys.workers)
    presence = [key for key in found if key.startswith(names)]
    assert -1 not in [await house.client.pttl(key) for key in presence]
    return {key.removeprefix(prefix) for key in found if key not in presence} - LASTING
