"""ENQUEUE: one hash, one lane entry, one ring of the bell, or a refusal that leaves nothing."""

from __future__ import annotations

import pytest
from redis.exceptions import ResponseError

from mlxq.protocol.keys import LANES, Lane
from mlxq.protocol.scripts import Enqueued, run
from tests.protocol.wire import SPEC, Wire


async def keys_of(wire: Wire) -> set[str]:
    return {key.decode() for key in await wire.client.keys(f"{wire.keys.tag}:*")}


async def test_writes_hash_lane_and_bell_and_no_event(wire: Wire) -> None:
    reply = await wire.enqueue("a", "high", deadline_ms=5_000, retention_ms=7_000, replay_ms=6_000)
    assert reply == Enqueued("ok", "queued")
    job = await wire.job()
    created = int(job["created"])
    assert job == {
        "spec": SPEC.decode(),
        "state": "queued",
        "lane": "high",
        "entry": job["entry"],
        "created": str(created),
        "deadline": str(created + 5_000),
        "retention": "7000",
        "replay": "6000",
        "attempt": "0",
        "seq": "0",
        "tokens": "0",
    }
    seconds, micros = await wire.command("TIME")
    assert 0 <= seconds * 1000 + micros // 1000 - created < 60_000
    [(entry, fields)] = await wire.client.xrange(wire.keys.lane("high"))
    assert (entry.decode(), fields) == (job["entry"], {b"id": b"a"})
    assert await wire.client.xlen(wire.keys.bell) == 1
    assert await wire.client.pttl(wire.keys.job("a")) == -1
    assert await keys_of(wire) == {wire.keys.job("a"), wire.keys.lane("high"), wire.keys.bell}


async def test_no_deadline_is_zero(wire: Wire) -> None:
    await wire.enqueue()
    assert (await wire.job())["deadline"] == "0"


async def test_dup_changes_nothing_and_tells_the_state(wire: Wire) -> None:
    await wire.enqueue()
    before = await wire.job()
    assert await wire.enqueue(spec=b'{"prompt":"other"}') == Enqueued("dup", "queued")
    assert await wire.job() == before
    assert await wire.queued() == ["a"]
    await wire.take()
    assert await wire.enqueue() == Enqueued("dup", "running")
    await wire.abort()
    assert await wire.enqueue() == Enqueued("dup", "done")


async def test_dup_comes_before_the_cap(wire: Wire) -> None:
    await wire.enqueue("a", cap=1)
    assert await wire.enqueue("a", cap=1) == Enqueued("dup", "queued")
    assert await wire.enqueue("b", cap=1) == Enqueued("full", "1")


async def test_cap_counts_queued_and_running_jobs_of_all_lanes(wire: Wire) -> None:
    for job_id, lane in zip("abc", LANES, strict=True):
        await wire.enqueue(job_id, lane, cap=3)
    await wire.take()
    before = await keys_of(wire)
    assert await wire.enqueue("d", cap=3) == Enqueued("full", "3")
    assert await keys_of(wire) == before
    await wire.abort("b")
    assert await wire.enqueue("d", cap=3) == Enqueued("ok", "queued")


async def test_cap_zero_is_no_cap(wire: Wire) -> None:
    for i in range(5):
        assert (await wire.enqueue(f"j{i}", cap=0)).status == "ok"


@pytest.mark.parametrize(
    "job_id",
    ["", "a" * 65, "a b", "a:b", "a.b", "é", "a\n", "a\0", "*", "{x}"],
)
async def test_bad_id(wire: Wire, job_id: str) -> None:
    assert await wire.enqueue(job_id) == Enqueued("bad_id", "")
    assert await keys_of(wire) == set()


@pytest.mark.parametrize("job_id", ["a", "A-Z_09", "-", "_", "a" * 64])
async def test_good_id(wire: Wire, job_id: str) -> None:
    assert await wire.enqueue(job_id) == Enqueued("ok", "queued")


@pytest.mark.parametrize("lane", ["", "urgent", "HIGH"])
async def test_wrong_lane_is_refused_like_a_bad_id(wire: Wire, lane: Lane) -> None:
    assert await wire.enqueue("a", lane) == Enqueued("bad_id", "")
    assert await keys_of(wire) == set()


async def test_too_large_counts_bytes(wire: Wire) -> None:
    spec = '{"prompt":"é"}'.encode()
    assert await wire.enqueue(spec=spec, max_bytes=len(spec) - 1) == Enqueued("too_large", "")
    assert await keys_of(wire) == set()
    assert (await wire.enqueue(spec=spec, max_bytes=len(spec))).status == "ok"


async def test_bell_keeps_one_entry_and_its_id_moves(wire: Wire) -> None:
    await wire.enqueue("a")
    first = (await wire.take()).bell_id
    await wire.enqueue("b")
    assert await wire.client.xlen(wire.keys.bell) == 1
    rung = await wire.client.xread({wire.keys.bell: first})
    assert len(rung) == 1


async def test_an_abort_key_is_not_read(wire: Wire) -> None:
    assert await wire.abort() == "unknown"
    assert await wire.enqueue() == Enqueued("ok", "queued")
    assert await wire.events() == []


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("a", SPEC, "normal"),
        ("a", SPEC, "normal", "soon", 0, 1, 1, 1),
        ("a", SPEC, "normal", -1, 0, 1, 1, 1),
        ("a", SPEC, "normal", 0, 0, 0, 1, 1),
        ("a", SPEC, "normal", 0, 0, 1, 0, 1),
        ("a", SPEC, "normal", 0, 0, 1, 1, 1, "extra"),
    ],
)
async def test_wrong_arguments_are_told(wire: Wire, args: tuple[str | int, ...]) -> None:
    source = wire.scripts.enqueue("a", SPEC).script.source
    with pytest.raises(ResponseError, match="expected pub id spec lane"):
        await wire.command("EVAL", source, 1, wire.keys.job("a"), "PUBLISH", *args)
    assert await keys_of(wire) == set()


@pytest.mark.parametrize("key", ["job:a", "{other:q}:job:a", "x{mlxq:q}:job:a", "{mlxq:}:job:a"])
async def test_a_key_without_the_tag_is_told(wire: Wire, key: str) -> None:
    call = wire.scripts.abort("a")
    with pytest.raises(ResponseError, match="KEYS"):
        await wire.command("EVAL", call.script.source, 1, key, "PUBLISH", "a")


async def test_a_publish_command_of_another_kind_is_told(wire: Wire) -> None:
    call = wire.scripts.abort("a")
    with pytest.raises(ResponseError, match="SPUBLISH"):
        await wire.command("EVAL", call.script.source, 1, call.key, "FLUSHALL", "a")


async def test_the_same_call_is_the_same_bytes(wire: Wire) -> None:
    call = wire.scripts.enqueue("a", SPEC)
    assert call == wire.scripts.enqueue("a", SPEC)
    assert (await run(wire.client, call)).status == "ok"
    assert (await run(wire.client, call)).status == "dup"
