"""Suspects: handed out alone, to an empty worker, and one worker at a time makes room for them."""

from __future__ import annotations

from mlxq.protocol.scripts import DONE
from tests.protocol.wire import LEASE_MS, Wire


async def test_a_suspect_waits_for_an_empty_worker(wire: Wire) -> None:
    await wire.running("a")
    await wire.lapse("a")
    take = await wire.take("w2", 4)
    assert (take.jobs, take.make_room) == ([], True)
    take = await wire.take("w2", 4, alone=True)
    assert [(job.id, job.attempt, job.solo) for job in take.jobs] == [("a", 2, True)]
    assert not take.make_room


async def test_a_suspect_comes_alone_and_before_all_else(wire: Wire) -> None:
    await wire.running("suspect", lane="low")
    await wire.lapse("suspect")
    for i in range(3):
        await wire.enqueue(f"j{i}", "high")
    take = await wire.take("w2", 4, alone=True)
    assert [(job.id, job.solo) for job in take.jobs] == [("suspect", True)]
    assert await wire.take_ids("w3", 4) == ["j0", "j1", "j2"]


async def test_two_suspects_go_to_two_empty_workers(wire: Wire) -> None:
    for job_id in ("a", "b"):
        await wire.running(job_id)
    await wire.lapse("a", "b")
    assert await wire.take_ids("w2", 4, alone=True) == ["a"]
    assert await wire.take_ids("w3", 4, alone=True) == ["b"]


async def test_alone_without_a_suspect_takes_as_usual(wire: Wire) -> None:
    await wire.running("lapsed", tokens=1)
    await wire.lapse("lapsed")
    await wire.enqueue("new")
    take = await wire.take("w2", 4, alone=True)
    assert [(job.id, job.solo) for job in take.jobs] == [("lapsed", False), ("new", False)]


async def test_a_healthy_job_is_taken_past_a_suspect(wire: Wire) -> None:
    await wire.running("suspect")
    await wire.lapse("suspect")
    await wire.enqueue("healthy")
    take = await wire.take("w2", 4)
    assert [job.id for job in take.jobs] == ["healthy"]
    assert take.make_room


async def test_a_suspect_that_lost_its_group_is_left_claimable(wire: Wire) -> None:
    await wire.running("suspect")
    await wire.release("w1", "crash", ("suspect", 1))
    await wire.command("XGROUP", "DESTROY", wire.keys.lane("normal"), "workers")
    assert await wire.take_ids("w2", 4) == []
    take = await wire.take("w3", 4, alone=True)
    assert [(job.id, job.solo) for job in take.jobs] == [("suspect", True)]


async def test_a_suspect_from_a_lost_group_brings_nothing_along(wire: Wire) -> None:
    await wire.running("suspect")
    await wire.release("w1", "crash", ("suspect", 1))
    await wire.enqueue("healthy")
    await wire.command("XGROUP", "DESTROY", wire.keys.lane("normal"), "workers")
    await wire.take("w0", 1)  # makes the group; leaves the suspect, takes the healthy one
    await wire.command("XGROUP", "DESTROY", wire.keys.lane("normal"), "workers")
    await wire.command("XGROUP", "CREATE", wire.keys.lane("normal"), "workers", 0)
    take = await wire.take("w2", 4, alone=True)
    assert [(job.id, job.solo) for job in take.jobs] == [("suspect", True)]
    assert await wire.look("w0", "healthy", 1) == DONE


async def test_recover_of_a_suspect(wire: Wire) -> None:
    await wire.enqueue()
    await wire.crash("a", "w1")
    await wire.take("w2", alone=True)
    take = await wire.take("w2", 4, alone=True, recover=True)
    assert [(job.id, job.attempt, job.solo) for job in take.jobs] == [("a", 3, True)]
    # Not alone any more: it is left to whoever is.
    assert (await wire.take("w2", 4, recover=True)).jobs == []
    assert await wire.take_ids("w3", alone=True) == ["a"]


async def test_one_worker_at_a_time_makes_room(wire: Wire) -> None:
    await wire.running()
    await wire.lapse("a")
    assert (await wire.take("w2")).make_room
    assert not (await wire.take("w3")).make_room
    assert (await wire.take("w2")).make_room
    solo, until = await wire.client.hmget(wire.keys.meta, "solo", "solo_until")
    seconds, micros = await wire.command("TIME")
    assert solo == b"w2"
    assert 0 < int(until) - (seconds * 1000 + micros // 1000) <= 2 * LEASE_MS
    await wire.command("HSET", wire.keys.meta, "solo_until", 1)
    assert (await wire.take("w3")).make_room
    assert not (await wire.take("w2")).make_room


async def test_nobody_makes_room_without_a_suspect(wire: Wire) -> None:
    await wire.running(tokens=1)
    await wire.lapse("a")
    assert not (await wire.take("w2")).make_room
    assert await wire.client.hget(wire.keys.meta, "solo") is None
