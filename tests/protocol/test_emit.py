"""EMIT: stored once, in order, by the owner alone; every status it can give."""

from __future__ import annotations

import json

import pytest
from redis.exceptions import ResponseError

from mlxq.protocol.scripts import (
    ABORTED,
    BROKEN,
    DONE,
    EXPIRED,
    FENCED,
    GAP,
    REPEATED,
    EmitItem,
    look,
    run,
)
from tests.protocol.wire import TOKEN, Wire, heard


def token(seq: int, *, job_id: str = "a", attempt: int = 1, tokens: int = 0) -> EmitItem:
    return EmitItem(job_id, attempt, seq, tokens or seq, TOKEN)


async def test_stores_counts_and_publishes(wire: Wire) -> None:
    await wire.running()
    async with wire.listening() as subscription:
        assert await wire.emit("w1", EmitItem("a", 1, 1, 3, TOKEN)) == [DONE]
        assert await heard(subscription, 1) == [b'{"id":"1-1",' + TOKEN[1:]]
    assert await wire.events() == [("1-1", json.loads(TOKEN))]
    assert await wire.fields("a", "seq", "tokens", "begun") == ["1", "3", "1"]
    assert await wire.client.pttl(wire.keys.events("a")) == -1


async def test_a_look_stores_nothing(wire: Wire) -> None:
    await wire.running()
    before = await wire.job()
    assert await wire.emit("w1", look("a", 1)) == [DONE]
    assert await wire.job() == before
    assert await wire.events() == []


async def test_a_look_is_the_receipt(wire: Wire) -> None:
    await wire.enqueue()
    await wire.take()
    assert await wire.fields("a", "begun") == [""]
    assert await wire.look() == DONE
    assert await wire.fields("a", "begun") == ["1"]


async def test_repeated_byte_for_byte(wire: Wire) -> None:
    await wire.running()
    call = wire.scripts.emit("w1", [token(1), token(2)])
    assert await run(wire.client, call) == [DONE, DONE]
    async with wire.listening() as subscription:
        assert await run(wire.client, call) == [REPEATED, REPEATED]
        assert await wire.emit("w1", token(3)) == [DONE]
        [message] = await heard(subscription, 1)
        assert json.loads(message)["id"] == "1-3"
    assert await wire.event_ids() == ["1-1", "1-2", "1-3"]
    assert await wire.fields("a", "tokens") == ["3"]


async def test_a_gap_is_refused(wire: Wire) -> None:
    await wire.running(tokens=1)
    assert await wire.emit("w1", token(3)) == [GAP]
    assert await wire.event_ids() == ["1-1"]
    assert await wire.emit("w1", token(2), token(3)) == [DONE, DONE]


async def test_several_jobs_and_several_items_of_one(wire: Wire) -> None:
    await wire.running("a")
    await wire.running("b")
    statuses = await wire.emit(
        "w1",
        token(1),
        look("b", 1),
        token(2),
        token(1),
        token(4),
        token(1, job_id="b"),
        token(1, job_id="none"),
    )
    assert statuses == [DONE, DONE, DONE, REPEATED, GAP, DONE, FENCED]
    assert await wire.event_ids("a") == ["1-1", "1-2"]
    assert await wire.event_ids("b") == ["1-1"]


async def test_no_items(wire: Wire) -> None:
    assert await wire.emit("w1") == []


@pytest.mark.parametrize(
    ("owner", "attempt"),
    [("w2", 1), ("w1", 2), ("w1", 0), ("", 1)],
)
async def test_fenced(wire: Wire, owner: str, attempt: int) -> None:
    await wire.running()
    assert await wire.emit(owner, token(1, attempt=attempt), look("a", attempt)) == [FENCED] * 2
    assert await wire.events() == []


async def test_fenced_when_queued_finished_or_unknown(wire: Wire) -> None:
    await wire.enqueue("queued")
    await wire.running("done", lane="high")
    await wire.abort("done")
    statuses = await wire.emit(
        "w1",
        token(1, job_id="queued", attempt=0),
        token(1, job_id="done"),
        token(2, job_id="done"),
        token(1, job_id="unknown"),
    )
    assert statuses == [FENCED] * 4
    assert await wire.events("queued") == [] == await wire.events("unknown")
    assert len(await wire.events("done")) == 1


