"""ABORT ends a job in any state; SWEEP makes abort keys and deadlines effective without workers."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ResponseError

from mlxq.protocol.keys import GROUP, LANES
from mlxq.protocol.scripts import DONE, FENCED, EmitItem, Enqueued, Sweep
from tests.protocol.wire import LEASE_MS, TOKEN, Wire, heard


async def test_abort_of_a_queued_job(wire: Wire) -> None:
    await wire.enqueue()
    async with wire.listening() as subscription:
        assert await wire.abort() == "aborted"
        assert await heard(subscription, 1) == [
            b'{"id":"0-1","type":"done","finish_reason":"aborted",'
            b'"attempts":0,"usage":{"completion_tokens":0}}'
        ]
    assert await wire.is_closed()
    assert await wire.take_ids() == []


async def test_abort_of_a_running_job(wire: Wire) -> None:
    await wire.running(tokens=2)
    assert await wire.abort() == "aborted"
    assert await wire.is_closed()
    assert await wire.event_ids() == ["1-1", "1-2", "1-3"]
    assert await wire.look() == FENCED
    assert await wire.holders() == []


async def test_abort_of_a_job_tells_the_length_of_its_prompt(wire: Wire) -> None:
    """What a worker had said of it, on any attempt; text that looks like it is only text."""
    await wire.running()
    started = (
        rb'{"type":"started","attempt":1,"worker":"w\"prompt_tokens\":9","model":"m",'
        rb'"prompt_tokens":34,"cached_tokens":16}'
    )
    assert await wire.emit("w1", EmitItem("a", 1, 1, 0, started)) == [DONE]
    assert await wire.emit("w1", EmitItem("a", 1, 2, 1, TOKEN)) == [DONE]
    await wire.release("w1", "drain", ("a", 1))
    assert await wire.abort() == "aborted"
    _, terminal = (await wire.events())[-1]
    assert terminal["usage"] == {"prompt_tokens": 34, "completion_tokens": 1}


async def test_abort_of_a_released_job(wire: Wire) -> None:
    await wire.running(tokens=1)
    await wire.release("w1", "drain", ("a", 1))
    assert await wire.abort() == "aborted"
    assert await wire.is_closed()
    assert await wire.event_ids() == ["1-1", "1-2", "1-3"]


async def test_abort_of_a_finished_job_does_no_harm(wire: Wire) -> None:
    await wire.running()
    await wire.finish()
    before = await wire.job()
    assert [await wire.abort(), await wire.abort()] == ["finished", "finished"]
    assert await wire.job() == before
    assert not await wire.client.exists(wire.keys.abort("a"))


async def test_abort_twice(wire: Wire) -> None:
    await wire.enqueue()
    assert [await wire.abort(), await wire.abort()] == ["aborted", "finished"]
    assert len(await wire.events()) == 1


async def test_abort_of_an_unknown_job_dooms_a_late_enqueue(wire: Wire) -> None:
    assert await wire.abort() == "unknown"
    assert 0 < await wire.client.ttl(wire.keys.abort("a")) <= 60
    assert await wire.enqueue() == Enqueued("ok", "queued")
    assert await wire.take_ids() == []
    assert await wire.is_closed()
    assert (await wire.events())[-1][1]["finish_reason"] == "aborted"


@pytest.mark.parametrize("job_id", ["", "a:b", "a" * 65])
async def test_abort_of_an_impossible_id_leaves_nothing(wire: Wire, job_id: str) -> None:
    assert await wire.abort(job_id) == "unknown"
    assert await wire.client.keys(f"{wire.keys.tag}:*") == []


async def test_abort_and_then_set_of_the_key_leaves_the_job_alone(wire: Wire) -> None:
    await wire.enqueue()
    await wire.abort()
    await wire.ask_abort()
    assert (await wire.sweep()).closed == 0
    assert len(await wire.events()) == 1


async def test_sweep_closes_queued_and_running_jobs(wire: Wire) -> None:
    await wire.running("running")
    await wire.enqueue("queued", "low")
    await wire.enqueue("late", "high")
    await wire.enqueue("good")
    await wire.ask_abort("running")
    await wire.ask_abort("queued")
    await wire.pass_deadline("late")
    assert await wire.sweep() == Sweep(4, 3, True)
    for job_id in ("running", "queued", "late"):
        assert await wire.is_closed(job_id)
    assert await wire.queued() == ["good"]


async def test_sweep_walks_from_a_shared_cursor_and_wraps(wire: Wire) -> None:
    for lane in LANES:
        for i in range(3):
            await wire.enqueue(f"{lane}{i}", lane)
    replies = [await wire.sweep(4) for _ in range(3)]
    assert replies == [Sweep(4, 0, False), Sweep(4, 0, False), Sweep(1, 0, True)]
    lane, start = await wire.client.hmget(wire.keys.meta, "sweep_lane", "sweep_from")
    assert (lane, start) == (b"high", b"-")
    await wire.ask_abort("low2")
    assert sum([(await wire.sweep(4)).closed for _ in range(3)]) == 1


async def test_sweep_that_ends_with_a_lane_goes_on_behind_it(wire: Wire) -> None:
    for i in range(2):
        await wire.enqueue(f"high{i}", "high")
    await wire.enqueue("low", "low")
    assert [await wire.sweep(2) for _ in range(2)] == [Sweep(2, 0, False), Sweep(1, 0, True)]


async def test_sweep_of_an_empty_queue(wire: Wire) -> None:
    assert await wire.sweep() == Sweep(0, 0, True)


async def test_sweep_drops_entries_of_missing_and_finished_jobs(wire: Wire) -> None:
    for job_id in ("missing", "done", "good"):
        await wire.enqueue(job_id)
    await wire.command("DEL", wire.keys.job("missing"))
    await wire.command("HSET", wire.keys.job("done"), "state", "failed")
    assert await wire.sweep() == Sweep(3, 0, True)
    assert await wire.queued() == ["good"]


async def test_sweep_keeps_consumers_that_hold_entries_or_were_seen(wire: Wire) -> None:
    await wire.running("a", "w1")
    await wire.running("b", "w2")
    await wire.finish("w2", "b")
    await wire.lapse("a", idle_ms=7_200_000)
    assert (await wire.sweep()).wrapped
    consumers = await wire.client.xinfo_consumers(wire.keys.lane("normal"), GROUP)
    assert {consumer["name"] for consumer in consumers} == {b"w1", b"w2"}


async def test_sweep_forgets_consumers_without_entries_that_are_long_gone(wire: Wire) -> None:
    """The hour is shortened in the script's text: a server's idle time cannot be set."""
    await wire.running("a", "w1")
    await wire.running("b", "w2")
    await wire.finish("w2", "b")
    await asyncio.sleep(0.01)
    call = wire.scripts.sweep()
    source = call.script.source.replace("CONSUMER_IDLE_MS = 3600 * 1000", "CONSUMER_IDLE_MS = 1")
    assert source != call.script.source
    await wire.command("EVAL", source, 1, call.key, *call.args)
    for lane in LANES:
        consumers = await wire.client.xinfo_consumers(wire.keys.lane(lane), GROUP)
        assert {consumer["name"] for consumer in consumers} == (
            {b"w1"} if lane == "normal" else set()
        )
    assert await wire.beat("w1", ("a", 1)) == [1]
    assert (await wire.take("w2", lease_ms=LEASE_MS)).jobs == []


@pytest.mark.parametrize("args", [(), (0,), ("x",), (1, 2)])
async def test_wrong_arguments_of_sweep_are_told(wire: Wire, args: tuple[str | int, ...]) -> None:
    call = wire.scripts.sweep()
    with pytest.raises(ResponseError, match="expected pub chunk"):
        await wire.command("EVAL", call.script.source, 1, call.key, "PUBLISH", *args)


async def test_wrong_arguments_of_abort_are_told(wire: Wire) -> None:
    call = wire.scripts.abort("a")
    with pytest.raises(ResponseError, match="expected pub id"):
        await wire.command("EVAL", call.script.source, 1, call.key, "PUBLISH")
