"""BEAT keeps a lease and never takes one; RELEASE gives a job back for others to take at once."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from redis.exceptions import ResponseError

from mlxq.protocol.keys import GROUP
from mlxq.protocol.scripts import (
    ABORTED,
    BROKEN,
    DONE,
    EXPIRED,
    FENCED,
    EmitItem,
    ReleaseReason,
)
from tests.protocol.wire import LEASE_MS, TOKEN, Wire, heard


async def test_beat_renews_the_lease(wire: Wire) -> None:
    await wire.running()
    await wire.lapse("a")
    assert await wire.beat("w1", ("a", 1)) == [DONE]
    [(holder, idle_ms)] = await wire.holders()
    assert holder == "w1" and idle_ms < LEASE_MS
    assert await wire.take_ids("w2") == []


async def test_beat_of_several_jobs_in_order(wire: Wire) -> None:
    for job_id in ("a", "aborted", "late"):
        await wire.running(job_id)
    await wire.ask_abort("aborted")
    await wire.pass_deadline("late")
    jobs = [("none", 1), ("late", 1), ("a", 1), ("aborted", 1), ("a", 2)]
    assert await wire.beat("w1", *jobs) == [FENCED, EXPIRED, DONE, ABORTED, FENCED]
    assert await wire.is_closed("aborted") and await wire.is_closed("late")


async def test_beat_of_nothing(wire: Wire) -> None:
    assert await wire.beat("w1") == []


async def test_a_zombies_beat_steals_nothing_back(wire: Wire) -> None:
    await wire.running(tokens=1)
    await wire.lapse("a")
    await wire.take("w2")
    assert await wire.beat("w1", ("a", 1)) == [FENCED]
    assert [holder for holder, _ in await wire.holders()] == ["w2"]


async def test_beat_never_brings_an_entry_back(wire: Wire) -> None:
    await wire.running()
    [entry] = await wire.fields("a", "entry")
    await wire.command("XACK", wire.keys.lane("normal"), GROUP, entry)
    assert await wire.beat("w1", ("a", 1)) == [DONE]
    assert await wire.holders() == []


async def test_beat_without_a_group(wire: Wire) -> None:
    await wire.running()
    await wire.command("XGROUP", "DESTROY", wire.keys.lane("normal"), GROUP)
    assert await wire.beat("w1", ("a", 1)) == [DONE]


@pytest.mark.parametrize("reason", ["drain", "preempt", "crash"])
async def test_release_requeues_tells_and_rings(wire: Wire, reason: ReleaseReason) -> None:
    await wire.running(tokens=1)
    bell_id = (await wire.take("w2")).bell_id
    async with wire.listening() as subscription:
        assert await wire.release("w1", reason, ("a", 1)) == [DONE]
        [message] = await heard(subscription, 1)
        assert message == f'{{"id":"1-2","type":"requeued","reason":"{reason}"}}'.encode()
    assert await wire.event_ids() == ["1-1", "1-2"]
    job = await wire.job()
    assert (job["state"], job["seq"], "owner" in job) == ("queued", "2", False)
    assert await wire.client.xread({wire.keys.bell: bell_id})
    assert await wire.look() == FENCED
    [taken] = (await wire.take("w2")).jobs
    assert (taken.id, taken.attempt, taken.seq, taken.tokens) == ("a", 2, 2, 1)


async def test_release_no_room_is_silent(wire: Wire) -> None:
    await wire.running()
    bell_id = (await wire.take("w2")).bell_id
    assert await wire.release("w1", "no_room", ("a", 1)) == [DONE]
    assert await wire.events() == []
    assert not await wire.client.xread({wire.keys.bell: bell_id})
    assert await wire.fields("a", "state", "releases", "seq") == ["queued", "1", "0"]
    assert await wire.take_ids("w2") == ["a"]


async def test_a_released_job_is_claimable_by_any_lease(wire: Wire) -> None:
    await wire.running(tokens=1)
    await wire.release("w1", "drain", ("a", 1))
    assert len((await wire.take("w2", lease_ms=10 * 24 * 3600 * 1000)).jobs) == 1


async def test_release_repeated_is_fenced_and_changes_nothing(wire: Wire) -> None:
    await wire.running(tokens=1)
    await wire.release("w1", "drain", ("a", 1))
    before = await wire.job()
    assert await wire.release("w1", "drain", ("a", 1)) == [FENCED]
    assert await wire.job() == before
    assert len(await wire.events()) == 2


async def test_release_that_runs_late_does_not_hit_the_new_attempt(wire: Wire) -> None:
    await wire.running(tokens=1)
    await wire.lapse("a")
    await wire.take("w1")
    assert await wire.release("w1", "drain", ("a", 1)) == [FENCED]
    assert await wire.look("w1", "a", 2) == DONE


@pytest.mark.parametrize("reason", get_args(ReleaseReason))
async def test_release_gates(wire: Wire, reason: ReleaseReason) -> None:
    for job_id in ("aborted", "late", "good"):
        await wire.running(job_id)
    await wire.ask_abort("aborted")
    await wire.pass_deadline("late")
    statuses = await wire.release("w1", reason, ("aborted", 1), ("late", 1), ("good", 1))
    assert statuses == [ABORTED, EXPIRED, DONE]
    assert await wire.is_closed("aborted") and await wire.is_closed("late")


async def test_release_counts(wire: Wire) -> None:
    await wire.enqueue()
    for i in range(3):
        await wire.take("w1")
        await wire.release("w1", "drain", ("a", i + 1))
    assert await wire.fields("a", "releases", "crashes") == ["3", "0"]
    assert [event["type"] for _, event in await wire.events()] == ["requeued"] * 3


async def test_release_without_a_group(wire: Wire) -> None:
    await wire.running(tokens=1)
    await wire.command("XGROUP", "DESTROY", wire.keys.lane("normal"), GROUP)
    assert await wire.release("w1", "drain", ("a", 1)) == [DONE]
    assert await wire.take_ids("w2") == ["a"]


async def test_release_of_a_broken_job_closes_it(wire: Wire) -> None:
    await wire.running(tokens=1)
    await wire.command("XADD", wire.keys.events("a"), "1-9", "e", "{}")
    assert await wire.release("w1", "drain", ("a", 1)) == [BROKEN]
    assert await wire.is_closed()


async def test_the_new_owner_goes_on_behind_requeued(wire: Wire) -> None:
    await wire.running(tokens=1)
    await wire.release("w1", "preempt", ("a", 1))
    await wire.take("w2")
    resumed = json.dumps({"type": "resumed", "attempt": 2}).encode()
    assert await wire.emit("w2", EmitItem("a", 2, 3, 1, resumed)) == [DONE]
    assert await wire.emit("w2", EmitItem("a", 2, 4, 2, TOKEN)) == [DONE]
    assert await wire.event_ids() == ["1-1", "1-2", "2-3", "2-4"]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("beat", ()),
        ("beat", ("w1", "a")),
        ("beat", ("w1", "a", "x")),
        ("release", ("w1",)),
        ("release", ("w1", "tired", "a", 1)),
        ("release", ("w1", "drain", "a")),
        ("release", ("w1", "drain", "a", "x")),
    ],
)
async def test_wrong_arguments_are_told(wire: Wire, name: str, args: tuple[str | int, ...]) -> None:
    calls = {
        "beat": wire.scripts.beat("w1", []),
        "release": wire.scripts.release("w1", "drain", []),
    }
    call = calls[name]
    with pytest.raises(ResponseError, match="expected pub owner"):
        await wire.command("EVAL", call.script.source, 1, call.key, "PUBLISH", *args)