async def test_a_zombie_neither_stores_nor_publishes(wire: Wire) -> None:
    await wire.running(tokens=1)
    await wire.lapse("a")
    [job] = (await wire.take("w2")).jobs
    async with wire.listening() as subscription:
        assert await wire.emit("w1", token(2)) == [FENCED]
        assert await wire.emit("w2", token(2, attempt=2)) == [DONE]
        assert await wire.emit("w1", token(3)) == [FENCED]
        [message] = await heard(subscription, 1)
        assert json.loads(message)["id"] == "2-2"
    assert await wire.event_ids() == ["1-1", "2-2"]
    assert job.attempt == 2


async def test_seq_goes_on_over_attempts(wire: Wire) -> None:
    await wire.running(tokens=2)
    await wire.release("w1", "drain", ("a", 1))
    await wire.take("w2")
    assert await wire.emit("w2", token(1, attempt=2), token(4, attempt=2)) == [REPEATED, DONE]
    assert await wire.event_ids() == ["1-1", "1-2", "1-3", "2-4"]


async def test_an_abort_key_closes_and_drops_the_tokens(wire: Wire) -> None:
    await wire.running(tokens=2)
    await wire.ask_abort()
    async with wire.listening() as subscription:
        assert await wire.emit("w1", token(3), token(4), look("a", 1)) == [ABORTED, FENCED, FENCED]
        assert await heard(subscription, 1) == [
            b'{"id":"1-3","type":"done","finish_reason":"aborted",'
            b'"attempts":1,"usage":{"completion_tokens":2}}'
        ]
    assert await wire.is_closed()
    assert await wire.event_ids() == ["1-1", "1-2", "1-3"]
    assert await wire.fields("a", "state", "seq", "tokens", "by") == ["done", "3", "2", ""]
    assert "result" not in await wire.job()


async def test_a_look_meets_the_abort_key(wire: Wire) -> None:
    await wire.running()
    await wire.ask_abort()
    assert await wire.look() == ABORTED
    assert await wire.is_closed()


async def test_a_passed_deadline_closes_and_drops_the_tokens(wire: Wire) -> None:
    await wire.running(tokens=1)
    await wire.pass_deadline()
    assert await wire.emit("w1", token(2)) == [EXPIRED]
    assert await wire.is_closed()
    assert await wire.fields("a", "state") == ["failed"]
    event_id, event = (await wire.events())[-1]
    assert (event_id, event["code"]) == ("1-2", "deadline_exceeded")


async def test_a_deadline_to_come_does_nothing(wire: Wire) -> None:
    await wire.enqueue(deadline_ms=3_600_000)
    await wire.take()
    assert await wire.emit("w1", token(1)) == [DONE]


async def test_only_the_owner_meets_the_gate(wire: Wire) -> None:
    await wire.running()
    await wire.ask_abort()
    assert await wire.emit("w2", token(1)) == [FENCED]
    assert not await wire.is_closed()


async def test_a_transcript_ahead_of_the_hash_is_broken(wire: Wire) -> None:
    """Nothing the scripts do leads there; one broken job must not stop the others."""
    await wire.running("a", tokens=1)
    await wire.running("b")
    await wire.command("XADD", wire.keys.events("a"), "1-9", "e", "{}")
    assert await wire.emit("w1", token(2), token(1, job_id="b")) == [BROKEN, DONE]
    assert await wire.is_closed("a")
    [(event_id, event)] = await wire.events("a")
    assert (event_id, event["type"], event["code"]) == ("1-2", "failed", "internal")
    assert await wire.event_ids("b") == ["1-1"]


async def test_a_transcript_of_another_type_is_broken(wire: Wire) -> None:
    await wire.running()
    await wire.command("SET", wire.keys.events("a"), "x")
    assert await wire.emit("w1", token(1)) == [BROKEN]
    assert await wire.is_closed()


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("w1", "a", 1, 1, 1),
        ("w1", "a", "one", 1, 1, TOKEN),
        ("w1", "a", 1, -1, 1, TOKEN),
        ("w1", "a", 1, 1, "", TOKEN),
        ("w1", "a", 1, 1, 1, TOKEN, "a", 1, 2, "x", TOKEN),
    ],
)
async def test_wrong_arguments_are_told_and_nothing_is_stored(
    wire: Wire, args: tuple[str | int | bytes, ...]
) -> None:
    await wire.running()
    call = wire.scripts.emit("w1", [])
    with pytest.raises(ResponseError, match="expected pub owner"):
        await wire.command("EVAL", call.script.source, 1, call.key, "PUBLISH", *args)
    assert await wire.events() == []
