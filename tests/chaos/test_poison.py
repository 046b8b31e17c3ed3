"""Jobs that kill whoever runs them, and the jobs beside them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mlxq.protocol.events import Done, Failed, Requeued
from tests.chaos.conftest import Build
from tests.chaos.house import FOREVER, House

STEP_MS = 5.0


@pytest.mark.parametrize("poison", ["die@prefill", "die@token:5", "raise@prefill"])
async def test_a_poison_job_is_dead_lettered(poison: str, house: House) -> None:
    """A job that kills every worker at one place is given up; those beside it finish.

    Promise: 5. It is in the `dead` stream with its reason and last worker, after three crashes, or
    some more if it stores a token now and then. Fails without: `is_dead` in take.lua (return
    false).
    """
    house.keep()
    await house.start("one", "two")
    beside = await house.submit_many(6, tokens=400)
    job = await house.submit(poison, tokens=20)
    await house.check(errors="raise" in poison)
    assert isinstance(job.terminal, Failed) and job.terminal.code == "worker_lost"
    [(_, entry)] = await dead(house)
    assert entry["id"] == job.id and poison in entry["spec"]
    crashes = int(entry["crashes"])
    assert crashes == 3 or (job.ids and 3 < crashes < 10)
    assert f"{crashes} workers crashed with it" in job.terminal.message
    assert f"{crashes} workers crashed with it" in entry["reason"]
    assert entry["owner"].partition(".")[0] in house.workers
    for reader in beside:
        assert isinstance(reader.terminal, Done)


async def dead(house: House) -> list[tuple[str, dict[str, str]]]:
    entries: Any = await house.client.xrange(house.keys.dead)
    return [
        (entry.decode(), {name.decode(): value.decode() for name, value in fields.items()})
        for entry, fields in entries
    ]


async def test_neighbours_of_many_crashes_are_not_blamed(house: House) -> None:
    """Four jobs die at different places beside healthy ones, which lose nothing.

    Promise: 5. Fails without: `clear(job)` in `charge` (lib.lua): progress no longer clears, and
    neighbours become suspects.
    """
    house.keep()
    await house.start("one", "two")
    beside = await house.submit_many(4, tokens=600)
    for at in range(10, 50, 10):
        await house.submit(f"die@token:{at}/1", tokens=60)
    await house.check()
    assert await dead(house) == []
    for reader in beside:
        assert isinstance(reader.terminal, Done)
        assert (await house.hash(reader.id)).get("strikes", "0") == "0"


async def test_a_suspect_runs_alone_until_its_first_token(build: Build) -> None:
    """A job that killed a worker before its first token is alone in its next one, until then.

    Promise: 5. Fails without: `self._slots.unproven` in `Intake._may_take` (intake.py).
    """
    house: House = await build(step_ms=STEP_MS)
    await house.start("one")
    suspect = await house.submit("die@prefill/1 prefill:100", tokens=200)
    await house.death("one")
    house.workers["one"].kill()
    await house.start("two")
    while (await house.hash(suspect.id))["attempt"] != "2":
        await asyncio.sleep(0.01)
    beside = [await house.submit(tokens=20) for _ in range(3)]
    await house.check()
    alone_ms = [await taken_ms(house, job.id) - await taken_ms(house, suspect.id) for job in beside]
    assert min(alone_ms) >= 100 * STEP_MS - STEP_MS
    ends = [reader.terminal for reader in (suspect, *beside)]
    assert all(isinstance(end, Done) for end in ends)
    # And it does not stay alone: its own end came long after.
    finished_ms = int((await house.hash(suspect.id))["finished"])
    assert max([await taken_ms(house, job.id) for job in beside]) < finished_ms


async def taken_ms(house: House, job_id: str) -> int:
    return int((await house.hash(job_id))["taken"])


async def test_a_suspect_is_given_room(house: House) -> None:
    """The only worker left is busy for ever and has one free slot: it makes room for a suspect.

    Promise: 5. Its rows are handed back after a lease and go on when the suspect is cleared.
    Fails without: `make_room = 1` in take.lua.
    """
    await house.start("busy")
    lasting = await house.submit_many(house.max_batch - 1, tokens=FOREVER)
    [last] = await house.submit_many(1, tokens=FOREVER)  # leaves the victim the suspect
    await house.start("victim")
    suspect = await house.submit("die@prefill/1", tokens=20)
    await house.death("victim")
    assert await last.job.abort() == "aborted"
    await suspect.end()
    assert isinstance(suspect.terminal, Done)
    for job in lasting:
        await job.go_on()
        assert await job.job.abort() == "aborted"
    await house.check()
    for job in lasting:
        assert [e.reason for e in job.events if isinstance(e, Requeued)] == ["preempt"]
