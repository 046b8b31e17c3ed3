"""A worker process is killed -9 at every stage of a job."""

from __future__ import annotations

import pytest

from mlxq.protocol.events import Done, Started
from tests.chaos.conftest import Build
from tests.chaos.house import House

STAGES = {
    "taken, no receipt": "die@taken/1",
    "prefilling": "die@prefill/1",
    "first token": "die@stored:1/1",
    "mid-stream": "die@token:40/1",
    "before FINISH": "die@finish/1",
    "after FINISH": "die@finished/1",
}


@pytest.mark.parametrize("stage", STAGES)
async def test_killed_at(stage: str, build: Build) -> None:
    """kill -9 of a worker: its jobs, and those beside them, go on elsewhere.

    Promise: 1 2 4. Fails without: the walk over lapsed leases in TAKE
    (take.lua: `walk_pending(lane, 'lapsed', LAPSED_MARK, false)`).
    """
    house: House = await build(max_batch=8)
    await house.start("one", "two")
    beside = await house.submit_many(5, tokens=250)
    victim = await house.submit(STAGES[stage], tokens=80)
    dead = await house.death()
    await house.check()
    for reader in (victim, *beside):
        assert isinstance(reader.terminal, Done) and reader.terminal.finish_reason == "length"
    lost = [reader for reader in beside if reader.worker == dead]
    assert all(reader.terminal.attempts >= 2 for reader in lost)
    assert (victim.terminal.attempts == 1) is (stage == "after FINISH")


async def test_killed_while_the_job_waits(house: House) -> None:
    """kill -9 of the only worker while jobs are queued: the next worker takes them.

    Promise: 1. They were never handed out. Fails without: asking for free slots
    only (intake.py: `self._ask(free, alone)`, with 100 in place of `free`).
    """
    running = [await house.submit(tokens=400) for _ in range(house.max_batch)]
    waiting = [await house.submit(tokens=20) for _ in range(6)]
    await house.start("one")
    for reader in running:
        await reader.reach(tokens=3)
    house.kill("one")
    await house.start("two")
    await house.check()
    for reader in waiting:
        assert isinstance(reader.events[0], Started) and reader.worker == "two"
