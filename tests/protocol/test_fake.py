"""The same scripts on fakeredis: quick to run, and proof of nothing about a real server."""

from __future__ import annotations

import json

from mlxq.protocol.scripts import (
    ABORTED,
    DONE,
    FENCED,
    GAP,
    REPEATED,
    EmitItem,
    Enqueued,
    Sweep,
    Taken,
    look,
)
from tests.protocol.wire import DONE_EVENT, SPEC, TOKEN, Wire, heard


async def test_enqueue(fake: Wire) -> None:
    assert await fake.enqueue("a", cap=1) == Enqueued("ok", "queued")
    assert await fake.enqueue("a", cap=1) == Enqueued("dup", "queued")
    assert await fake.enqueue("b", cap=1) == Enqueued("full", "1")
    assert await fake.enqueue("a:b") == Enqueued("bad_id", "")
    assert await fake.enqueue("b", max_bytes=1) == Enqueued("too_large", "")


async def test_take_in_lane_order(fake: Wire) -> None:
    await fake.enqueue("low", "low")
    await fake.enqueue("high", "high")
    take = await fake.take(n=2)
    assert take.jobs == [
        Taken("high", 1, 0, 0, False, SPEC, "high"),
        Taken("low", 1, 0, 0, False, SPEC, "low"),
    ]
    assert (await fake.take()).jobs == []


async def test_emit_and_finish(fake: Wire) -> None:
    await fake.running()
    async with fake.listening() as subscription:
        items = [EmitItem("a", 1, 1, 1, TOKEN), EmitItem("a", 1, 1, 1, TOKEN)]
        assert await fake.emit("w1", *items, EmitItem("a", 1, 3, 3, TOKEN)) == [DONE, REPEATED, GAP]
        assert await fake.finish("w1", "a", 1, DONE_EVENT, seq=2, tokens=1) == DONE
        ids = [json.loads(message)["id"] for message in await heard(subscription, 2)]
        assert ids == ["1-1", "1-2"]
    assert await fake.finish("w1", "a", 1, DONE_EVENT, seq=2, tokens=1) == REPEATED
    assert await fake.is_closed()


async def test_a_lapsed_job_is_resumed_and_its_owner_fenced(fake: Wire) -> None:
    await fake.running(tokens=2)
    await fake.lapse("a")
    assert (await fake.take("w2")).jobs == [Taken("a", 2, 2, 2, False, SPEC)]
    assert await fake.emit("w1", EmitItem("a", 1, 3, 3, TOKEN)) == [FENCED]
    assert await fake.beat("w1", ("a", 1)) == [FENCED]
    assert await fake.beat("w2", ("a", 2)) == [DONE]
    assert await fake.fields("a", "crashes", "strikes") == ["1", "0"]


async def test_a_released_job_is_taken_at_once(fake: Wire) -> None:
    await fake.running(tokens=1)
    assert await fake.release("w1", "drain", ("a", 1)) == [DONE]
    assert await fake.take_ids("w2") == ["a"]
    assert await fake.event_ids() == ["1-1", "1-2"]


async def test_a_suspect_waits_for_an_empty_worker(fake: Wire) -> None:
    await fake.running()
    await fake.lapse("a")
    take = await fake.take("w2", 4)
    assert (take.jobs, take.make_room) == ([], True)
    assert [job.solo for job in (await fake.take("w2", 4, alone=True)).jobs] == [True]


async def test_abort_and_sweep(fake: Wire) -> None:
    await fake.running("running")
    await fake.enqueue("queued")
    await fake.ask_abort("running")
    await fake.ask_abort("queued")
    assert await fake.emit("w1", look("running", 1)) == [ABORTED]
    assert await fake.sweep() == Sweep(1, 1, True)
    assert await fake.is_closed("running") and await fake.is_closed("queued")
    assert [await fake.abort("running"), await fake.abort("none")] == ["finished", "unknown"]


async def test_a_broken_transcript(fake: Wire) -> None:
    await fake.running(tokens=1)
    await fake.command("XADD", fake.keys.events("a"), "1-9", "e", "{}")
    assert await fake.emit("w1", EmitItem("a", 1, 2, 2, TOKEN)) == [-5]
    assert await fake.is_closed()
